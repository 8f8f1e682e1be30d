"""The checks of recipes and observers: each catches its own fault and no other; agentrig's own pass."""

from __future__ import annotations

from pathlib import Path

import pytest
from quick import quick_first

from agentrig.testing import check, check_recipe
from agentrig.testing.kit import table_of

BROKEN = Path(__file__).parent / "broken" / "recipes.py"
KINDS = {"recipe": {}, "observer": {"rollout_s": 0.01}}
CHECKS = [declared.name for kind in KINDS for declared in table_of(kind)]


@pytest.mark.parametrize("name", quick_first(CHECKS, ("recipe.resolves", "observer.loads")))
def test_each_fault_is_caught_by_its_own_check(name: str) -> None:
    kind, _, fault = name.partition(".")
    more = {} if fault == "fast" or kind == "recipe" else {"rollout_s": 60.0}
    report = check(kind, f"{BROKEN}:breaks-{fault}", raise_failed=False, **{**KINDS[kind], **more})
    assert [r.check for r in report.failed] == [name], report
    assert "what to do: " in report.failed[0].message


@pytest.mark.parametrize("kind", KINDS)
def test_one_without_a_fault_passes(kind: str) -> None:
    report = check(kind, f"{BROKEN}:breaks-fine", **({} if kind == "recipe" else {"rollout_s": 60.0}))
    assert {r.status for r in report.results} == {"passed"}


@pytest.mark.parametrize("name", ["mini", "spider"])
def test_the_recipes_of_agentrig(name: str) -> None:
    check_recipe(name)
