"""The page: fills the templates with a run's metrics, findings and samples."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from agentrig.errors import RunFileError
from agentrig.figures import NOTHING, mean, percent
from agentrig.run.damage import reading
from agentrig.view import calls, figures, table
from agentrig.view.diagnosis import Diagnosis, details, diagnose, verdict
from agentrig.view.findings import failures_by_kind, failures_of_steps
from agentrig.view.html import templates
from agentrig.view.plots import plots_of, second_rewards
from agentrig.view.reading import SECOND, RunData, mapping, number
from agentrig.view.samples import Shelf, before_after, reward_disagreements
from agentrig.view.text import count, duration, figure, plain

if TYPE_CHECKING:
    from jinja2 import Template

PLOTS = ("accuracy", "reward", "time", "response tokens")
"""Drawings that every run has sooner or later; the page says which of them have nothing to draw yet."""

WARNINGS = 200
"""Warnings that a page shows; the newest."""


def render(runs: Sequence[RunData], *, gold: bool = False) -> str:
    """Return the page of one run, or of several that it compares: one file, without scripts.

    Args:
        runs: At least one.
        gold: Whether the rollouts are shown with the private part of their tasks.
    """
    shelf = Shelf(gold=gold)
    rows = [table.row_of(run) for run in runs]
    views = []
    for i, (run, row) in enumerate(zip(runs, rows, strict=True)):
        shown = view(run, row, at=f"run-{i + 1}-" if len(runs) > 1 else "", drawn=len(runs) == 1)
        views.append(shown | shelf.shown(run, shown))
    several = len(runs) > 1
    drawn = plots_of(runs) if several else views[0]["curves"]
    sections = {"curves": "curves", "results": "results"}
    if several:
        sections |= {"settings": "settings that differ", "runs": "each run"}
    else:
        sections |= {"examples": "before and after"} if views[0]["pairs"] else {}
        sections |= {"rollouts": "rollouts"} if views[0]["shown"] else {}
        sections |= {"run": "run"}
    return _template().render(
        title=f"{len(runs)} runs" if several else runs[0].name,
        parts=list(sections.items()),
        names=[run.name for run in runs],
        runs=views,
        columns=table.COLUMNS,
        cells=[shown["cells"] for shown in views],
        curves=drawn,
        differences=differences(runs) if several else [],
    )


@lru_cache(maxsize=1)
def _template() -> Template:
    return templates().get_template("page.html.j2")


def view(
    run: RunData, row: Mapping[str, Any], *, whole: bool = True, at: str = "", drawn: bool = True
) -> dict[str, Any]:
    """Return what the templates show of a run.

    Args:
        run: The run.
        row: Its row of the results (`agentrig.view.table.row_of`).
        whole: Whether to read its rollouts too, which takes seconds for many; without them there are no examples.
        at: The beginning of its anchors, for a page with several runs.
        drawn: Whether to draw its curves.
    """
    missing = list(run.missing)
    pairs = before_after(run, missing) if whole else None
    failures = failures_by_kind(run, missing) if whole else failures_of_steps(run)
    disagreements = reward_disagreements(run, missing) if whole and second_rewards(run) else []
    if whole and pairs is None and run.files:
        missing.append("no tasks were measured both before and after training, so none can be compared")
    told: dict[str, Any] = {"problems": [], "warnings": [], "checks": []}
    if whole:
        found = diagnose(run)
        told = of_diagnosis(found)
        missing += found.missing
    status = figures.status(run)
    drawings = plots_of([run]) if drawn else []
    names = {plot.name for plot in drawings}
    return {
        "at": at,
        "curves": drawings,
        "absent_plots": [name for name in PLOTS if name not in names],
        "log": warnings_of(run),
        "columns": table.COLUMNS,
        "cells": table.cells(row),
        "shown": [],
        "name": run.name,
        "recipe": run.recipe,
        "status": status,
        "good": status == "finished",
        "about": _about(run),
        "accuracy": row["accuracy"],
        "reward": row["reward"],
        "split": _split(run),
        "tiles": _tiles(run, row, failures.rollouts),
        **told,
        "failures": failures,
        "time": _time_rows(run),
        "nodes": _node_rows(run),
        "calls": calls.rows(run),
        "second_rewards": _second_rows(run),
        "parts": _part_rows(run),
        "reward_disagreements": disagreements,
        "algorithm": _algorithm_rows(run),
        "pairs": pairs,
        "config": run.config_text,
        "manifest": json.dumps(run.manifest, indent=2, ensure_ascii=False) if run.manifest else "",
        "missing": list(dict.fromkeys(missing)),
    }


def warnings_of(run: RunData) -> list[dict[str, Any]]:
    """Return what the run has warned of so far, the newest first."""
    try:
        with reading(run.directory / "log.jsonl"):
            text = (run.directory / "log.jsonl").read_text("utf-8", "replace")
    except (OSError, RunFileError):
        return []
    found = []
    for line in text.splitlines()[-WARNINGS:]:
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            found.append({"step": value.get("step"), "level": value.get("level"), "text": str(value.get("text"))})
    return found[::-1]


def of_diagnosis(found: Diagnosis) -> dict[str, Any]:
    """Return what the templates show of a diagnosis."""
    checks = [f.text for f in found.checks]
    no_gain = [verdict(found)] if found.steps and not found.gained and not found.problems else []
    return {
        "problems": [(f.cause, f.text, details(f)) for f in found.problems],
        "warnings": [*no_gain, *(f.text for f in found.warnings)],
        "checks": [verdict(found), *checks] if found.steps and found.gained and not found.problems else checks,
    }


def _about(run: RunData) -> list[tuple[str, str]]:
    """Return what the run used: components, hardware, versions, data."""
    manifest = run.manifest
    hardware = mapping(manifest.get("hardware"))
    names = figures.devices(run)
    found = [("components", _components(run)), ("model", str(manifest.get("model") or ""))]
    server = mapping(manifest.get("server"))
    if server.get("chosen"):  # by `auto`
        found.append(("server", f"{server.get('name')}, chosen by auto: {server['chosen']}"))
    found.append(("hardware", ": ".join(p for p in (str(hardware.get("name") or ""), _grouped(names)) if p)))
    versions = {
        "agentrig": manifest.get("agentrig"),
        "python": manifest.get("python"),
        **mapping(manifest.get("packages")),
    }
    found.append(("versions", ", ".join(f"{name} {version}" for name, version in versions.items() if version)))
    found.append(("plugins", ", ".join(_plugin(p) for p in _list(manifest.get("plugins")) if isinstance(p, Mapping))))
    data = mapping(manifest.get("data"))
    found.append(("data", ", ".join(_data(role, mapping(d)) for role, d in data.items())))
    seed = manifest.get("seed", run.setting("run", "seed"))
    found.append(("seed", "" if seed is None else str(seed)))
    found.append(("started", str(manifest.get("created") or "")))
    return [(name, text) for name, text in found if text]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _components(run: RunData) -> str:
    components = mapping(run.manifest.get("components"))
    return ", ".join(f"{kind} {mapping(c).get('name')}" for kind, c in components.items())


def _plugin(plugin: Mapping[str, Any]) -> str:
    text = f"{plugin.get('distribution')} {plugin.get('version')}"
    return text if plugin.get("status", "ok") == "ok" else f"{text} ({plugin['status']})"


def _data(role: str, data: Mapping[str, Any]) -> str:
    split = f" ({data['split']})" if data.get("split") else ""
    return f"{role}{split} {count(data.get('tasks'))} tasks, {str(data.get('fingerprint') or '')[:12]}"


def _grouped(names: Sequence[str]) -> str:
    unique = dict.fromkeys(names)
    return ", ".join(f"{names.count(name)} × {name}" if names.count(name) > 1 else name for name in unique)


def _split(run: RunData) -> str:
    stated = mapping(mapping(run.manifest.get("data")).get("report")).get("split") or run.setting("run", "report")
    return f"held-out split {stated}" if stated else "held-out split"


def _tiles(run: RunData, row: Mapping[str, Any], rollouts: Mapping[str, int]) -> list[tuple[str, str, str]]:
    """Return the headline numbers: label, number, remark."""
    reward = figures.change(run, "reward")
    wall = row["hours"]
    tokens = mean(figures.series(run, "tokens_per_s")[1])
    speed = mean(figures.series(run, "rollouts_per_s")[1])
    best = row["accuracy"]["best_validation"]
    failed = sum(row["failures"].values())
    total = row["rollouts"] if row["rollouts"] is not None else sum(rollouts.values())
    tiles = [
        ("steps", count(row["steps"]), f"{plain(row['s_per_step'], 1)} s each"),
        ("wall time", NOTHING if wall is None else duration(3600 * wall), ""),
        ("rollouts", count(total), f"{count(failed)} failed"),
    ]
    if reward is not None:
        tiles.append(("training reward", f"{reward['first']:.3f} → {reward['last']:.3f}", "first and last steps"))
    if best is not None:
        steps, values = figures.validation(run)
        at = steps[values.index(best)]
        reward_at = figures.validation_rewards(run).get(at)
        where = f"step {at}" if at else "before training"
        remark = where if reward_at is None else f"{where}, mean reward {figure(reward_at)}"
        tiles.append(("best validation", f"{percent(best)}%", remark))
    if speed is not None:
        tiles.append(("rollouts a second", figure(speed), "" if tokens is None else f"{count(round(tokens))} tokens/s"))
    return tiles


def _time_rows(run: RunData) -> list[tuple[str, float | None, float | None]]:
    """Return part, mean seconds a step, share of the steps' wall time."""
    split, shares = figures.time_split(run), figures.time_share(run)
    return [(part, split.get(part), shares.get(part)) for part in dict.fromkeys([*split, *shares])]


def _node_rows(run: RunData) -> list[tuple[str, int, int]]:
    """Return node, calls seen, calls trained; the busiest first."""
    seen, trained = figures.totals(run, "nodes", "seen"), figures.totals(run, "nodes", "trained")
    names = sorted(seen.keys() | trained.keys(), key=lambda n: (-seen.get(n, 0), n))
    return [(name, seen.get(name, 0), trained.get(name, 0)) for name in names]


def _second_rows(run: RunData) -> list[dict[str, Any]]:
    trained = mean(figures.series(run, "reward")[1])
    return [{"name": name, "trained": trained, **_second_row(run, name)} for name in second_rewards(run)]


def _second_row(run: RunData, name: str) -> dict[str, Any]:
    """Return a second reward's figures over all steps."""
    counted, agreed = [], []
    for row in run.steps:
        found = mapping(mapping(row.get(SECOND)).get(name))
        differ, n = number(found.get("differs")), number(found.get("n"))
        if differ is not None and n is not None:
            counted.append((differ, n))
        share = number(found.get("agreement"))
        if share is not None and n:
            agreed.append((share * n, n))
    of = sum(n for _, n in agreed)
    return {
        "mean": mean(figures.series(run, SECOND, name, "mean")[1]),
        "differ": int(sum(d for d, _ in counted)) if counted else None,
        "of": int(sum(n for _, n in counted)),
        "agreement": sum(a for a, _ in agreed) / of if of else None,
    }


def _part_rows(run: RunData) -> list[dict[str, Any]]:
    """Return each component of the scores: its mean in the first steps, in the last ones, and over all."""
    names = dict.fromkeys(name for row in run.steps for name in mapping(row.get("reward_parts")))
    rows = []
    for name in names:
        _, values = figures.series(run, "reward_parts", name)
        if values:
            few = max(1, min(figures.SMOOTHING, len(values) // 2))
            ends = mean(values[:few]), mean(values[-few:])
            rows.append({"name": str(name), "first": ends[0], "last": ends[1], "mean": mean(values)})
    return rows


def _algorithm_rows(run: RunData) -> list[dict[str, Any]]:
    names = dict.fromkeys(name for row in run.steps for name in mapping(row.get("algorithm")))
    rows = []
    for name in names:
        _, values = figures.series(run, "algorithm", name)
        if values:
            found = {"first": values[0], "last": values[-1], "least": min(values), "most": max(values)}
            rows.append({"name": name, "points": spark(values), **found})
    return rows


def spark(values: Sequence[float], width: int = 120, height: int = 22) -> str:
    """Return an SVG polyline's points for a small curve of the values; empty for fewer than two."""
    if len(values) < 2:
        return ""
    low, span = min(values), (max(values) - min(values)) or 1.0
    across = (width - 2) / (len(values) - 1)
    return " ".join(
        f"{1 + i * across:.1f},{height - 2 - (height - 4) * (v - low) / span:.1f}" for i, v in enumerate(values)
    )


def differences(runs: Sequence[RunData]) -> list[tuple[str, list[str]]]:
    """Return the settings in which runs differ: `section.key` and each run's value."""
    flat = [dict(_flat(run.config)) for run in runs]
    keys = sorted({key for settings in flat for key in settings})
    rows = [(key, [settings.get(key, NOTHING) for settings in flat]) for key in keys if key != "run.name"]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _flat(tree: Mapping[str, Any], above: str = "") -> list[tuple[str, str]]:
    found = []
    for key, value in tree.items():
        if isinstance(value, Mapping):
            found += _flat(value, f"{above}{key}.")
        else:
            found.append((f"{above}{key}", json.dumps(value, ensure_ascii=False, default=str)))
    return found
