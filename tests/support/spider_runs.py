"""Runs agentrig's commands as a user of Agent Lightning does: on real Spider, without a key."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

GPU = (pytest.mark.gpu, pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="there is no NVIDIA GPU"))


def agentrig(*words: str, folder: Path, spider: Path, timeout: float = 280) -> str:
    """Run a command in a folder and return what it printed; Spider is named by upstream's own variable."""
    environment = {k: v for k, v in os.environ.items() if k not in ("OPENAI_API_KEY", "AGENTRIG_SPIDER_DIR")}
    done = subprocess.run(
        [sys.executable, "-m", "agentrig", *words],
        cwd=folder,
        env={**environment, "VERL_SPIDER_DATA_DIR": str(spider)},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout
