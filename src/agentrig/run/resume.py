"""Resuming: the plan of an existing run directory."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from agentrig.errors import ConfigError
from agentrig.plan import Plan, resolve
from agentrig.plugins.registry import noun_of
from agentrig.run.damage import reading
from agentrig.run.directory import RunDirectory
from agentrig.run.manifest import agentrig_version
from agentrig.run.past import check_format

if TYPE_CHECKING:
    pass


log = logging.getLogger(__name__)

MEASURE: Sequence[str] = ("reward", "tasks")
"""The components that decide what a run's figures mean."""


def resume_plan(
    directory: Path,
    *,
    overrides: Sequence[str] = (),
    observers: Sequence[str] = (),
    from_step: int | None = None,
) -> Plan:
    """Return the plan of a run directory, to resume the run.

    Args:
        directory: The run directory.
        overrides: `section.key=value`.
        observers: Observers to use, in addition to those of the run.
        from_step: The step of the checkpoint to resume from; a run that has ended can then run again from there.

    Raises:
        ConfigError: It is not a run directory, or its format is later than this version, or this version does not
            have its settings; or the run has ended and no override extends it; or an override names another reward
            or task set.
    """
    plan = recorded_plan(directory, overrides=overrides, observers=observers)
    if any(word.partition("=")[0].strip() in {f"{kind}.use" for kind in MEASURE} for word in overrides):
        _check_measure(directory, recorded_plan(directory), plan)
    summary = RunDirectory(directory).read_json("summary.json")
    steps = getattr(plan.configs["algorithm"], "steps", None)
    ended = from_step is None and bool(summary.get("complete"))
    with reading(directory / "summary.json"):
        done = int(summary.get("steps", 0))
    if ended and (not overrides or (steps is not None and steps <= done)):
        name = plan.components["algorithm"].spec.name
        more = (
            "algorithm.steps=N"
            if steps is not None
            else f"KEY=VALUE, the key that sets it for algorithm {name} (agentrig plugins show {name})"
        )
        raise ConfigError(
            f"{directory} has ended: its {done} steps are done. To continue training, set the total number "
            f"of steps: agentrig train --resume {directory} {more}"
        )
    return plan


def _check_measure(directory: Path, before: Plan, plan: Plan) -> None:
    """Raise if a run would go on with another reward or other tasks: its figures would not be comparable."""
    for kind in MEASURE:
        old, new = (p.components[kind].spec.name for p in (before, plan))
        if old != new:
            raise ConfigError(
                f"{directory} has the {noun_of(kind)} {old}, and {kind}.use={new} names another one: rewards and "
                "accuracies would not be comparable with those so far. That is a new run: leave out --resume"
            )


def recorded_plan(directory: Path, *, overrides: Sequence[str] = (), observers: Sequence[str] = ()) -> Plan:
    """Return the plan that a run directory was written with, whether the run has ended or not.

    Args:
        directory: The run directory.
        overrides: `section.key=value`.
        observers: Observers to use, in addition to those of the run.

    Raises:
        ConfigError: It is not a run directory, or its format is later than this version, or this version does not
            have its settings.
    """
    if not (directory / "config.toml").is_file():
        raise ConfigError(f"{directory} is not a run directory: it has no config.toml")
    facts = RunDirectory(directory).read_json("manifest.json")
    check_format(directory, facts)
    try:
        plan = resolve(str(directory / "config.toml"), overrides=overrides, observers=observers)
    except ConfigError as error:
        if overrides or facts.get("agentrig", agentrig_version()) == agentrig_version():
            raise
        raise ConfigError(f"{error}\n  agentrig {facts['agentrig']} wrote {directory}/config.toml") from None
    return attrs.evolve(plan, recipe=facts.get("recipe", directory.name))
