"""A plugin in one file for the doctor's tests: a complete recipe, `toy`, whose parts do nothing."""

from __future__ import annotations

import os
from collections.abc import Sequence

import attrs

from agentrig import (
    AdapterSpec,
    AgentrigError,
    AgentSpec,
    AlgorithmSpec,
    RecipeSpec,
    RewardSpec,
    Score,
    Task,
    TasksSpec,
    hookimpl,
    setting,
)
from agentrig.findings import Finding
from agentrig.hardware.memory import Workload


class Sums:
    splits = ("train", "dev")
    roles = {"train": "train", "report": "dev"}  # noqa: RUF012

    def load(self, split: str) -> Sequence[Task]:
        if os.environ.get("TOY_DATA") == "missing":
            raise AgentrigError("the sums are missing\n  make them: agentrig data sums")
        if os.environ.get("TOY_DATA") == "odd":
            raise AgentrigError("the sums are odd")
        return [Task(id=f"{split}-{i}", input={"a": i}) for i in range(3)]


@attrs.frozen(kw_only=True)
class ToyConfig:
    model: str = setting("", help="a model")
    micro_batch: int = setting(1, help="sequences at once", ge=1)
    nnodes: int = setting(1, help="machines", ge=1)
    port: int = setting(0, help="a port", ge=0)


def workload(config: ToyConfig) -> Workload | None:
    if not config.model and config.nnodes == 1:
        return None
    return Workload(model=config.model, micro_batch=config.micro_batch, context=1024, nodes=config.nnodes)


def check_own(situation):
    yield Finding.ok("toy", f"seen by the reward's own check: {situation.algorithm}")


@hookimpl
def register_tasks():
    yield TasksSpec(name="sums", summary="Sums.", build=lambda config: Sums())


@hookimpl
def register_agents():
    yield AgentSpec(name="still", summary="Says nothing.", build=lambda config: lambda task, endpoint: "")


@hookimpl
def register_rewards():
    yield RewardSpec(
        name="none", summary="0.", build=lambda config: lambda task, outcome, s: Score.ok(0.0), checks=(check_own,)
    )


@hookimpl
def register_adapters():
    yield AdapterSpec(name="nothing", summary="Keeps nothing.", build=lambda config: lambda trace: ())


@hookimpl
def register_algorithms():
    yield AlgorithmSpec(
        name="rest", summary="Learns nothing.", config=ToyConfig, build=lambda config: None, workload=workload
    )


@hookimpl
def register_recipes():
    parts = {"tasks": "sums", "agent": "still", "reward": "none", "adapter": "nothing", "algorithm": "rest"}
    yield RecipeSpec(name="toy", summary="Nothing.", settings={kind: {"use": use} for kind, use in parts.items()})
