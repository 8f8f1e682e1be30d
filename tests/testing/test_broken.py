"""Each check catches the plugin that breaks its property, no other check does, and the message names the cure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from quick import quick_first

from agentrig.testing import check
from agentrig.testing.kit import table_of

FOLDER = Path(__file__).parent / "broken"
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "tasks": ("task_sets.py", {}),
    "reward": (
        "rewards.py",
        {
            "limit": 4,
            "budget_s": 0.5,
            "ladder": lambda t: ["?", *(str(int(t.private["gold"]) + i) for i in (2, 1)), t.private["gold"]],
        },
    ),
    "adapter": ("adapters.py", {}),
    "agent": ("agents.py", {"limit": 2, "deadline_s": 30.0, "slow_s": 0.5}),
    "runners": ("runners.py", {"start_s": 12.0}),
}
"""The file of each kind's plugins (`fine`, and one named as each check), and the options of its checks."""
OWN = {"agent.deadline": {"deadline_s": 3.0}}
"""Options for the plugin of one check: it is waited for; the others have time, on a busy machine too."""
NOT_HERE = {"reward.batch"}
"""Checks that do not apply to `fine`."""
CHECKS = [declared.name for kind in KINDS for declared in table_of(kind)]
QUICK = ("tasks.rows", "reward.gold", "adapter.exact-tokens", "agent.calls-endpoint")


@pytest.mark.parametrize("kind", KINDS)
def test_a_plugin_without_a_fault_passes_every_check(kind: str) -> None:
    file, options = KINDS[kind]
    report = check(kind, f"{FOLDER / file}:fine", **options)
    assert {r.check for r in report.results if r.status != "passed"} <= NOT_HERE, str(report)


@pytest.mark.parametrize("name", quick_first(CHECKS, QUICK))
def test_each_check_has_a_plugin_that_only_it_catches(name: str) -> None:
    kind, _, short = name.partition(".")
    file, options = KINDS[kind]
    report = check(kind, f"{FOLDER / file}:{short}", raise_failed=False, **options | OWN.get(name, {}))
    assert [r.check for r in report.failed] == [name], str(report)
    declared = next(d for d in table_of(kind) if d.name == name)
    assert declared.why in report.failed[0].message
    assert "what to do: " in report.failed[0].message


ENDS = """
import os
from agentrig import RewardSpec, Score, TasksSpec, Task, hookimpl
{at_import}
class Set:
    splits = ("train",)
    roles = {{"train": "train"}}
    def load(self, split):
        return [Task(id=str(i), input={{"x": i}}, private={{"gold": str(i)}}) for i in range(3)]
def score(task, outcome, budget_s):
    {at_call}
    return Score.ok(float(outcome.answer == task.private["gold"]))
def build(config):
    {at_build}
    return score
@hookimpl
def register_tasks():
    yield TasksSpec(name="mine", summary="Mine.", build=lambda config: Set())
@hookimpl
def register_rewards():
    yield RewardSpec(name="mine", summary="Mine.", build=build)
"""


@pytest.mark.parametrize(
    ("where", "does", "caught", "said"),
    [
        ("at_import", "os._exit(0)", "loads", "exit status 0"),
        ("at_build", "os.abort()", "loads", "signal SIGABRT"),
        ("at_call", "os._exit(3)", "scores", "exit status 3"),
        ("at_call", "raise SystemExit(4)", "scores", "SystemExit: 4"),
    ],
)
def test_a_plugin_that_ends_its_process_fails_one_check(
    tmp_path: Path, where: str, does: str, caught: str, said: str
) -> None:
    does_nothing = dict.fromkeys(("at_import", "at_build", "at_call"), "pass")
    file = tmp_path / f"ends_{where}_{len(does)}.py"
    file.write_text(ENDS.format(**does_nothing | {where: does}))
    report = check("reward", f"{file}:mine", raise_failed=False)
    assert [r.check for r in report.failed] == [f"reward.{caught}"], str(report)
    assert said in report.failed[0].message


def test_an_agent_that_asks_for_the_gold_is_caught() -> None:
    report = check("agent", f"{FOLDER}/agents.py:asks-for-gold", raise_failed=False, limit=2, only=["private"])
    assert 'the agent asks for private["gold"]' in report.failed[0].message
