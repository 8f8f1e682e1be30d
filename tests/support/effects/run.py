"""The keys of `[run]`, observed in plans, task splits and the scorer."""

from __future__ import annotations

import atexit
import json
from functools import cache
from pathlib import Path
from typing import Any

from model_server import ModelServer, model_server

from agentrig import Outcome, Task, Trace
from agentrig.plan import Plan, resolve
from agentrig.run.directory import RunDirectory
from agentrig.run.splits import load_splits
from agentrig.tasks import tasks_of_step
from effects import ROOT, Elsewhere, Flip, Settings, exact, folder

TOY = str(ROOT / "tests" / "support" / "toy_plugin.py")
OWN = str(Path(__file__).with_name("plugin.py"))
HALF = (Task(id="t", input={}), Outcome(answer=0.5), Trace(rollout_id="r"))
"""A rollout whose agent answered 0.5."""


def overrides(section: str, settings: Settings) -> list[str]:
    """Return settings as `section.key=value`; plain JSON values are also TOML."""
    return [f"{section}.{key}={json.dumps(value)}" for key, value in settings.items()]


def plan(settings: Settings, *more: str, **uses: str) -> Plan:
    """Return the plan of the recipe `toy` with these settings of the run."""
    here = f'run.directory="{folder()}/runs"'
    return resolve("toy", overrides=[here, *more, *overrides("run", settings)], uses=uses, files=[TOY, OWN])


def place(settings: Settings) -> Path:
    made = RunDirectory.create(plan({"name": "here", **settings}))
    made.release()
    return made.path


def _loaded(made: Plan) -> Any:
    return load_splits(made.tasks(), made.run, who=made.whose_tasks)


def split(role: str) -> Any:
    """Return a look: the ids of the tasks that have a role."""
    return lambda settings: [task.id for task in _loaded(plan(settings))[role][1]]


def first(n: int) -> Any:
    """Return a rule: the second look is the first `n` of the first look's tasks."""
    return lambda a, b: b == a[:n] != a


def of(start: str) -> Any:
    """Return a rule: all tasks of the second look, and none of the first, are of that split."""
    return lambda a, b: all(i.startswith(start) for i in b) and not any(i.startswith(start) for i in a)


def verdict(settings: Settings) -> tuple[str, bool | None]:
    """Return the run's score for a reward of 0.5."""
    (score,) = plan(settings, reward="own").scorer()([HALF])
    return score.status, score.correct


def plugin(name: str) -> Any:
    """Return a look: the status of a plugin, `-` if it is unknown."""

    def look(settings: Settings) -> str:
        found = resolve("mini", overrides=overrides("run", settings)).registry.plugins
        return next((p.status for p in found if p.name == name or p.distribution == name), "-")

    return look


@cache
def server() -> ModelServer:
    """Return a model server that lives as long as this process."""
    lent = model_server()
    atexit.register(lent.__exit__, None, None, None)  # later its thread would be gone, and its end wait for it for ever
    return lent.__enter__()


def order(settings: Settings) -> list[str]:
    """Return the tasks of a step, as a run of this seed takes them."""
    made = plan(settings)
    return [task.id for task in tasks_of_step(_loaded(made)["train"][1], n=6, step=1, seed=made.run.seed)]


TABLE = {
    "seed": Flip(a=0, b=1, look=order, shows=lambda a, b: a != b and len(a) == len(b)),
    "name": exact("first", "second", lambda s: place(s).name),
    "directory": exact(f"{folder()}/one", f"{folder()}/two", lambda s: str(place(s).parent)),
    "train": Flip(a="", b="test", look=split("train"), shows=of("test-")),
    "validation": Flip(a="", b="test", look=split("validation"), shows=of("test-")),
    "report": Flip(a="", b="train", look=split("report"), shows=of("train-")),
    "train_tasks": Flip(a=0, b=5, look=split("train"), shows=first(5)),
    "validation_tasks": Flip(a=0, b=5, look=split("validation"), shows=first(5)),
    "report_tasks": Flip(a=0, b=5, look=split("report"), shows=first(5)),
    "failure_limit": Elsewhere(
        "tests/test_rules.py::test_rule_2_a_failure_is_typed_and_never_a_zero", "a run within and one above the limit"
    ),
    "reward_budget_s": Elsewhere(
        "tests/test_rewards.py::test_a_reward_that_never_ends_holds_up_nobody", "it shows in a reward's process"
    ),
    "correct_at": exact(0.4, 0.6, verdict, (("ok", True), ("ok", False))),
    "delivery": Elsewhere(
        "tests/proofs/test_delivery.py::test_the_proof_can_be_turned_off", "a run with and without the proof"
    ),
    "audit": Elsewhere(
        "tests/audit/test_auditing.py::test_the_auditor_can_be_turned_off", "a run with and without the auditor"
    ),
    "second_reward": Elsewhere("tests/run/test_session.py::test_a_run_from_start_to_end", "it needs a run"),
    "block": exact([], ["agentrig-verl"], plugin("agentrig-verl"), ("ok", "blocked")),
    "plugins": exact([], [TOY], plugin("toy_plugin"), ("-", "ok")),
}
