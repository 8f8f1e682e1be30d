"""The curves of a run, or of several side by side: which lines each drawing of a page has."""

from __future__ import annotations

from collections.abc import Sequence

from agentrig.report import figures
from agentrig.report.drawing import Drawing, Line, color_of, draw_bars, draw_lines, draw_rows
from agentrig.report.reading import SECOND, RunData, mapping, number

MEAN = f"mean of {figures.SMOOTHING} steps"


def curves(runs: Sequence[RunData]) -> list[Drawing]:
    """Return the drawings of a run, or of several: what their `metrics.jsonl` has so far."""
    found = [
        _accuracy(runs),
        _reward(runs),
        _time(runs[0]) if len(runs) == 1 else _times(runs),
        _of(runs, "response tokens", ("response_tokens",), least=0.0, caption="Mean of a trained call."),
        _of(runs, "prompt tokens", ("prompt_tokens",), least=0.0, caption="Mean of a trained call."),
        _of(runs, "transitions a rollout", ("transitions_per_rollout",), least=0.0, caption="Trained calls."),
        _of(runs, "entropy, nats", ("algorithm", "entropy"), least=0.0),
        _of(runs, "clip fraction", ("algorithm", "clip_fraction"), least=0.0),
        _of(runs, "gradient norm", ("algorithm", "grad_norm"), least=0.0),
        _of(runs, "seconds a step", ("step_s",), least=0.0) if len(runs) > 1 else None,
        _failures(runs),
    ]
    return [each for each in found if each is not None]


def _accuracy(runs: Sequence[RunData]) -> Drawing | None:
    lines = []
    for i, run in enumerate(runs, 1):
        alone, color = len(runs) == 1, color_of(i)
        steps, values = figures.series(run, "accuracy")
        if not values:  # lines of earlier versions have none
            steps, values = figures.series(run, "reward")
            values = values if values and min(values) >= 0 and max(values) <= 1 else []
            steps = steps if values else []
        at, curve = figures.averaged(run, steps, [100 * v for v in values])
        if alone:
            lines.append(Line(label="", xs=steps, ys=[100 * v for v in values], series=2, faint=True))
        lines.append(
            Line(
                label=f"training, {MEAN}" if alone else run.name,
                xs=at,
                ys=curve,
                series=2 if alone else color,
                dashed=not alone,
            )
        )
        steps, values = figures.validation(run)
        label = "validation" if alone else run.name
        lines.append(Line(label=label, xs=steps, ys=[100 * v for v in values], series=color, mark="dot"))
        held_out = figures.accuracy(run)
        ends = [
            (x, 100 * value, interval and (100 * interval[0], 100 * interval[1]))
            for x, value, interval in (
                (0, held_out.before, held_out.before_ci95),
                (_last(run), held_out.after, held_out.after_ci95),
            )
            if value is not None
        ]
        lines.append(
            Line(
                label="held out, 95% interval" if alone else run.name,
                xs=[x for x, _, _ in ends],
                ys=[y for _, y, _ in ends],
                intervals=[interval for _, _, interval in ends],
                series=0 if alone else color,
                mark="diamond",
                joined=False,
            )
        )
    key = "" if len(runs) == 1 else " Dots: validation; dashed: training; diamonds: held out, with 95% intervals."
    caption = "The share of answers that are correct. Held-out tasks are measured once before and once after training."
    return draw_lines("accuracy", lines, unit="%", caption=caption + key)


def second_rewards(run: RunData) -> list[str]:
    """Return the names of the second rewards, which are logged and not trained on."""
    return sorted({name for row in run.steps for name in mapping(row.get(SECOND))})


def _reward(runs: Sequence[RunData]) -> Drawing | None:
    lines = []
    for i, run in enumerate(runs, 1):
        steps, values = figures.series(run, "reward")
        if not values:
            continue
        alone, color = len(runs) == 1, color_of(i)
        own = 2 if alone else color
        lines.append(Line(label="", xs=steps, ys=values, series=own, faint=True))
        at, means = figures.averaged(run, steps, values)
        lines.append(Line(label=MEAN if alone else run.name, xs=at, ys=means, series=own))
        steps, values = figures.series(run, "validation_reward")
        label = "validation" if alone else run.name
        lines.append(Line(label=label, xs=steps, ys=values, series=color, mark="dot", joined=False))
        found = figures.rewards(run)
        ends = [(x, value) for x, value in ((0, found.before), (_last(run), found.after)) if value is not None]
        lines.append(
            Line(
                label="held out" if alone else run.name,
                xs=[x for x, _ in ends],
                ys=[y for _, y in ends],
                series=0 if alone else color,
                mark="diamond",
                joined=False,
            )
        )
        for j, name in enumerate(second_rewards(run), 3):
            steps, values = figures.series(run, SECOND, name, "mean")
            label = f"second reward: {name}" if alone else run.name
            at, means = figures.averaged(run, steps, values)
            lines.append(Line(label=label, xs=at, ys=means, series=color_of(j) if alone else color, dashed=True))
    caption = "The mean over a step's rollouts that were scored. Pale: each step; strong: the mean of 16."
    key = " Dots: validation; diamonds: held out; dashed: second rewards." if len(runs) > 1 else ""
    return draw_lines("reward", lines, caption=caption + key)


def _last(run: RunData) -> int:
    return max((int(row["step"]) for row in run.steps), default=0)


def _of(
    runs: Sequence[RunData], name: str, path: Sequence[str], *, least: float | None = None, caption: str = ""
) -> Drawing | None:
    lines = []
    for i, run in enumerate(runs, 1):
        steps, values = figures.series(run, *path)
        color = color_of(i if len(runs) > 1 else 2)
        lines.append(Line(label="", xs=steps, ys=values, series=color, faint=True))
        label = run.name if len(runs) > 1 else MEAN
        at, means = figures.averaged(run, steps, values)
        lines.append(Line(label=label, xs=at, ys=means, series=color))
    return draw_lines(name, lines, least=least, caption=caption)


def _time(run: RunData) -> Drawing | None:
    rows = [row for row in run.steps if number(row.get("step_s")) is not None]
    parts: dict[str, list[float]] = {part: [] for part in figures.part_names(run)}
    other = []
    for row in rows:
        seconds = {key: number(value) or 0.0 for key, value in mapping(row.get("time_s")).items()}
        for part, values in parts.items():
            values.append(seconds.get(part, 0.0))
        other.append(max(0.0, (number(row.get("step_s")) or 0.0) - sum(seconds.values())))
    steps = [int(row["step"]) for row in rows]
    wall = sum(number(row.get("step_s")) or 0.0 for row in rows)
    seen = {part: values for part, values in {**parts, "other": other}.items() if sum(values) > 0.001 * wall}
    return draw_bars("time", steps, seen, unit=" s", caption="Wall time of a step by part.")


def _times(runs: Sequence[RunData]) -> Drawing | None:
    rows = [(run.name, figures.time_split(run)) for run in runs]
    return draw_rows("time", rows, unit=" s", caption="Mean wall time of a step by part.")


def _failures(runs: Sequence[RunData]) -> Drawing | None:
    if len(runs) > 1:
        lines = []
        for i, run in enumerate(runs, 1):
            xs = [int(row["step"]) for row in run.steps]
            ys = [float(sum(number(n) or 0 for n in mapping(row.get("failures")).values())) for row in run.steps]
            lines.append(Line(label=run.name, xs=xs, ys=ys, series=color_of(i)))
        return draw_lines("failed rollouts", lines, least=0.0) if any(any(line.ys) for line in lines) else None
    run = runs[0]
    kinds = sorted({str(kind) for row in run.steps for kind in mapping(row.get("failures"))})
    counts = {kind: [number(mapping(row.get("failures")).get(kind)) or 0.0 for row in run.steps] for kind in kinds}
    return draw_bars("failed rollouts", [int(row["step"]) for row in run.steps], counts, unit="")
