"""`agentrig eval` on real Spider, with a server that replays known answers, finds what the reward finds directly."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))


@pytest.mark.parametrize("limit", [40, pytest.param(0, marks=pytest.mark.slow)])
def test_accuracy_equals_the_rewards_own(
    limit: int, spider_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from spider_eval import compare

    monkeypatch.setenv("AGENTRIG_SPIDER_DIR", str(spider_dir))
    found = compare(limit, tmp_path, "spider")
    assert found["n"] == found["direct_n"] == (limit or 1034)
    assert found["accuracy"] == found["direct_accuracy"]
    assert 0.5 < found["accuracy"] < 0.95, "the answers are a mixture of right and wrong"
    assert found["failures"] == {}
    assert found["same_answers"] == found["n"]
