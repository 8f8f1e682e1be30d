"""The kit on this plugin's own task sets and rewards."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agentrig.testing import Check, check, checks

SPIDER = Path(os.environ.get("AGENTRIG_SPIDER_DIR") or Path(__file__).resolve().parents[4] / "shared" / "spider")
REWARDS = ("spider-exec", "spider-exec-strict")
CHECKS = [
    *checks("tasks", "mini-sql", splits=["dev", "test"]),
    *(check for reward in REWARDS for check in checks("reward", reward, tasks="mini-sql", limit=6)),
]


@pytest.mark.parametrize("check", CHECKS, ids=str)
def test_the_kit(check: Check) -> None:
    check()


@pytest.mark.skipif(not (SPIDER / "dev.parquet").is_file(), reason="real Spider is not there: set AGENTRIG_SPIDER_DIR")
def test_spider() -> None:
    report = check("tasks", "spider", settings={"dir": str(SPIDER)}, splits=["dev"], only=["rows", "gold-apart"])
    assert [r.status for r in report.results] == ["passed"] * 2
