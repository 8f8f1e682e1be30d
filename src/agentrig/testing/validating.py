"""Validates plugins as `agentrig validate` does: the kit on every component, and a trial of each agent."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from agentrig.endpoints import Endpoint
from agentrig.errors import AgentrigError, ConfigError, LookupFailed, nearest
from agentrig.plan import read_run_file
from agentrig.plugins.loading import load
from agentrig.testing.checks import Report
from agentrig.testing.elsewhere import EndedElsewhere, elsewhere
from agentrig.testing.kit import CHECKED, table_of
from agentrig.testing.play import TABLE as PLAY
from agentrig.testing.subject import subject_of
from agentrig.testing.table import LOADS_S, Table

UNPLAYABLE = {"agent.loads", "agent.starts", "agent.calls-endpoint", "agent.answers", "play.loads", "play.parts"}
"""Checks without which an agent is not played."""

TRIED = ("agent", "reward")
"""Kinds whose checks need other components."""


@attrs.frozen(kw_only=True)
class Target:
    """A component to validate, by what finds it; and whether its plugin brings exactly one task set."""

    kind: str
    given: str
    has_tasks: bool = False


@attrs.frozen(kw_only=True)
class Asked:
    """What to validate with.

    Attributes:
        uses: Kind to name: the task set, reward and adapter for agents and rewards that do not bring them.
        settings: Kind to keys, as the sections of a run file; `gateway` too.
        files: Plugin files in which names are looked up first.
        script: What the scripted model says; None for right answers and nonsense.
        endpoint: A real model for the trial.
        limit: Tasks of a trial.
        only: Names of checks, with their kind (`agent.sampling`); None for all.
        say: Gets the lines of the reports one by one, each as soon as it is known: some checks take minutes.
    """

    uses: Mapping[str, str] = attrs.field(factory=dict)
    settings: Mapping[str, Mapping[str, Any]] = attrs.field(factory=dict)
    files: Sequence[str] = ()
    script: str | None = None
    endpoint: Endpoint | None = None
    limit: int = 12
    only: Sequence[str] | None = None
    say: Callable[[str], None] | None = None


@attrs.frozen
class _Part:
    """A component of a trial: what finds it, '' if nothing does, and its keys."""

    given: str
    keys: Mapping[str, Any]


@attrs.frozen(kw_only=True)
class Validation:
    """What was found.

    Attributes:
        reports: One for each component, and one for each trial.
        trials: The figures of each trial.
    """

    reports: Sequence[Report]
    trials: Sequence[Mapping[str, Any]]

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return all(report.ok for report in self.reports)

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        reports = [
            {"kind": r.kind, "subject": r.subject, "ok": r.ok, "results": [attrs.asdict(x) for x in r.results]}
            for r in self.reports
        ]
        return {"ok": self.ok, "reports": reports, "trials": list(self.trials)}


def targets(word: str | None, files: Sequence[str] = ()) -> list[Target]:
    """Return the components that a name, a distribution, a file, or the package in the current folder brings.

    Args:
        word: What names them; None for the package.
        files: Plugin files in which a name is looked up first.

    Raises:
        LookupFailed: There is none; the message names the nearest.
        ConfigError: No word, and no package in the current folder; or a run file.
    """
    word = word or _here()
    if word.endswith(".toml"):
        raise ConfigError(_of_run_file(word))
    word = _in_files(word, files)
    path, colon, name = word.rpartition(":")
    file = path if colon and path.endswith(".py") else word if word.endswith(".py") else ""
    wanted = name if file == path and colon else ""
    found = _components(file)
    if file:
        own = [t for t in found if t[0] == "file" and wanted in ("", t[3])]
    else:
        own = [t for t in found if word in (t[0], t[1], t[3])]
    hits = []
    for distribution, plugin, kind, name in own:
        has_tasks = [t[:3] for t in found].count((distribution, plugin, "tasks")) == 1
        hits.append(Target(kind=kind, given=f"{file}:{name}" if file else name, has_tasks=has_tasks))
    checked = [hit for hit in hits if hit.kind in CHECKED]
    if not checked:
        known = [*{t[0] for t in found}, *(t[3] for t in found)]
        brings = (
            f"brings only {', '.join(sorted({h.kind for h in hits}))}, which the kit does not check" if hits else ""
        )
        raise LookupFailed(
            f"{word} {brings or 'is no component, no distribution with components, and no file of a plugin'}."
            f"{'' if hits else nearest(word, known)}\n  agentrig plugins lists what is installed"
        )
    return checked


def _components(file: str) -> list[tuple[str, str, str, str]]:
    """Return what `_listed` does, of a file or, for '', of what is installed."""
    try:
        return elsewhere(_listed, str(Path(file).resolve()) if file else "", deadline_s=LOADS_S)
    except EndedElsewhere as error:
        raise LookupFailed(f"{file or 'an installed plugin'} cannot be loaded: {error}") from error


def _in_files(name: str, files: Sequence[str], kind: str = "") -> str:
    """Return `FILE.py:NAME` if one of the files brings a component of that name, else the name."""
    if not name.endswith(".py"):
        for file in files:
            if any(c[0] == "file" and c[3] == name and kind in ("", c[2]) for c in _components(file)):
                return f"{file}:{name}"
    return name


def _of_run_file(file: str) -> str:
    """Say how to validate the agent of a run file."""
    try:
        sections = read_run_file(Path(file))
    except AgentrigError as error:
        return str(error)
    plugins = "".join(f" --plugin {name}" for name in sections.get("run", {}).get("plugins", ()))
    uses = {kind: sections.get(kind, {}).get("use", f"{kind.upper()}") for kind in ("agent", "tasks", "reward")}
    keys = "".join(f" agent.{key}=…" for key in sections.get("agent", {}) if key != "use")
    return (
        f"{file} is a run file, and validate checks components. For its agent:\n"
        f"  agentrig validate {uses['agent']}{plugins} --tasks {uses['tasks']} --reward {uses['reward']}{keys}\n"
        f"  agentrig dev {file} plays the run's own agent"
    )


def validated(found: Sequence[Target], asked: Asked) -> Validation:
    """Run the checks of each component, and a trial of each agent that has tasks and a reward.

    Raises:
        ConfigError: A section that nothing here reads; or no tasks for an agent or a reward.
    """
    kinds = {target.kind for target in found}
    known = sorted({*kinds, *(("tasks", "agent", "reward", "adapter", "gateway") if kinds & set(TRIED) else ())})
    for section in asked.settings:
        if section not in known:
            raise ConfigError(
                f"nothing that is validated reads [{section}].{nearest(section, known)} Known: {', '.join(known)}"
            )
    asked = attrs.evolve(asked, uses={kind: _in_files(name, asked.files, kind) for kind, name in asked.uses.items()})
    reports: list[Report] = []
    trials: list[Mapping[str, Any]] = []
    for target in found:
        parts = _parts(target, found, asked) if target.kind in TRIED else {}
        options: dict[str, Any] = {}
        if parts:
            options = {"tasks": parts["tasks"].given or None, "tasks_settings": parts["tasks"].keys}
            if not parts["tasks"].given and not target.has_tasks and asked.only is None:
                raise ConfigError(
                    f"say on which tasks to try {target.given}: --tasks NAME, or --tasks FILE.py:NAME.\n"
                    "  agentrig plugins lists the installed task sets"
                )
        if target.kind == "agent":
            options["gateway"] = asked.settings.get("gateway")
            if asked.script is not None:
                options["script"] = asked.script
        table = table_of(target.kind)
        only = _chosen(table, asked.only)
        settings = parts[target.kind].keys if parts else asked.settings.get(target.kind)
        report: Report = table.check_all(target.given, settings, only, False, options, asked.say)
        if report.results:
            reports.append(report)
        plays = target.kind == "agent" and parts["reward"].given and _chosen(PLAY, asked.only) != []
        if plays and not {r.check for r in report.failed} & UNPLAYABLE:
            report, figures = _trial(parts, asked)
            reports.append(report)
            trials += [figures] if figures else []
    return Validation(reports=reports, trials=trials)


def _chosen(table: Table[Any], only: Sequence[str] | None) -> list[str] | None:
    """Return the names of a table's checks among those that were asked for; None for all.

    Raises:
        ConfigError: A check that no table has.
    """
    if only is None:
        return None
    every = [d.name for known in (*(table_of(kind) for kind in CHECKED), PLAY) for d in known]
    for word in only:
        if word not in every:
            raise ConfigError(f'there is no check "{word}".{nearest(word, every)} docs/reference/checks.md lists them')
    return [d.name for d in table if d.name in only]


def _parts(target: Target, found: Sequence[Target], asked: Asked) -> Mapping[str, _Part]:
    """Return with what an agent or a reward is tried: what is asked for, else its recipe's, else what is beside it."""
    recipe = _recipe(target, found)
    parts = {}
    for kind in ("tasks", "agent", "reward", "adapter"):
        keys = dict(recipe.get(kind, {}))
        use = keys.pop("use", "")
        beside = [other.given for other in found if other.kind == kind]
        own = next((g for g in beside if _same(g, use)), use) or next(iter(beside), "")
        given = target.given if kind == target.kind else asked.uses.get(kind) or own
        if kind == "adapter" and not given:
            given, keys = "agent-match", {"match": ""}
        elif not _same(given, use):
            keys = {}
        parts[kind] = _Part(given, {**keys, **asked.settings.get(kind, {})})
    return parts


def _recipe(target: Target, found: Sequence[Target]) -> Mapping[str, Mapping[str, Any]]:
    """Return the sections of the first recipe among them that uses a component; none if there is no such recipe."""
    for other in found:
        if other.kind == "recipe":
            sections: Mapping[str, Mapping[str, Any]] = subject_of("recipe", other.given).spec.settings
            if _same(target.given, sections.get(target.kind, {}).get("use", "")):
                return sections
    return {}


def _same(given: str, use: str) -> bool:
    """Whether what finds a component (`NAME`, `FILE.py:NAME`) means the one that a recipe uses (also `OWNER:NAME`)."""
    return bool(use) and given.rpartition(":")[2] == use.rpartition(":")[2]


def _trial(parts: Mapping[str, _Part], asked: Asked) -> tuple[Report, Mapping[str, Any] | None]:
    """Play the agent with its tasks and reward; return the report, and the figures if it could be played."""
    more: dict[str, Any] = {kind: part.given or None for kind, part in parts.items() if kind != "agent"}
    more |= {f"{kind}_settings": part.keys for kind, part in parts.items() if kind != "agent"}
    bench = PLAY.open(
        subject_of("agent", parts["agent"].given, parts["agent"].keys),
        None,
        {
            **more,
            **{"limit": asked.limit, "script": asked.script, "endpoint": asked.endpoint},
            "gateway": asked.settings.get("gateway"),
        },
    )
    try:
        report = PLAY.report(bench, _chosen(PLAY, asked.only), asked.say)
        figures = bench.figures() if not {r.check for r in report.failed} & UNPLAYABLE else None
    finally:
        bench.close()
    return report, figures


def _listed(file: str) -> list[tuple[str, str, str, str]]:
    """Return distribution, plugin, kind and name of every component, in the other process."""
    registry = load(files=[file] if file else [])
    broken = [p for p in registry.plugins if p.status == "failed" and p.origin == file]
    if broken:
        raise LookupFailed(f"{file}: {broken[0].error}")
    return [(c.distribution, c.plugin, c.kind, c.spec.name) for p in registry.plugins for c in p.components]


def _here() -> str:
    """Return the name of the package in the current folder."""
    file = Path("pyproject.toml")
    if not file.is_file():
        raise ConfigError(
            "say what to validate: a component's name, a package, a FILE.py, or run it in a package's folder"
        )
    name = tomllib.loads(file.read_text("utf-8")).get("project", {}).get("name")
    if not isinstance(name, str):
        raise ConfigError("pyproject.toml names no project: say what to validate")
    return name
