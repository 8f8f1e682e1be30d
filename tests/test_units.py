"""The example domain `units`: its tasks, tools, reward, and the demonstrations of its agent."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrig import Outcome
from agentrig.plan import Plan, resolve
from agentrig.run.warmup import choose_labels, demonstrate
from agentrig.testing import check

SOURCE = Path(__file__).resolve().parents[1] / "examples" / "agentrig-units" / "src"


@pytest.fixture(scope="module")
def plan() -> Iterator[Plan]:
    sys.path.insert(0, str(SOURCE))
    yield resolve("units", overrides=["runners.n=1"], files=[str(SOURCE / "agentrig_units" / "__init__.py")])
    sys.path.remove(str(SOURCE))


def test_tasks_and_reward_pass_the_kit(plan: Plan) -> None:
    tasks = plan.build("tasks")
    check("tasks", tasks)
    check("reward", plan.build("reward"), tasks=tasks.load("test")[:20], gold="gold")
    assert tasks.load("test")[7].id == "test-0-0007"
    everything = [t for split in tasks.splits for t in tasks.load(split)]
    assert len({json.dumps(dict(t.private)) for t in everything}) == len(everything), "asked twice in other words"


def test_the_gold_is_what_the_tools_say(plan: Plan) -> None:
    from agentrig_units.tools import calculate, factor

    for task in plan.build("tasks").load("test"):
        private = task.private
        number, unit = private["gold"].split()
        assert calculate(private["expression"], unit) == f"{number} {unit}"
        assert factor(private["big"], private["small"]) in private["expression"]
        assert unit in (private["big"], private["small"])


@pytest.mark.parametrize(
    ("name", "arguments", "result"),
    [
        ("factor", {"big": "feet", "small": "inches"}, "12"),
        ("factor", {"big": "inches", "small": "feet"}, "error: inches feet"),
        ("factor", {"big": "feet"}, "error: wrong arguments"),
        ("calculate", {"expression": "(3+4)*12/7", "unit": "feet"}, "12 feet"),
        ("calculate", {"expression": "1/0", "unit": "feet"}, "error"),
        ("calculate", {"expression": "9**9**9", "unit": "feet"}, "error"),
        ("calculate", {"expression": "__import__('os')", "unit": "feet"}, "error"),
        ("calculate", {"expression": "(" * 50, "unit": "feet"}, "error"),
        ("calculate", {"expression": "9" * 61, "unit": "feet"}, "error"),
        ("calculate", {"expression": 3, "unit": "feet"}, "error: text expected"),
        ("calculate", {"expression": "3"}, "error: wrong arguments"),
        ("add", {}, "error: no tool add"),
    ],
)
def test_tools_answer_every_call(plan: Plan, name: str, arguments: dict[str, Any], result: str) -> None:
    from agentrig_units.tools import use

    assert use(name, json.dumps(arguments)) == result


def test_the_reward_is_graded(plan: Plan) -> None:
    task = plan.build("tasks").load("test")[0]
    number, unit = task.private["gold"].split()
    reward = plan.build("reward")

    def score(answer: Any) -> tuple[float | None, bool | None]:
        found = reward(task, Outcome(answer=answer), 1.0)
        return found.value, found.correct

    assert score(f"{number} {unit}") == (1.0, True)
    assert score(f"{number} miles") == (0.4, False)
    assert score(f"0 {unit}") == (0.1, False)
    assert [score(a) for a in ("", None, 7, number, "x " * 1000)] == [(0.0, False)] * 5


@pytest.mark.slow
def test_demonstrations_use_both_tools_and_are_right(plan: Plan) -> None:
    labels = choose_labels(plan, 12, seed=0)
    found = demonstrate(plan, labels.tasks)
    assert found.rejected == []
    assert len(found.turns) == 2 * 12
    names = [call["name"] for turn in found.turns for call in turn.reply.tool_calls]
    assert names == ["factor", "calculate"] * 12
    last = found.turns[1]
    assert [m["role"] for m in last.messages] == ["user", "assistant", "tool"]
    assert [t["function"]["name"] for t in last.tools] == ["factor", "calculate"]
