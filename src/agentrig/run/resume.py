"""Resuming: the plan of an existing run directory."""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from agentrig.errors import ConfigError, PluginError
from agentrig.figures import amount
from agentrig.plan import RESUME, Plan, read_run_file, resolve, resume_command, script_of
from agentrig.plugins.registry import noun_of
from agentrig.run.auditing import faults_of
from agentrig.run.damage import CURES, NOT_ALLOWED, reading
from agentrig.run.directory import RunDirectory, checked_summary
from agentrig.run.manifest import agentrig_version, edited_settings

log = logging.getLogger(__name__)

MEASURE: Sequence[str] = ("reward", "tasks")
"""The components that decide what a run's figures mean."""

NEW_RUN = "rewards and accuracies would not be comparable with those so far. That is a new run: leave out --resume"

OTHER_RUN = "the run can only be compared with what it began with"


def resume_plan(
    directory: Path,
    *,
    overrides: Sequence[str] = (),
    observers: Sequence[str] = (),
    from_step: int | None = None,
    script_file: Path | None = None,
) -> Plan:
    """Return the plan of a run directory, to resume the run.

    Args:
        from_step: The step of the checkpoint to resume from; a run that has ended can then run again from there.
        script_file: The plugin file of the run of a script, which replaces that of the script's earlier process.

    Raises:
        ConfigError: It is not a run directory, or its format is later than this version, or this version does not
            have its settings; or the run has ended and no override extends it; or an override or an edited
            `config.toml` names another reward or task set.
    """
    settings, facts, began = _read(directory, f"{NEW_RUN}, or write")
    plan = _plan_of(directory, facts, overrides=overrides, observers=observers, script_file=script_file)
    if fault := faults_of(directory):
        log.warning("%s", fault)
    for name, now, was in edited_settings(settings, facts):
        file = directory / "config.toml"
        log.warning("%s was edited: %s is %r, and was %r. That holds from now on", file, name, now, was)
    for kind, old in began.items():
        new = plan.components[kind].spec.name
        if new != old:
            raise ConfigError(
                f"{directory} has the {noun_of(kind)} {old}, and {kind}.use={new} names another one: {NEW_RUN}"
            )
    summary = RunDirectory(directory).read_json("summary.json")
    steps = getattr(plan.configs["algorithm"], "steps", None)
    ended = from_step is None and bool(summary.get("complete"))
    with reading(directory / "summary.json"):
        done = int(checked_summary(summary).get("steps", 0))
    # Without a word, config.toml has more steps if the run was killed before its first checkpoint after that end.
    goes_on = overrides if steps is None else steps > done and (overrides or not summary.get("solved"))
    if ended and not goes_on:
        name = plan.components["algorithm"].spec.name
        more = (
            "algorithm.steps=N"
            if steps is not None
            else f"KEY=VALUE, the key that sets it for algorithm {name} (agentrig plugins show {name})"
        )
        again = resume_command(plan.resumes, directory, more)
        unwritten = "" if (directory / "report.html").is_file() else f"\n  Its report: agentrig report {directory}"
        raise ConfigError(
            f"{directory} has ended after {amount(done, 'step')}. To continue training, set the total number "
            f"of steps: {again}{unwritten}"
        )
    return plan


def check_record(directory: Path) -> None:
    """Check what a resume needs of `config.toml` and `manifest.json`; no plugin is loaded.

    Raises:
        AgentrigError: One of them cannot be read, or `config.toml` names another reward or task set.
    """
    _read(directory, f"{NEW_RUN}, or write")


def recorded_plan(directory: Path) -> Plan:
    """Return the plan that a run directory was written with, whether the run has ended or not.

    Raises:
        ConfigError: It is not a run directory, or its format is later than this version, or this version does not
            have its settings; or it is the run of a script.
    """
    _, facts, _ = _read(directory, f"{OTHER_RUN}: write")
    if script_of(directory):
        raise ConfigError(
            f"{directory} is the run of a script and can't be audited after it: only the script has its tasks, its "
            f"reward and its algorithm. A script's run is audited while it runs; the verdicts are in {directory}/audit"
        )
    return _plan_of(directory, facts)


def _read(directory: Path, advice: str) -> tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, str]]:
    """Return what is in `config.toml` and in `manifest.json`, and the names of the run's reward and task set.

    `advice` says why none of these may be another one, and begins what to do.
    """
    file = directory / "config.toml"
    if not file.exists():
        if (directory / "manifest.json").is_file():
            raise ConfigError(f"{file} is missing. {CURES[file.name]}")
        raise ConfigError(f"{directory} is not a run directory: it has no config.toml")
    facts = RunDirectory(directory).manifest()
    with reading(file):
        if file.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        try:
            settings = read_run_file(file)
        except ConfigError as error:
            cause = error.__context__
            cure = NOT_ALLOWED if isinstance(cause, PermissionError) else CURES[file.name]
            raise ConfigError(f"{error}. {cure}") from None
        if not settings:
            raise ValueError("it is empty")
        named = {kind: str(settings[kind]["use"]).rpartition(":")[2] for kind in MEASURE}
    with reading(directory / "manifest.json"):
        components = facts.get("components", {})
        began = {kind: components.get(kind, {}).get("name", name) for kind, name in named.items()}
    for kind, name in named.items():
        if name != began[kind]:
            raise ConfigError(
                f"{file} was edited: it names the {noun_of(kind)} {name}, and the run began with {began[kind]}: "
                f'{advice} [{kind}] use = "{began[kind]}" there again'
            )
    return settings, facts, began


def _plan_of(
    directory: Path,
    facts: Mapping[str, Any],
    *,
    overrides: Sequence[str] = (),
    observers: Sequence[str] = (),
    script_file: Path | None = None,
) -> Plan:
    file = directory / "config.toml"
    resumes = facts.get("resumes", RESUME)
    replaced = [] if script_file is None else [f"run.plugins={json.dumps([str(script_file)])}"]
    try:
        plan = resolve(str(file), overrides=[*replaced, *overrides], observers=observers)
    except (ConfigError, PluginError) as error:
        if resumes != RESUME and script_file is None:
            again = resume_command(resumes, directory)
            raise ConfigError(f"{directory} is the run of a script; it resumes with: {again}") from error
        given = f", and in {' '.join(overrides)}" if overrides else ""
        wrote = facts.get("agentrig", agentrig_version())
        where = "The settings are in" if wrote == agentrig_version() else f"agentrig {wrote} wrote"
        raise ConfigError(f"{error}\n  {where} {file}{given}") from None
    return attrs.evolve(plan, recipe=facts.get("recipe", ""), resumes=resumes)
