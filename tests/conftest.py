"""What the tests of the core share."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(Path(__file__).parent / "support"))


@pytest.fixture(scope="session")
def spider_dir() -> Path:
    """Real Spider, where it is there."""
    for candidate in (os.environ.get("AGENTRIG_SPIDER_DIR"), str(ROOT.parent / "shared" / "spider")):
        if candidate and (Path(candidate) / "dev.parquet").is_file():
            return Path(candidate)
    pytest.skip("real Spider is not there; set AGENTRIG_SPIDER_DIR to run this test")
