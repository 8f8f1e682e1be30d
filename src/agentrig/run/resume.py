"""Resuming: the plan of an existing run directory."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from agentrig.errors import ConfigError
from agentrig.plan import Plan, resolve
from agentrig.run.directory import RunDirectory
from agentrig.run.manifest import agentrig_version
from agentrig.run.past import check_format

if TYPE_CHECKING:
    pass


log = logging.getLogger(__name__)


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
            have its settings; or the run has ended and no override extends it.
    """
    plan = recorded_plan(directory, overrides=overrides, observers=observers)
    summary = RunDirectory(directory).read_json("summary.json")
    steps = getattr(plan.configs["algorithm"], "steps", None)
    ended = from_step is None and bool(summary.get("complete"))
    if ended and (not overrides or (steps is not None and steps <= summary["steps"])):
        name = plan.components["algorithm"].spec.name
        more = (
            "algorithm.steps=N"
            if steps is not None
            else f"KEY=VALUE, the key that sets it for algorithm {name} (agentrig plugins show {name})"
        )
        raise ConfigError(
            f"{directory} has ended: its {summary['steps']} steps are done. To continue training, set the total number "
            f"of steps: agentrig train --resume {directory} {more}"
        )
    return plan


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
