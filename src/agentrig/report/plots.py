"""The plots as PNG files, drawn by matplotlib; a page draws its own (`agentrig.report.curves`)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrig.report import figures
from agentrig.report.canvas import Colors, Draw, color_of, finish, render, short
from agentrig.report.curves import second_rewards
from agentrig.report.reading import SECOND, RunData, mapping, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

log = logging.getLogger(__name__)


def accuracy(figure: Figure, runs: Sequence[RunData], colors: Colors) -> bool:
    """Validation accuracy and smoothed training accuracy by step; held-out accuracy at both ends."""
    axes = figure.add_subplot()
    drawn = False
    for i, run in enumerate(runs):
        color = color_of(colors, i)
        label = short(run.name) if len(runs) > 1 else ""
        steps, values = figures.series(run, "accuracy")
        if not values:  # lines of earlier versions have none
            steps, values = figures.series(run, "reward")
        if values and min(values) >= 0 and max(values) <= 1:
            at, curve = figures.averaged(run, steps, [100 * v for v in values])
            if len(runs) == 1:
                axes.plot(steps, [100 * v for v in values], color=color_of(colors, 1), alpha=0.28, lw=1)
            axes.plot(
                at,
                curve,
                color=color_of(colors, 1) if len(runs) == 1 else color,
                lw=1.4,
                ls="-" if len(runs) == 1 else ":",
                label=f"training, mean of {figures.SMOOTHING} steps" if len(runs) == 1 else "",
            )
            drawn = True
        steps, values = figures.validation(run)
        if values:
            axes.plot(
                steps, [100 * v for v in values], color=color, lw=1.8, marker="o", ms=3.6, label=label or "validation"
            )
            label, drawn = "", True
        found = figures.accuracy(run)
        last = max((int(r["step"]) for r in run.steps), default=0)
        for x, value, interval in ((0, found.before, found.before_ci95), (last, found.after, found.after_ci95)):
            if value is None:
                continue
            drawn = True
            low, high = interval or (value, value)
            axes.errorbar(
                x,
                100 * value,
                yerr=[[100 * max(0.0, value - low)], [100 * max(0.0, high - value)]],
                fmt="D",
                ms=5.5,
                capsize=3,
                lw=1.2,
                color=colors.ink if len(runs) == 1 else color,
                label=label or ("held out, 95% interval" if len(runs) == 1 and x == 0 else ""),
                zorder=4,
            )
            label = ""
    key = "   (line: validation, dotted: training, diamonds: held out with 95% interval)" if len(runs) > 1 else ""
    finish(axes, colors, ylabel="accuracy, %", xlabel=f"step{key}")
    low, high = axes.get_ylim()
    axes.set_ylim(max(-2.0, low), min(102.0, high))
    return drawn


def reward(figure: Figure, runs: Sequence[RunData], colors: Colors) -> bool:
    """Mean reward by step: of training, raw and smoothed, of validation and held out; and of second rewards."""
    axes = figure.add_subplot()
    drawn = False
    for i, run in enumerate(runs):
        steps, values = figures.series(run, "reward")
        if not values:
            continue
        drawn = True
        color = color_of(colors, i if len(runs) > 1 else 1)  # alone: the colour that training has in the accuracy plot
        label = short(run.name) if len(runs) > 1 else f"mean of {figures.SMOOTHING} steps"
        axes.plot(steps, values, color=color, alpha=0.28, lw=1, label="" if len(runs) > 1 else "each step")
        axes.plot(*figures.averaged(run, steps, values), color=color, lw=1.8, label=label)
        steps, values = figures.series(run, "validation_reward")
        if values:
            own = "" if len(runs) > 1 else "validation"
            axes.plot(steps, values, color=color_of(colors, i), ls="none", marker="o", ms=3.6, label=own)
        found = figures.rewards(run)
        last = max((int(r["step"]) for r in run.steps), default=0)
        ends = [(x, value) for x, value in ((0, found.before), (last, found.after)) if value is not None]
        if ends:
            ink = colors.ink if len(runs) == 1 else color_of(colors, i)
            own = "" if len(runs) > 1 else "held out"
            axes.plot(*zip(*ends, strict=True), color=ink, ls="none", marker="D", ms=5.5, label=own)
        for j, name in enumerate(second_rewards(run), 1):
            steps, values = figures.series(run, SECOND, name, "mean")
            axes.plot(
                *figures.averaged(run, steps, values),
                color=color_of(colors, i if len(runs) > 1 else j + 1),
                lw=1.4,
                ls="--",
                label="" if len(runs) > 1 else f"second reward: {short(name)}",
            )
    finish(axes, colors, ylabel="mean reward")
    return drawn


def time(figure: Figure, runs: Sequence[RunData], colors: Colors) -> bool:
    """Seconds a step by part: by step for one run, the means side by side for several."""
    axes = figure.add_subplot()
    return _time_by_step(axes, runs[0], colors) if len(runs) == 1 else _time_by_run(axes, runs, colors)


def _time_by_step(axes: Axes, run: RunData, colors: Colors) -> bool:
    rows = [r for r in run.steps if number(r.get("step_s")) is not None]
    steps = [int(r["step"]) for r in rows]
    bottom = [0.0] * len(rows)
    wall = sum(number(r.get("step_s")) or 0.0 for r in rows)
    for i, part in enumerate([*figures.part_names(run), "other"]):
        values = [_seconds(r, part, run) for r in rows]
        if sum(values) < 0.001 * wall:  # too small to see
            continue
        # Bars, not areas: a single step is visible too, and nothing is interpolated between steps.
        color = colors.muted if part == "other" else color_of(colors, i)
        axes.bar(steps, values, bottom=bottom, width=1.0, color=color, lw=0.4, ec=color, label=part)
        bottom = [b + v for b, v in zip(bottom, values, strict=True)]
    finish(axes, colors, ylabel="seconds a step")
    return bool(rows)


def _seconds(row: Any, part: str, run: RunData) -> float:
    parts = {k: number(v) or 0.0 for k, v in mapping(row.get("time_s")).items()}
    if part != "other":
        return parts.get(part, 0.0)
    return max(0.0, (number(row.get("step_s")) or 0.0) - sum(parts.values()))


def _time_by_run(axes: Axes, runs: Sequence[RunData], colors: Colors) -> bool:
    splits = [figures.time_split(run) for run in runs]
    parts = list(dict.fromkeys(part for split in splits for part in split if part != "other"))
    left = [0.0] * len(runs)
    places = [-float(i) for i in range(len(runs))]
    for i, part in enumerate([*parts, "other"]):
        values = [split.get(part, 0.0) for split in splits]
        if sum(values) < 0.001 * sum(map(sum, (split.values() for split in splits))):
            continue
        color = colors.muted if part == "other" else color_of(colors, i)
        axes.barh(places, values, left=left, height=0.56, color=color, lw=0.4, ec=color, label=part)
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.set_yticks(places, labels=[short(run.name) for run in runs])
    finish(axes, colors, xlabel="mean seconds a step", grid="x")
    return any(left)


def lengths(figure: Figure, runs: Sequence[RunData], colors: Colors) -> bool:
    """Mean prompt and response tokens of a trained call, and trained calls a rollout, by step."""
    panels = (
        ("prompt_tokens", "prompt\ntokens"),
        ("response_tokens", "response\ntokens"),
        ("transitions_per_rollout", "transitions\na rollout"),
    )
    drawn = False
    several = figure.subplots(len(panels), 1, sharex=True)
    for axes, (key, label) in zip(several, panels, strict=True):
        for i, run in enumerate(runs):
            steps, values = figures.series(run, key)
            if not values:
                continue
            drawn = True
            axes.plot(steps, values, color=color_of(colors, i), alpha=0.28, lw=1)
            name = short(run.name) if len(runs) > 1 and axes is several[0] else ""
            axes.plot(*figures.averaged(run, steps, values), color=color_of(colors, i), lw=1.8, label=name)
        finish(axes, colors, ylabel=label, xlabel="step" if axes is several[-1] else "")
    return drawn


PLOTS: dict[str, tuple[Draw, float]] = {
    "accuracy": (accuracy, 3.5),
    "reward": (reward, 3.5),
    "time": (time, 3.5),
    "lengths": (lengths, 4.2),
}
"""File stem to the function that draws the plot and its height in inches."""


def draw_all(runs: Sequence[RunData], folder: Path) -> dict[str, Path]:
    """Write every plot as `folder/NAME.png`.

    Returns:
        Name to file; plots with nothing to draw are left out, and their old file is removed. Without matplotlib there
        are none.
    """
    if find_spec("matplotlib") is None:
        log.warning("%s has no images, because matplotlib is not installed: pip install 'agentrig[plots]'", folder)
        return {}
    folder.mkdir(parents=True, exist_ok=True)
    written = {}
    for name, (draw, height) in PLOTS.items():
        target = folder / f"{name}.png"
        drawn = render(draw, runs, height)
        if drawn is None:
            target.unlink(missing_ok=True)
            continue
        target.write_bytes(drawn)
        written[name] = target
    return written
