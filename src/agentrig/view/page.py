"""The page: fills the templates with a run's metrics, findings and samples."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from agentrig.figures import SIGNIFICANT, count, duration, figure, mean, number, percent, plain, sign_test
from agentrig.text import amount
from agentrig.traces import items
from agentrig.view import figures, table, tables
from agentrig.view.causes.evidence import Evidence
from agentrig.view.causes.outcome import go_on, mean_reward, remarks, unfinished
from agentrig.view.comparison import compared
from agentrig.view.diagnosis import Diagnosis, details, diagnose, verdict
from agentrig.view.html import templates
from agentrig.view.plots import Plot, colors_of, plots_of, second_rewards
from agentrig.view.prices import Prices
from agentrig.view.reading import RunData, dig, mapping, warnings_of
from agentrig.view.related import seed_of
from agentrig.view.samples import before_after, reward_disagreements, shown

PLOTS = ("accuracy", "reward", "time", "response tokens")
"""Drawings that every run has sooner or later; the page says which of them have nothing to draw yet."""


def render(
    runs: Sequence[RunData],
    *,
    gold: bool = False,
    prices: Prices | None = None,
    each: bool = False,
    images: str = "",
) -> str:
    """Return the page of one run, or of several that it compares: one file, without scripts.

    `images` is the name of the folder beside it that has its plots as images; empty if there is none.

    Raises:
        ConfigError: A run is named twice.
    """
    comparison = compared(runs, prices=prices, each=each).table() if len(runs) > 1 else None
    views, several, drawn = [], len(runs) > 1, plots_of(runs)
    for i, run in enumerate(runs, 1):
        found = view(run, at=f"run-{i}-" if several else "", drawn=drawn)
        views.append(found | shown(run, found, gold=gold))
    sections = {"comparison": "comparison"} if several else {}
    sections |= {"curves": "curves", "results": "results"}
    if several:
        sections |= {"settings": "settings that differ", "runs": "each run"}
    else:
        sections |= {"examples": "before and after"} if views[0]["pairs"] else {}
        sections |= {"rollouts": "rollouts"} if views[0]["shown"] else {}
        sections |= {"run": "run"}
    return (
        templates()
        .get_template("page.html.j2")
        .render(
            title=f"{len(runs)} runs" if several else runs[0].name,
            parts=list(sections.items()),
            runs=views,
            comparison=comparison,
            curves=drawn,
            results=table.results(
                [{**found["row"], **found["held_out"]} for found in views], colors=colors_of(runs) if several else ()
            ),
            differences=differing_settings(runs),
            images=images,
        )
    )


def view(
    run: RunData,
    *,
    whole: bool = True,
    at: str = "",
    drawn: Sequence[Plot] = (),
) -> dict[str, Any]:
    """Return what the templates show of a run; `at` begins its anchors, for a page with several runs.

    Not `whole`: its rollouts, which take seconds if they are many, are not read, and there are no examples.
    """
    ends = before_and_after(run, whole=whole)
    failed = [tables.failures(run)] if whole else []
    told: dict[str, Any] = {"problems": [], "verdict": "", "warnings": [], "checks": []}
    if whole:
        told = of_diagnosis(diagnose(run))
    row = table.row_of(run)
    names = {plot.name for plot in drawn}
    return {
        "at": at,
        "curves": drawn,
        "absent_plots": [name for name in PLOTS if name not in names],
        "log": warnings_of(run),
        "row": row,
        "results": table.results([row]),
        "shown": [],
        "name": run.name,
        "recipe": run.recipe,
        "resumed": [str(when) for when in items(run.manifest.get("resumed"))],
        "status": row["status"],
        "progress": figures.progress(run),
        "about": _about(run),
        "tiles": _tiles(run, row),
        **told,
        "tables": tables.tables(run, [*ends["slices"], *failed]),
        **ends,
        "config": run.config_text,
        "manifest": json.dumps(run.manifest, indent=2, ensure_ascii=False) if run.manifest else "",
        "missing": list(dict.fromkeys([*run.missing, *ends["missing"], *run.damage])),
    }


def before_and_after(run: RunData, *, whole: bool = True) -> dict[str, Any]:
    """Return what the templates show of both ends of training, and of where rewards disagree.

    Returns:
        The held-out `accuracy` and `reward`, `chance`, in words, whether the gain may be chance, and more; `chance` is
        empty without held-out rollouts of both ends.
    """
    evidence = Evidence.of_ends(run)
    better, worse, _, _ = evidence.changed
    p = sign_test(*evidence.learned)
    chance = evidence.chance if evidence.where.startswith("held-out") and better + worse else ""
    measured = figures.held_out(run)
    stated = dig(run.manifest, "data", "report", "split") or run.setting("run", "report")
    found = {**measured, "measured": any(number(measured["accuracy"][end]) is not None for end in tables.ENDS)}
    held_out = tables.held_out(run) if whole else {}
    found |= {
        "running": run.running,
        "unfinished": f"{stopped} {go_on(evidence)}" if (stopped := unfinished(evidence)) else "",
        "split": f"held-out split {stated}" if stated else "held-out split",
        "missing": [],
        "chance": chance,
        "gain": evidence.gain,
        "gain_text": evidence.gain_text,
        "graded": "".join(f.text for f in mean_reward(evidence) if evidence.where.startswith("held-out")),
        "significant": bool(chance) and p <= SIGNIFICANT,
        "remarks": remarks(evidence, held_out),
    }
    if not whole:
        return {**found, "pairs": None, "reward_disagreements": [], "held_out": {}, "slices": []}
    pairs = before_after(evidence)
    if pairs is None and run.files and not (run.running or evidence.unread):
        found["missing"] = ["no tasks were measured both before and after training, so none can be compared"]
    disagree = reward_disagreements(run) if second_rewards(run) else []
    slices = [table for table in tables.slices(held_out) if table.rows]
    return {**found, "pairs": pairs, "reward_disagreements": disagree, "held_out": held_out, "slices": slices}


def of_diagnosis(found: Diagnosis) -> dict[str, Any]:
    """Return what the templates show of a diagnosis."""
    return {
        "problems": [(f.cause, f.text, details(f)) for f in found.problems],
        "verdict": "" if found.problems else verdict(found),
        "warnings": [f.text for f in found.warnings],
        "checks": [(f.level, f.text) for f in found.checks],
    }


def _about(run: RunData) -> list[tuple[str, str]]:
    """Return what the run used: components, hardware, versions, data."""
    manifest = run.manifest
    components, server, packages, data = (
        mapping(manifest.get(key)) for key in ("components", "server", "packages", "data")
    )
    listed = [
        f"{plugin.get('distribution')} {plugin.get('version')}"
        + ("" if plugin.get("status", "ok") == "ok" else f" ({plugin['status']})")
        for plugin in map(mapping, items(manifest.get("plugins")))
        if plugin
    ]
    versions = {"agentrig": manifest.get("agentrig"), "python": manifest.get("python"), **packages}
    splits = [
        f"{role}{' (' + str(d['split']) + ')' if d.get('split') else ''} {count(d.get('tasks'))} tasks, "
        f"{str(d.get('fingerprint') or '')[:12]}"
        for role, d in ((role, mapping(found)) for role, found in data.items())
    ]
    seed = seed_of(run)
    chosen = server.get("chosen")  # by `auto`
    about = {
        "components": ", ".join(f"{kind} {mapping(found).get('name')}" for kind, found in components.items()),
        "model": str(manifest.get("model") or ""),
        "starts from": figures.descent(run),
        "server": f"{server.get('name')}, chosen by auto: {chosen}" if chosen else "",
        "hardware": figures.machine(run),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
        "plugins": ", ".join(listed),
        "data": ", ".join(splits),
        "seed": "" if seed is None else str(seed),
        "started": str(manifest.get("created") or ""),
    }
    return [(name, text) for name, text in about.items() if text]


def _tiles(run: RunData, row: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return the headline numbers: label, number, remark."""
    reward = figures.change(run, "reward")
    wall = row["hours"]
    tokens = mean(figures.series(run, "tokens_per_s")[1])
    speed = mean(figures.series(run, "rollouts_per_s")[1])
    best = row["accuracy"]["best_validation"]
    failed = sum(row["failures"].values())
    counted = [number(line.get("rollouts")) or 0 for line in run.steps]
    total = row["rollouts"] if row["rollouts"] is not None else sum(counted)
    training = "" if row["train_rollouts"] is None else f"{count(row['train_rollouts'])} in training, "
    begun = max((file.step for file in run.of_mode("train")), default=0)
    unfinished = f"; ended in step {begun}" if run.error and begun > (row["steps"] or 0) else ""
    each = "" if row["s_per_step"] is None else f"{plain(row['s_per_step'], 1)} s each"
    audit_s = row["time_s"].get("audit", 0.0)
    each += f", {plain(audit_s, 1)} s of it auditing" if audit_s >= 0.05 else ""
    tiles = [("steps", count(row["steps"]), f"{each}{unfinished}".removeprefix("; "))]
    if wall is not None:
        known = any(number(of.get("wall_s")) is not None for of in (run.summary, run.progress))
        name = "wall time" if known else "time of the steps"
        tiles.append((name, duration(3600 * wall), ""))
    tiles.append(("rollouts", count(total), f"{training}{count(failed)} failed"))
    if reward is not None:
        tiles.append(("training reward", *_reward(run, reward)))
    steps, values = figures.validation(run)
    if best is not None and len(values) > 1:  # one measurement is no best one
        at = steps[values.index(best)]
        reward_at = dict(zip(*figures.validation(run, "reward"), strict=True)).get(at)
        where = f"step {at}" if at else "before training"
        where += ", none later" if at == steps[-1] < (row["steps"] or 0) else ""
        remark = where if reward_at is None else f"{where}, mean reward {figure(reward_at)}"
        used = [dig(run.manifest, "data", "validation", "tasks"), run.setting("run", "validation_tasks")]
        n = min((int(value) for each in used if (value := number(each))), default=0)
        remark += f", {amount(count(n), 'task')}" if n else ""
        tiles.append(("best validation", f"{percent(best)}%", remark))
    if speed is not None:
        tiles.append(("rollouts a second", figure(speed), "" if tokens is None else f"{count(round(tokens))} tokens/s"))
    return tiles


def _reward(run: RunData, ends: Mapping[str, float]) -> tuple[str, str]:
    """Return the mean training reward of the first and of the last steps, and what it is a mean of."""
    steps = figures.series(run, "reward")[0]
    few, first = figures.few(len(steps)), f"{ends['first']:.3f}"
    if len(steps) == 1:
        return first, f"step {steps[0]}"
    n = mean(figures.series(run, "rollouts")[1])
    size = f"about {count(round(few * n))} rollouts of sampled tasks each: " if n else ""
    which = f"means of the first and the last {few} steps" if few > 1 else "first and last step"
    remark = f"{which}, {size}small changes may be chance; held-out tasks measure the gain"
    return f"{first} → {ends['last']:.3f}", remark


def differing_settings(runs: Sequence[RunData]) -> tables.Table:
    """Return the settings in which runs differ, with each run's value."""
    several = [figures.settings_of(run) for run in runs]
    changed = [{key for _, key, _ in run.changes} for run in runs]

    def text(key: str, settings: Mapping[str, Any], told: Collection[str]) -> str:
        if key not in settings:
            return figures.unset(key, settings, several)
        return str(settings[key]) if key in told else figures.setting_text(key, settings[key])

    keys = sorted({key for settings in several for key in settings} - {"run.name"})
    rows = [[key, *(text(key, *each) for each in zip(several, changed, strict=True))] for key in keys]
    rows = [row for row in rows if len(set(row[1:])) > 1]
    note = "" if rows else "None: their settings are the same."
    heads = [("Setting", "head"), *((run.name, "run" if len(runs) > 1 else "") for run in runs)]
    return tables.Table(title="Settings that differ", heads=heads, rows=rows, note=note, colors=colors_of(runs))
