"""How runs belong together: what one began with, which differ only in their seed, and which to compare it with."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from agentrig.errors import AgentrigError, short_path
from agentrig.figures import NOTHING
from agentrig.run.damage import read_object
from agentrig.run.manifest import OF_NO_STEP
from agentrig.text import flat
from agentrig.traces import mapping
from agentrig.view import figures
from agentrig.view.reading import RunData, dig, read_run

NAMES = 3
"""Runs of one line that are named; more are counted."""


CHECKS = frozenset(("run.audit", "run.second_reward", "run.plugins", "run.block"))
"""Settings that change no rollout and no update: a line names them last."""

NO_RESULT = (OF_NO_STEP | CHECKS | {"run.name", "run.seed", "algorithm.model", "server.model"}) - {"algorithm.steps"}
"""Settings, and sections, that are no reason for another result, and those that say what a run began with."""


@attrs.frozen(kw_only=True)
class Start:
    """What a run began with: a model, or a step of a run, whose directory is `run`; the `id` is that of the weights."""

    name: str
    id: str
    run: Path | None = None


def start_of(run: RunData) -> Start:
    """Return what a run began with: a model, or a checkpoint of another run.

    That run is where the path says, or beside this one.
    """
    model = figures.starting_model(run)
    return start_at(model, run.directory.parent) if model else Start(name=NOTHING, id=f"{run.directory}: unknown")


def start_at(model: str, folder: Path) -> Start:
    """Return what a run in a folder begins with, if this is its model; see `start_of`."""
    path = Path(model)
    if path.parent.name != "checkpoints":
        return Start(name=path.name or NOTHING, id=str(path))
    stated = path.parent.parent
    places = (stated, folder / stated.name)
    there = next((place.resolve() for place in places if os.path.isfile(place / "config.toml")), None)
    step = path.name.removeprefix("step-").lstrip("0") or "0"
    return Start(name=f"run {stated.name}, step {step}", id=f"{there or stated}@{path.name}", run=there)


def origin(model: str, folder: Path) -> str:
    """Return by which name the comparison would show the model of a run in a folder: that of its first ancestor."""
    known: dict[Path, RunData] = {}
    start = start_at(model, folder)
    earlier = earlier_of(start, known)
    return start.name if earlier is None else start_of(ancestors_of(earlier, known)[-1]).name


def ancestors_of(run: RunData, known: dict[Path, RunData]) -> list[RunData]:
    """Return the run, the one that it came from, the one that this came from, and so on."""
    found = [run]
    while (earlier := earlier_of(start_of(found[-1]), known)) and earlier not in found:
        found.append(earlier)
    return found


def earlier_of(start: Start, known: dict[Path, RunData]) -> RunData | None:
    """Return the run that another one began with; None if it began with a model, or the run cannot be read."""
    if start.run is None:
        return None
    with contextlib.suppress(AgentrigError):
        if start.run not in known:
            known[start.run] = read_run(start.run)
    return known.get(start.run)


def without_seed(run: RunData, known: dict[Path, RunData]) -> str:
    """Return a text that is the same for runs that differ only in their seed, and whose starts do, too."""
    if not run.config:
        return str(run.directory)
    kept = {
        key: value
        for key, value in figures.settings_of(run).items()
        if key not in ("run.name", "run.seed", "run.directory")
    }
    begun = _begun(run, known)
    kept |= {} if isinstance(begun, str) else {"algorithm.model": begun}
    kept["files"] = {key: digest for key, (_, digest) in _files_of(run).items()}
    data = {role: dig(run.manifest, "data", role, "fingerprint") for role in ("train", "report")}
    return json.dumps([kept, data], sort_keys=True, default=str)


def _begun(run: RunData, known: dict[Path, RunData]) -> str | list[str]:
    """Return the model that a run began with; of a checkpoint, its step and its run's `without_seed`."""
    start = start_of(run)
    earlier = earlier_of(start, known)
    if earlier is None:
        return figures.starting_model(run)
    return [without_seed(earlier, known), start.id.rpartition("@")[2]]


def settings_apart(run: RunData, other: RunData, known: dict[Path, RunData]) -> list[str]:
    """Name what differs between two runs and can be why their results do: settings, files, start and training tasks.

    Another component is one difference: the settings that only one of the two has belong to it.
    """
    one, two = figures.settings_of(run), figures.settings_of(other)

    def differs(key: str) -> bool:
        section = key.partition(".")[0]
        use = f"{section}.use"
        if {key, section} & NO_RESULT or one.get(key) == two.get(key):
            return False
        return (key in one and key in two) or (use in one and one[use] == two.get(use))

    keys = [".".join(key.split(".")[:2]).removesuffix(".use") for key in dict.fromkeys([*one, *two]) if differs(key)]
    found = list(dict.fromkeys(keys))
    fingerprints = [dig(each.manifest, "data", "train", "fingerprint") for each in (run, other)]
    if fingerprints[0] != fingerprints[1] and not any(key.startswith(("tasks", "run.train")) for key in found):
        found.append("the training tasks")
    found += files_apart(run, other)
    return [*found, *(["the start"] if _begun(run, known) != _begun(other, known) else [])]


def _files_of(run: RunData) -> dict[str, tuple[str, str]]:
    """Return name and SHA-256 of a run's plugin files, by the component that each brings; of others, by their name.

    Others are also the modules beside them that they import; those that share a name count together.
    """
    digests = mapping(run.manifest.get("files"))
    brought = {k: f for k, f in mapping(run.manifest.get("component_files")).items() if f in digests}
    others: dict[str, str] = {}
    for file in digests:
        if file not in brought.values():
            name = short_path(file)
            others[name] = others.get(name, "") + str(digests[file])
    found = {key: (Path(file).name, str(digests[file])) for key, file in brought.items()}
    return found | {name: (name, of) for name, of in others.items()}


def files_apart(run: RunData, other: RunData) -> list[str]:
    """Name the plugin files whose content differs between two runs, each with what it brings."""
    one, two = _files_of(run), _files_of(other)
    brings: dict[str, list[str]] = {}
    for key in one:
        if key in two and one[key][1] != two[key][1]:
            name = " and ".join(dict.fromkeys((one[key][0], two[key][0])))
            brings.setdefault(name, []).extend([key] if key != one[key][0] else [])
    return [f"the file {name}" + (f" ({', '.join(keys)})" if keys else "") for name, keys in brings.items()]


def seed_of(run: RunData) -> Any:
    """Return a run's seed; None if nothing says it."""
    seed = run.setting("run", "seed")
    return run.manifest.get("seed") if seed is None else seed


def settings_numbers(runs: Sequence[RunData]) -> list[int]:
    """Return of each run the number of its settings, from 0: runs that differ only in their seed have the same."""
    known = {run.directory.resolve(): run for run in runs}
    texts = [without_seed(run, known) for run in runs]
    order = list(dict.fromkeys(texts))
    return [order.index(text) for text in texts]


def named(runs: Sequence[str], between: str) -> str:
    """Name the runs of a line; many are counted."""
    return between.join([*runs[:NAMES], *([f"and {len(runs) - NAMES} more"] if len(runs) > NAMES else [])])


def stem(name: str, seed: object) -> str:
    """Return a run's name without the seed at its end: `new` of `new-1` and of `new-seed1`; else the whole name."""
    return re.sub(rf"(?<=.)([-_.]|[-_.]?seed[-_.]?){re.escape(str(seed))}$", "", name)


def compare_command(other: Path, run: Path) -> str:
    """Return the command that tells how a run differs from another one."""
    return f"agentrig compare {shlex.join([str(other), str(run)])}"


def to_compare(run: RunData) -> Path | None:
    """Return the finished run in the folder of this one that tells most about its settings; None if there is none.

    It has the same held-out tasks and, if one has, the same start. Of these it is the one with the fewest other
    settings, and the newest of several. A run that differs in the seed only comes last.
    """
    tasks, own = dig(run.manifest, "data", "report", "fingerprint"), _told_settings(run.manifest)
    if tasks is None:
        return None
    found: list[tuple[tuple[bool, bool, int, float], Path]] = []
    for summary in run.directory.parent.glob("*/summary.json"):
        path = summary.parent
        with contextlib.suppress(OSError, AgentrigError):  # one that cannot be read is not offered
            manifest = read_object(path / "manifest.json")
            if path.resolve() == run.directory.resolve() or dig(manifest, "data", "report", "fingerprint") != tasks:
                continue
            others = _told_settings(manifest)
            apart = {key for key in own.keys() | others.keys() if own.get(key) != others.get(key)}
            order = (not apart, "algorithm.model" in apart, len(apart), -path.stat().st_mtime)
            found.append((order, path))
    return min(found)[1] if found else None


def _told_settings(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a manifest has, by dotted key, without what names a run, and its seed."""
    kept = flat(mapping(manifest.get("config")))
    return {key: value for key, value in kept if key not in ("run.name", "run.seed", "run.directory")}
