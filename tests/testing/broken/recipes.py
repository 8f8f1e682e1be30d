"""Recipes and observers with one fault each: the one called X is caught by the check of that name and by no other."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import attrs

from agentrig import ObserverSpec, RecipeSpec, RewardSpec, Score, TasksSpec, hookimpl, setting


@attrs.frozen(kw_only=True)
class RewardConfig:
    """A key that TOML cannot keep: it has no null."""

    rounds: int | None = setting(3, help="rounds; None for all")


class NoTraining:
    splits = ("test",)
    roles = {"report": "test"}  # noqa: RUF012

    def load(self, split: str) -> list[Any]:
        return []


def broken(config: Any) -> Any:
    raise RuntimeError("the rubric is missing")


def one(task: Any, outcome: Any, budget_s: float) -> Score:
    return Score.ok(1.0)


class Watcher:
    """An observer with one fault."""

    def __init__(self, fault: str) -> None:
        self.fault = fault
        self.folder: Any = None
        if fault == "hooks":
            self.on_step_ends = print

    def on_run_start(self, event: Any) -> None:
        self.folder = event.directory

    def on_rollout_end(self, rollout: Any) -> None:
        if self.fault == "fast":
            time.sleep(0.02)

    def on_step_end(self, event: Any) -> None:
        if self.fault == "events":
            raise KeyError("tracker")
        if self.fault == "events-failing":
            round(event.metrics["reward"], 3)
        if self.fault == "leaves-the-run":
            (self.folder / "metrics.jsonl").write_text("mine")


@hookimpl
def register_rewards() -> Iterable[RewardSpec]:
    yield RewardSpec(name="unbuilt", summary="x", build=broken)
    yield RewardSpec(
        name="rounds",
        summary="x",
        config=RewardConfig,
        build=lambda config: lambda task, outcome, budget_s: Score.ok(1),
    )


@hookimpl
def register_tasks() -> Iterable[TasksSpec]:
    yield TasksSpec(name="no-training", summary="x", build=lambda config: NoTraining())


@hookimpl
def register_observers() -> Iterable[ObserverSpec]:
    yield ObserverSpec(name="loads", summary="x", build=broken)
    for fault in ("fine", "hooks", "events", "events-failing", "fast", "leaves-the-run"):
        yield ObserverSpec(name=fault, summary="x", build=lambda config, fault=fault: Watcher(fault))


@hookimpl
def register_recipes() -> Iterable[RecipeSpec]:
    whole = {
        **{"tasks": {"use": "mini-sql"}, "agent": {"use": "langgraph-sql"}, "reward": {"use": "spider-exec"}},
        **{"adapter": {"use": "agent-match"}, "algorithm": {"use": "grpo"}, "hardware": {"use": "cpu"}},
    }
    changes = {
        "fine": {},
        "resolves": {"algorithm": {"use": "grpo", "learning_rate": 1e-3}},
        "written": {"reward": {"use": "rounds", "rounds": None}},
        "builds": {"reward": {"use": "unbuilt"}},
        "tasks": {"tasks": {"use": "no-training"}},
    }
    for fault, change in changes.items():
        yield RecipeSpec(name=fault, summary="x", settings={**whole, **change})
