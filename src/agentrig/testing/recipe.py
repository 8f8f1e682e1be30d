"""The checks of a recipe: it resolves with what is installed, and its parts can be built."""

from __future__ import annotations

from functools import cached_property

import attrs

from agentrig.errors import AgentrigError, PluginError
from agentrig.hardware import HardwareError
from agentrig.plan import Plan, resolve, to_toml
from agentrig.run.splits import load_splits, split_of
from agentrig.testing.elsewhere import elsewhere
from agentrig.testing.kit import basic
from agentrig.testing.subject import CheckFailed, CheckSkipped, Subject


@attrs.define(kw_only=True, eq=False, slots=False)
class RecipeSubject(Subject):
    """A recipe.

    Attributes:
        hardware: To resolve it for; the recipe's own, or the CPU where that is not here, if it is empty.
    """

    builds = False

    hardware: str = ""

    def resolved(self, source: str) -> Plan:
        """Return the plan of a recipe or run file."""
        own = self.file if not source.endswith(".toml") else None  # a run's configuration names its files
        files = [str(own)] if own else []
        uses = {"hardware": self.hardware} if self.hardware else {}
        plan = resolve(source, uses=uses, files=files)
        try:
            _ = plan.components["hardware"], plan.components["server"]
        except HardwareError:
            plan = resolve(source, uses={"hardware": "cpu"}, files=files)
            _ = plan.components["hardware"], plan.components["server"]
        return plan

    def load_tasks(self) -> None:
        """Load the tasks of every role, as a run does."""
        load_splits(self.plan.tasks(), self.plan.run, who=self.plan.whose_tasks)

    @cached_property
    def plan(self) -> Plan:
        """The recipe's plan."""
        if not self.registered:
            raise CheckSkipped("give its name or FILE.py:NAME: a plan finds it by its name")
        return self.resolved(self.spec.name)


@basic
def check_resolves(subject: RecipeSubject) -> None:
    """Its components are installed, and its keys are theirs.

    Why: `agentrig train NAME` ends with this message.
    Cure: Name installed components, and keys that they have; require their distributions in your pyproject.toml.
    """
    _ = subject.plan


def check_written(subject: RecipeSubject) -> None:
    """The configuration that a run writes gives the same plan again.

    Why: A resumed run reads what the recipe wrote: a value that TOML does not keep changes the run.
    Cure: Use text, numbers, booleans, lists and tables as values.
    """
    file = subject.folder / "config.toml"
    file.write_text(to_toml(subject.plan.as_dict()), "utf-8")
    again = subject.resolved(str(file))
    for kind, config in subject.plan.configs.items():
        if again.configs[kind] != config:
            raise CheckFailed(f"[{kind}] is {again.configs[kind]} when its config.toml is read, and was {config}")


def check_builds(subject: RecipeSubject) -> None:
    """Its reward and its adapter can be built with its keys.

    Why: The run ends before its first step.
    Cure: Correct the component that the message names, or the keys that the recipe gives it.
    """
    for kind in ("reward", "adapter"):  # a run builds these in its own process, before it starts anything
        subject.plan.build(kind)


def check_tasks(subject: RecipeSubject) -> None:
    """Its task set loads as in a run, and has training tasks.

    Why: Without training tasks no run starts.
    Cure: Give `roles` a split for `train`, or name one under [run] train; say how to get the data in the error.
    """
    try:
        made = subject.plan.tasks()
        split = split_of(subject.plan.run, made, "train")
        if split not in made.splits:
            raise CheckFailed(f'its training split is "{split}"; its task set has {", ".join(made.splits)}')
        elsewhere(RecipeSubject.load_tasks, subject.sendable())
    except AgentrigError as error:
        if not isinstance(error, PluginError) and not getattr(subject.plan.configs["tasks"], "file", ""):
            raise CheckSkipped(f"its data is not here: {str(error).partition(chr(10))[0]}") from None  # or not named
        raise CheckFailed(str(error), "Mend what the message names: a run does not start with it.") from error
