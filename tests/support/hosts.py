"""Stand-in tools, and what the doctor finds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ONE_GPU = "0, GPU-a, NVIDIA H200, 143771, 580.82.07\n"
"""What nvidia-smi prints on a host with one GPU."""


def tool(folder: Path, name: str, prints: str, *, status: int = 0, channel: str = "") -> str:
    """Write a program that prints a text and ends with a status; return a PATH on which it is first."""
    file = folder / name
    file.write_text(f"#!/bin/sh\n/bin/cat <<'END'{channel}\n{prints}END\nexit {status}\n")
    file.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def doctor(*words: str, **environ: str) -> tuple[int, dict[str, dict[str, str]]]:
    """Return the exit status of `agentrig doctor` in a process, and its findings by check."""
    done = subprocess.run(
        [sys.executable, "-m", "agentrig", "doctor", *words, "--json"],
        capture_output=True, text=True, env={**os.environ, **environ}, check=False,
    )  # fmt: skip
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    assert report["could_start"] is (done.returncode == 0)
    return done.returncode, {f["check"]: f for f in report["findings"]}


def only(findings: Iterable[Any], result: str | None = None) -> Any:
    """Return the only finding, which must have that result."""
    (finding,) = findings
    assert result in (None, finding.result), finding
    return finding
