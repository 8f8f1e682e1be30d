"""Curves as SVG text, for pages that are drawn again with every step: no plotting library, colours from the page's CSS.

`agentrig.report.plots` draws the PNG files of a report with matplotlib, which takes most of a second; a live page
draws its curves here in a few milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import attrs
from markupsafe import Markup, escape

from agentrig.report import figures
from agentrig.report.reading import RunData, mapping, number

WIDTH, HEIGHT = 620.0, 250.0
LEFT, RIGHT, TOP, BOTTOM = 64.0, 8.0, 10.0, 28.0
"""The frame of a drawing, and what is left around its axes for labels."""

MOST_POINTS = 300
"""Points of a line; a longer one is drawn by the means of neighbours."""


@attrs.frozen(kw_only=True)
class Line:
    """One line of a drawing.

    Attributes:
        label: In the legend; empty for none.
        xs: Steps, in order.
        ys: Their values.
        series: The number of its colour, from 1.
        faint: Draw it pale, behind the others.
        dots: Draw a mark at each point.
    """

    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    series: int = 1
    faint: bool = False
    dots: bool = False


@attrs.frozen(kw_only=True)
class Drawing:
    """A drawing with its legend and its text for those who cannot see it.

    Attributes:
        name: Its title.
        svg: The SVG element.
        legend: Colour number and label of each line that has one.
    """

    name: str
    svg: Markup
    legend: Sequence[tuple[int, str]]


def draw_lines(name: str, lines: Sequence[Line], *, unit: str = "", least: float | None = None) -> Drawing | None:
    """Draw lines over steps; None when there is nothing to draw.

    Args:
        name: The title.
        lines: The faint ones are drawn first.
        unit: Written behind the values, such as `%`.
        least: The axis begins at this value, or lower.
    """
    lines = [_thinned(line) for line in lines if line.xs]
    if not lines:
        return None
    values = [y for line in lines for y in line.ys]
    low, high = min(values), max(values)
    frame = _Frame.around(
        min(line.xs[0] for line in lines),
        max(line.xs[-1] for line in lines),
        low if least is None else min(low, least),
        high,
    )
    parts = list(frame.axes(unit))
    for line in sorted(lines, key=lambda each: not each.faint):
        points = [(frame.x(x), frame.y(y)) for x, y in zip(line.xs, line.ys, strict=True)]
        kind = "faint" if line.faint else "line"
        if len(points) > 1:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            parts.append(f'<polyline class="{kind} series-{line.series}" points="{path}"/>')
        if line.dots or len(points) == 1:
            parts += [
                f'<circle class="dot series-{line.series}" cx="{px:.1f}" cy="{py:.1f}" r="4">'
                f"<title>step {x:g}: {y:.4g}{escape(unit)}</title></circle>"
                for (px, py), x, y in zip(points, line.xs, line.ys, strict=True)
            ]
    spoken = "; ".join(
        f"{line.label or name}: from {line.ys[0]:.3g} to {line.ys[-1]:.3g}{unit}" for line in lines if not line.faint
    )
    return _drawing(name, parts, spoken, [(line.series, line.label) for line in lines if line.label])


def draw_bars(name: str, steps: Sequence[int], parts: Mapping[str, Sequence[float]], *, unit: str) -> Drawing | None:
    """Draw stacked bars, one for each step (or for each few steps, if there are many).

    Args:
        name: The title.
        steps: The steps, in order.
        parts: Part to its value in each step.
        unit: Of the values.
    """
    parts = {part: values for part, values in parts.items() if any(values)}
    if not steps or not parts:
        return None
    size = math.ceil(len(steps) / MOST_POINTS)
    few = [steps[i] for i in range(0, len(steps), size)]
    means = {
        part: [figures.mean(values[i : i + size]) or 0.0 for i in range(0, len(steps), size)]
        for part, values in parts.items()
    }
    totals = [sum(values[i] for values in means.values()) for i in range(len(few))]
    frame = _Frame.around(steps[0] - 0.5, steps[-1] + 0.5, 0.0, max(totals))
    drawn = list(frame.axes(unit))
    width = max(0.6, (frame.x(few[0] + size) - frame.x(few[0])) * 0.9)
    bottoms = [0.0] * len(few)
    for number_, (part, values) in enumerate(means.items(), 1):
        for i, value in enumerate(values):
            top, bottom = frame.y(bottoms[i] + value), frame.y(bottoms[i])
            left = frame.x(few[i] + (size - 1) / 2) - width / 2
            drawn.append(
                f'<rect class="bar series-{_color(number_)}" x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" '
                f'height="{max(0.0, bottom - top):.1f}"><title>step {few[i]}: {escape(part)} {value:.3g}{escape(unit)}'
                "</title></rect>"
            )
            bottoms[i] += value
    spoken = "; ".join(f"{part}: {figures.mean(values) or 0.0:.3g}{unit} a step" for part, values in parts.items())
    return _drawing(name, drawn, spoken, [(_color(i), part) for i, part in enumerate(means, 1)])


def live_curves(runs: Sequence[RunData]) -> list[Drawing]:
    """Return the curves of a run, or of several side by side: what their `metrics.jsonl` has so far."""
    found = [
        _accuracy(runs),
        _of(runs, "reward", ("reward",)),
        _of(runs, "response tokens", ("response_tokens",), least=0.0),
        _of(runs, "entropy, nats", ("algorithm", "entropy"), least=0.0),
        _of(runs, "clip fraction", ("algorithm", "clip_fraction"), least=0.0),
        _of(runs, "gradient norm", ("algorithm", "grad_norm"), least=0.0),
        _time(runs[0]) if len(runs) == 1 else _of(runs, "seconds a step", ("step_s",), least=0.0),
        _failures(runs),
    ]
    return [each for each in found if each is not None]


def _accuracy(runs: Sequence[RunData]) -> Drawing | None:
    lines = []
    for i, run in enumerate(runs, 1):
        label = "" if len(runs) == 1 else run.name
        steps, values = figures.series(run, "accuracy")
        curve = [100 * v for v in figures.smoothed(values)]
        if len(runs) == 1:
            lines.append(Line(label="", xs=steps, ys=[100 * v for v in values], series=2, faint=True))
        training = label or f"training, mean of {figures.SMOOTHING} steps"
        lines.append(Line(label=training, xs=steps, ys=curve, series=2 if not label else _color(i)))
        steps, values = figures.validation(run)
        shown = [100 * v for v in values]
        lines.append(
            Line(label="" if label else "validation", xs=steps, ys=shown, series=_color(i if label else 1), dots=True)
        )
        held_out = figures.accuracy(run)
        last = max((int(row["step"]) for row in run.steps), default=0)
        ends = [(x, 100 * v) for x, v in ((0, held_out.before), (last, held_out.after)) if v is not None]
        for x, value in ends:
            name = "held out" if (x, value) == ends[0] and not label else ""
            lines.append(Line(label=name, xs=[x], ys=[value], series=_color(i if label else 3), dots=True))
    return draw_lines("accuracy", lines, unit="%")


def _of(runs: Sequence[RunData], name: str, path: Sequence[str], *, least: float | None = None) -> Drawing | None:
    lines = []
    for i, run in enumerate(runs, 1):
        steps, values = figures.series(run, *path)
        color = _color(i if len(runs) > 1 else 2)
        lines.append(Line(label="", xs=steps, ys=values, series=color, faint=True))
        label = run.name if len(runs) > 1 else f"mean of {figures.SMOOTHING} steps"
        lines.append(Line(label=label, xs=steps, ys=figures.smoothed(values), series=color))
    return draw_lines(name, lines, least=least)


def _time(run: RunData) -> Drawing | None:
    rows = [row for row in run.steps if number(row.get("step_s")) is not None]
    parts: dict[str, list[float]] = {part: [] for part in figures.part_names(run)}
    other = []
    for row in rows:
        seconds = {key: number(value) or 0.0 for key, value in mapping(row.get("time_s")).items()}
        for part, values in parts.items():
            values.append(seconds.get(part, 0.0))
        other.append(max(0.0, (number(row.get("step_s")) or 0.0) - sum(seconds.values())))
    return draw_bars("time", [int(row["step"]) for row in rows], {**parts, "other": other}, unit=" s")


def _failures(runs: Sequence[RunData]) -> Drawing | None:
    if len(runs) > 1:
        lines = []
        for i, run in enumerate(runs, 1):
            xs = [int(row["step"]) for row in run.steps]
            ys = [float(sum(number(n) or 0 for n in mapping(row.get("failures")).values())) for row in run.steps]
            lines.append(Line(label=run.name, xs=xs, ys=ys, series=_color(i)))
        return draw_lines("failed rollouts", lines, least=0.0) if any(any(line.ys) for line in lines) else None
    run = runs[0]
    kinds = sorted({kind for row in run.steps for kind in mapping(row.get("failures"))})
    counts = {kind: [number(mapping(row.get("failures")).get(kind)) or 0.0 for row in run.steps] for kind in kinds}
    return draw_bars("failed rollouts", [int(row["step"]) for row in run.steps], counts, unit="")


def _color(i: int) -> int:
    return (i - 1) % 6 + 1


def _thinned(line: Line) -> Line:
    size = math.ceil(len(line.xs) / MOST_POINTS)
    if size <= 1:
        return line
    places = range(0, len(line.xs), size)
    ys = [figures.mean(line.ys[i : i + size]) or 0.0 for i in places]
    return attrs.evolve(line, xs=[line.xs[min(len(line.xs) - 1, i + size // 2)] for i in places], ys=ys)


def _drawing(name: str, parts: Sequence[str], spoken: str, legend: Sequence[tuple[int, str]]) -> Drawing:
    svg = (
        f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="{escape(f"{name}. {spoken}")}">'
        f"{''.join(parts)}</svg>"
    )
    return Drawing(name=name, svg=Markup(svg), legend=list(dict.fromkeys(legend)))


@attrs.frozen
class _Frame:
    """The ranges of both axes, and where a value is in the drawing."""

    x0: float
    x1: float
    y0: float
    y1: float

    @classmethod
    def around(cls, x0: float, x1: float, low: float, high: float) -> _Frame:
        span = high - low or abs(high) or 1.0
        step = _nice(span / 4)
        bottom = math.floor(low / step + 1e-9) * step
        top = math.ceil(high / step - 1e-9) * step
        return cls(x0, x1 if x1 > x0 else x0 + 1, bottom, top if top > bottom else bottom + step)

    def x(self, value: float) -> float:
        return LEFT + (value - self.x0) / (self.x1 - self.x0) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.y0) / (self.y1 - self.y0) * (HEIGHT - TOP - BOTTOM)

    def axes(self, unit: str) -> Iterator[str]:
        step = _nice((self.y1 - self.y0) / 4)
        for value in _ticks(self.y0, self.y1, step):
            y = self.y(value)
            yield f'<line class="grid" x1="{LEFT:g}" x2="{WIDTH - RIGHT:g}" y1="{y:.1f}" y2="{y:.1f}"/>'
            text = f"{value:.4g}{escape(unit)}"
            yield f'<text class="tick" x="{LEFT - 7:g}" y="{y + 5:.1f}" text-anchor="end">{text}</text>'
        for value in _ticks(self.x0, self.x1, max(1.0, _nice((self.x1 - self.x0) / 6))):
            x = self.x(value)
            yield f'<text class="tick" x="{x:.1f}" y="{HEIGHT - 7:g}" text-anchor="middle">{value:.0f}</text>'


def _nice(value: float) -> float:
    """Return 1, 2 or 5 times a power of ten, at least the value."""
    if value <= 0 or not math.isfinite(value):
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= value * (1 - 1e-9))


def _ticks(low: float, high: float, step: float) -> Iterator[float]:
    first = math.ceil(low / step - 1e-9)
    for i in range(first, math.floor(high / step + 1e-9) + 1):
        yield i * step
