"""The checks of a recipe: it resolves with what is installed, and its parts can be built."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs

from agentrig.errors import ConfigError
from agentrig.hardware import HardwareError
from agentrig.plan import Plan, resolve, to_toml
from agentrig.testing.checks import CheckFailed, CheckSkipped, Report
from agentrig.testing.table import Bench, Table

BUILT = ("reward", "adapter")
"""Components that a run builds in its own process before it starts anything."""


@attrs.define(kw_only=True, eq=False, slots=False)
class RecipeBench(Bench):
    """What the checks of a recipe share.

    Attributes:
        hardware: To resolve it for; the recipe's own, or the CPU where that is not here, if it is empty.
    """

    hardware: str = ""

    @property
    def name(self) -> str:
        """The recipe's name."""
        component = self.subject.component
        if component is None or component.plugin == "given":
            raise CheckSkipped("give its name or FILE.py:NAME: a plan finds it by its name")
        return component.spec.name

    def resolved(self, source: str) -> Plan:
        """Return the plan of a recipe or run file."""
        own = self.subject.file if not source.endswith(".toml") else None  # a run's configuration names its files
        files = [str(own)] if own else []
        uses = {"hardware": self.hardware} if self.hardware else {}
        plan = resolve(source, uses=uses, files=files)
        try:
            _ = plan.components["hardware"], plan.components["server"]
        except HardwareError:
            plan = resolve(source, uses={"hardware": "cpu"}, files=files)
            _ = plan.components["hardware"], plan.components["server"]
        return plan

    @cached_property
    def plan(self) -> Plan:
        """The recipe's plan."""
        return self.resolved(self.name)


TABLE = Table("recipe", RecipeBench, builds=False)


@TABLE.check(
    "resolves",
    why="`agentrig train NAME` ends with this message.",
    cure="Name installed components, and keys that they have; require their distributions in your pyproject.toml.",
)
def resolves(bench: RecipeBench) -> None:
    """Its components are installed, and its keys are theirs."""
    _ = bench.plan


@TABLE.check(
    "written",
    why="A resumed run reads what the recipe wrote: a value that TOML does not keep changes the run.",
    cure="Use text, numbers, booleans, lists and tables as values.",
    needs=("resolves",),
)
def written(bench: RecipeBench) -> None:
    """The configuration that a run writes gives the same plan again."""
    with tempfile.TemporaryDirectory(prefix="agentrig-kit-") as folder:
        file = Path(folder) / "config.toml"
        file.write_text(to_toml(bench.plan.as_dict()), "utf-8")
        again = bench.resolved(str(file))
    for kind, config in bench.plan.configs.items():
        if again.configs[kind] != config:
            raise CheckFailed(f"[{kind}] is {again.configs[kind]} when its config.toml is read, and was {config}")


@TABLE.check(
    "builds",
    why="The run ends before its first step.",
    cure="Correct the component that the message names, or the keys that the recipe gives it.",
    needs=("resolves",),
)
def builds(bench: RecipeBench) -> None:
    """Its reward and its adapter can be built with its keys."""
    for kind in BUILT:
        bench.plan.build(kind)


@TABLE.check(
    "tasks",
    why="Without training tasks no run starts.",
    cure="Give `roles` a split for `train`, or name one under [run] train; say how to get the data in the error.",
    needs=("resolves",),
)
def tasks(bench: RecipeBench) -> None:
    """Its task set names a training split that it has."""
    from agentrig.run.splits import split_of, task_set

    try:
        made = task_set(bench.plan)
    except ConfigError as error:
        raise CheckSkipped(f"its data is not here: {str(error).partition(chr(10))[0]}") from None
    split = split_of(bench.plan.run, made, "train")
    if split not in made.splits:
        raise CheckFailed(f'its training split is "{split}"; its task set has {", ".join(made.splits)}')


def check_recipe(
    subject: Any, *, settings: Any = None, only: Sequence[str] | None = None, raise_failed: bool = True, **options: Any
) -> Report:
    """Run the checks of a recipe; see `agentrig.testing.check`. Its one option: `hardware`, to resolve it for."""
    return TABLE.check_all(subject, settings, only, raise_failed, options)
