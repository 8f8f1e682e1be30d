"""Each check, and no other, catches the plugins of `broken/` whose names begin with its own; it names the cure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from quick import quick_first

from agentrig import HardwareSpec
from agentrig.hardware import Cpu
from agentrig.plugins.loading import load
from agentrig.plugins.specs import KINDS as CHECKED
from agentrig.testing import Check, check, checks
from agentrig.testing.kit import declared
from agentrig.testing.tiny_model import make_tiny_model

FOLDER = Path(__file__).parent / "broken"
NEARER = {
    "limit": 4,
    "budget_s": 0.5,
    "ladder": lambda t: ["?", *(str(int(t.private["gold"]) + i) for i in (2, 1)), t.private["gold"]],
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "tasks": ("task_sets.py", {}),
    "agent": ("agent_functions.py", {"limit": 2, "deadline_s": 30.0, "slow_s": 0.5}),
    "reward": ("rewards.py", NEARER),
    "adapter": ("adapters.py", {}),
    "algorithm": ("algorithms.py", {}),
    "credit": ("credits.py", {}),
    "server": ("servers.py", {"end_s": 1.0}),
    "hardware": ("hardware.py", {}),
    "runners": ("runners.py", {"start_s": 12.0}),
    "observer": ("recipes.py", {"rollout_s": 60.0}),
    "recipe": ("recipes.py", {}),
}
"""The file of each kind's plugins, named as the check that finds the fault, and the options of its checks."""
OWN: dict[str, dict[str, Any]] = {
    "agent.deadline": {"deadline_s": 3.0},  # the others have time, on a busy machine too
    "algorithm.moves": {"only": ["loads", "runs", "figures", "moves"]},
    "algorithm.solves": {"learns": 8},
    "observer.fast": {"rollout_s": 0.01},
}
CHECKS = [each.name for kind in CHECKED for each in declared(kind)]


def check_of(fault: str) -> str:
    """Return the check that catches a fault: the one whose name the fault's begins with; '' for none."""
    return max((name for name in CHECKS if f"{fault}-".startswith(f"{name}-")), key=len, default="")


PLANTED = [f"{k}.{c.spec.name}" for k in CHECKED for c in load(files=[FOLDER / KINDS[k][0]]).components(k)]
FAULTS = [*dict.fromkeys([*(name for name in CHECKS if name.endswith(".loads")), *filter(check_of, PLANTED)])]
QUICK = (
    *("tasks.rows", "agent.calls-endpoint", "reward.gold", "adapter.exact-tokens"),
    *("server.token-ids", "hardware.probe", "recipe.resolves", "observer.loads"),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("planted", quick_first(FAULTS, QUICK))
def test_a_planted_fault_is_caught_by_its_check_only(planted: str, model: Path, tmp_path: Path) -> None:
    (kind, _, fault), name = planted.partition("."), check_of(planted)
    file, options = KINDS[kind]
    models = {"server": {"model": model}, "algorithm": {"model": tmp_path}}  # a table of answers: no audit reads it
    options = {**options, **models.get(kind, {}), **OWN.get(name, {})}
    report = check(kind, f"{FOLDER / file}:{fault}", raise_failed=False, **options)
    assert [r.check for r in report.failed] == [name], str(report)
    (asked,) = [each for each in declared(kind) if each.name == name]
    assert asked.why in report.failed[0].message
    assert "what to do: " in report.failed[0].message


@pytest.mark.parametrize("kind", CHECKED)
def test_every_check_has_a_plugin(kind: str) -> None:
    """Agents and recipes are not built by the check `loads`: a name that nobody has breaks it."""
    known = {c.spec.name for c in load(files=[FOLDER / KINDS[kind][0]]).components(kind)}
    asked = {each.name.partition(".")[2] for each in declared(kind)}
    assert asked - known <= ({"loads"} if kind in ("agent", "recipe") else set())
    assert all(each.why and each.cure for each in declared(kind))


@pytest.mark.parametrize("check", checks("hardware", "cpu", settings={"threads": 1}), ids=str)
def test_the_cpu(check: Check) -> None:
    check()


def test_hardware_without_a_name_is_checked_without_a_fresh_interpreter() -> None:
    for given in (HardwareSpec(name="cpu", summary="x", build=lambda config: Cpu()), Cpu()):
        report = check("hardware", given)
        assert {"hardware.imports-light", "hardware.computes"} <= {
            r.check for r in report.results if r.status == "skipped"
        }


@pytest.mark.parametrize("name", ["mini", "spider"])
def test_the_recipes_of_agentrig(name: str) -> None:
    check("recipe", name)


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
        pytest.param("at_build", "os.abort()", "loads", "signal SIGABRT", marks=pytest.mark.slow),
        ("at_call", "os._exit(3)", "scores", "exit status 3"),
        pytest.param("at_call", "raise SystemExit(4)", "scores", "SystemExit: 4", marks=pytest.mark.slow),
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
    report = check("agent", f"{FOLDER}/agent_functions.py:private-asked", raise_failed=False, limit=2, only=["private"])
    assert 'the agent asks for private["gold"]' in report.failed[0].message


def test_an_agent_that_returns_nothing_is_told_to_return_and_one_that_reads_a_form_is_fine() -> None:
    forgets, form = (
        check("agent", f"{FOLDER}/agent_functions.py:{name}", raise_failed=False, limit=2, only=["answers"])
        for name in ("answers-no-return", "form")
    )
    (failed,) = forgets.failed
    assert failed.check == "agent.answers"
    assert "the agent returned None for 2 of 2 tasks, first for task w0" in failed.message
    assert "a function without `return` returns None" in failed.message
    assert not form.failed
