"""Each check catches the plugin that breaks its property, no other check does, and the message names the cure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentrig.testing import check
from agentrig.testing.kit import table_of

FOLDER = Path(__file__).parent / "broken"
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "tasks": ("task_sets.py", {}),
    "reward": (
        "rewards.py",
        {
            "tasks_n": 4,
            "budget_s": 0.5,
            "ladder": lambda t: ["?", *(str(int(t.private["gold"]) + i) for i in (2, 1)), t.private["gold"]],
        },
    ),
    "adapter": ("adapters.py", {}),
}
"""The file of each kind's plugins (`fine`, and one named as each check), and the options of its checks."""
NOT_HERE = {"reward.batch"}
"""Checks that do not apply to `fine`."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_plugin_without_a_fault_passes_every_check(kind: str) -> None:
    file, options = KINDS[kind]
    report = check(kind, f"{FOLDER / file}:fine", **options)
    assert {r.check for r in report.results if r.status != "passed"} <= NOT_HERE, str(report)


@pytest.mark.parametrize("name", [declared.name for kind in KINDS for declared in table_of(kind)])
def test_each_check_has_a_plugin_that_only_it_catches(name: str) -> None:
    kind, _, short = name.partition(".")
    file, options = KINDS[kind]
    report = check(kind, f"{FOLDER / file}:{short}", raise_failed=False, **options)
    assert [r.check for r in report.failed] == [name], str(report)
    declared = next(d for d in table_of(kind) if d.name == name)
    assert declared.why in report.failed[0].message
    assert "what to do: " in report.failed[0].message
