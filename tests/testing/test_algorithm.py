"""The checks of an algorithm: each catches its own fault and no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrig.testing import check_algorithm
from agentrig.testing.algorithm import TABLE

BROKEN = Path(__file__).parent / "broken" / "algorithms.py"
CHECKS = [declared.name.partition(".")[2] for declared in TABLE]


def test_a_fault_is_caught_by_its_own_check(tmp_path: Path) -> None:
    _caught("moves", tmp_path, ["loads", "runs", "figures", "moves", "weight-change"])


@pytest.mark.slow
@pytest.mark.parametrize("fault", CHECKS)
def test_each_fault_is_caught_by_its_own_check_alone(fault: str, tmp_path: Path) -> None:
    _caught(fault, tmp_path, None)


def _caught(fault: str, model: Path, only: list[str] | None) -> None:
    learns = 8 if fault == "solves" else 0
    report = check_algorithm(f"{BROKEN}:breaks-{fault}", raise_failed=False, model=model, learns=learns, only=only)
    assert [r.check for r in report.failed] == [f"algorithm.{fault}"], report
    assert "what to do: " in report.failed[0].message


@pytest.mark.slow
def test_an_algorithm_without_a_fault_solves_the_bandit(tmp_path: Path) -> None:
    report = check_algorithm(f"{BROKEN}:fine", model=tmp_path, learns=8)
    assert {r.status for r in report.results} == {"passed"}
