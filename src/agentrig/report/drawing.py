"""Draws lines and bars over steps as SVG text: no plotting library, colours from the page's CSS.

A page that is drawn again with every step needs this in milliseconds; `agentrig.report.plots` draws PNG files.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import attrs
from markupsafe import Markup, escape

from agentrig.report import figures

WIDTH, HEIGHT = 620.0, 250.0
LEFT, RIGHT, TOP, BOTTOM = 64.0, 8.0, 10.0, 28.0
"""The frame of a drawing, and what is left around its axes for labels."""

MOST_POINTS = 240
"""Points of a line; a longer one is drawn by the means of neighbours."""

MOST_BARS = 100
"""Bars of a drawing; more steps are drawn by the means of neighbours."""

ROW = 46.0
"""Height of a row of `draw_rows`: a name, and a bar below it."""


@attrs.frozen(kw_only=True)
class Line:
    """One line of a drawing.

    Attributes:
        label: In the legend; empty for none.
        xs: Steps, in order.
        ys: Their values.
        series: The number of its colour, from 1 to 6; 0 for the colour of text, 7 for grey.
        faint: Draw it pale, behind the others.
        dashed: Draw it dashed.
        mark: `dot` or `diamond` at each point; empty for none.
        joined: Draw the line between the points.
        intervals: The interval around each point, or None; empty for none.
    """

    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    series: int = 1
    faint: bool = False
    dashed: bool = False
    mark: str = ""
    joined: bool = True
    intervals: Sequence[tuple[float, float] | None] = ()


@attrs.frozen(kw_only=True)
class Drawing:
    """A drawing with its legend and its text for those who cannot see it.

    Attributes:
        name: Its title.
        svg: The SVG element.
        legend: Colour number and label of each line that has one.
        caption: What it shows; empty if the title says it.
    """

    name: str
    svg: Markup
    legend: Sequence[tuple[int, str]]
    caption: str = ""


def draw_lines(
    name: str, lines: Sequence[Line], *, unit: str = "", least: float | None = None, caption: str = ""
) -> Drawing | None:
    """Draw lines over steps; None when there is nothing to draw.

    Args:
        name: The title.
        lines: The faint ones are drawn first.
        unit: Written behind the values, such as `%`.
        least: The axis begins at this value, or lower.
        caption: Of the drawing.
    """
    lines = [_thinned(line) for line in lines if line.xs]
    if not lines:
        return None
    values = [y for line in lines for y in (*line.ys, *(end for ends in line.intervals if ends for end in ends))]
    low, high = min(values), max(values)
    frame = _Frame.around(
        min(line.xs[0] for line in lines),
        max(line.xs[-1] for line in lines),
        low if least is None else min(low, least),
        high,
    )
    parts = list(frame.axes(unit))
    for line in sorted(lines, key=lambda each: not each.faint):
        parts += _line(line, frame, unit)
    spoken = "; ".join(
        f"{line.label or name}: from {line.ys[0]:.3g} to {line.ys[-1]:.3g}{unit}" for line in lines if not line.faint
    )
    legend = [(line.series, line.label) for line in lines if line.label]
    return _drawing(name, parts, spoken, legend, caption)


def _line(line: Line, frame: _Frame, unit: str) -> Iterator[str]:
    points = [(frame.x(x), frame.y(y)) for x, y in zip(line.xs, line.ys, strict=True)]
    if line.joined and len(points) > 1:
        kind = "faint" if line.faint else "line dashed" if line.dashed else "line"
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        yield f'<polyline class="{kind} series-{line.series}" points="{path}"/>'
    for (x, _), ends in zip(points, line.intervals, strict=False):
        if ends:
            low, high = (frame.y(end) for end in ends)
            path = f"M{x:.1f},{low:.1f}V{high:.1f}M{x - 5:.1f},{low:.1f}h10M{x - 5:.1f},{high:.1f}h10"
            yield f'<path class="line interval series-{line.series}" d="{path}"/>'
    if not line.mark and len(points) > 1:
        return
    intervals = [*line.intervals, *[None] * (len(points) - len(line.intervals))]
    for (px, py), x, y, ends in zip(points, line.xs, line.ys, intervals, strict=True):
        said = f"step {x:g}: {y:.4g}{unit}" + (f", 95% interval {ends[0]:.4g} to {ends[1]:.4g}{unit}" if ends else "")
        at = f"M{px:.1f},{py - 6:.1f}l6,6-6,6-6-6z"
        shape = f'path d="{at}"' if line.mark == "diamond" else f'circle cx="{px:.1f}" cy="{py:.1f}" r="4"'
        tag = shape.split(" ", 1)[0]
        yield f'<{shape} class="dot series-{line.series}"><title>{escape(said)}</title></{tag}>'


def draw_bars(
    name: str, steps: Sequence[int], parts: Mapping[str, Sequence[float]], *, unit: str, caption: str = ""
) -> Drawing | None:
    """Draw stacked bars, one for each step (or for each few steps, if there are many).

    Args:
        name: The title.
        steps: The steps, in order.
        parts: Part to its value in each step.
        unit: Of the values.
        caption: Of the drawing.
    """
    parts = {part: values for part, values in parts.items() if any(values)}
    if not steps or not parts:
        return None
    size = math.ceil(len(steps) / MOST_BARS)
    few = [steps[i] for i in range(0, len(steps), size)]
    means = {
        part: [figures.mean(values[i : i + size]) or 0.0 for i in range(0, len(steps), size)]
        for part, values in parts.items()
    }
    totals = [sum(values[i] for values in means.values()) for i in range(len(few))]
    frame = _Frame.around(steps[0] - 0.5, steps[-1] + 0.5, 0.0, max(totals))
    drawn = list(frame.axes(unit))
    width = max(0.6, (frame.x(few[0] + size) - frame.x(few[0])) * 0.9)
    lefts = [frame.x(step + (size - 1) / 2) - width / 2 for step in few]
    bottoms = [0.0] * len(few)
    colors = _colors(means)
    for part, values in means.items():
        path = ""
        for i, value in enumerate(values):
            top, bottom = frame.y(bottoms[i] + value), frame.y(bottoms[i])
            path += f"M{lefts[i]:.1f},{top:.1f}h{width:.1f}V{bottom:.1f}h-{width:.1f}z"
            bottoms[i] += value
        drawn.append(f'<path class="bar series-{colors[part]}" d="{path}"/>')
    for i, step in enumerate(few):  # one tooltip for the whole bar
        said = ", ".join(f"{part} {values[i]:.3g}{unit}" for part, values in means.items())
        top = frame.y(totals[i])
        drawn.append(
            f'<rect class="hit" x="{lefts[i]:.1f}" y="{top:.1f}" width="{width:.1f}" '
            f'height="{max(0.0, frame.y(0) - top):.1f}"><title>step {step}: {escape(said)}</title></rect>'
        )
    spoken = "; ".join(f"{part}: {figures.mean(values) or 0.0:.3g}{unit} a step" for part, values in parts.items())
    return _drawing(name, drawn, spoken, [(colors[part], part) for part in means], caption)


def draw_rows(
    name: str, rows: Sequence[tuple[str, Mapping[str, float]]], *, unit: str, caption: str = ""
) -> Drawing | None:
    """Draw one stacked horizontal bar for each row, with its name above.

    Args:
        name: The title.
        rows: A row's name, and its parts with their values.
        unit: Of the values.
        caption: Of the drawing.
    """
    whole = sum(sum(parts.values()) for _, parts in rows)
    names = dict.fromkeys(part for _, parts in rows for part in parts)
    names = dict.fromkeys(p for p in names if sum(parts.get(p, 0.0) for _, parts in rows) > 0.001 * whole)
    if not names:
        return None
    colors = _colors(names)
    scale = (WIDTH - 2 * RIGHT) / max(sum(parts.values()) for _, parts in rows)
    drawn, said = [], []
    for i, (row, parts) in enumerate(rows):
        drawn.append(f'<text class="tick" x="{RIGHT:g}" y="{i * ROW + 16:g}">{escape(row)}</text>')
        left = RIGHT
        for part in names:
            width = parts.get(part, 0.0) * scale
            words = f"{row}: {part} {parts.get(part, 0.0):.3g}{unit}"
            drawn.append(
                f'<rect class="bar series-{colors[part]}" x="{left:.1f}" y="{i * ROW + 22:g}" width="{width:.1f}" '
                f'height="16"><title>{escape(words)}</title></rect>'
            )
            left += width
        said.append(f"{row}: " + ", ".join(f"{part} {parts.get(part, 0.0):.3g}{unit}" for part in names))
    legend = [(colors[part], part) for part in names]
    return _drawing(name, drawn, "; ".join(said), legend, caption, height=len(rows) * ROW)


def color_of(i: int) -> int:
    """Return the number of the i-th colour, from 1; colours repeat after the last."""
    return (i - 1) % 6 + 1


def _colors(parts: Iterable[str]) -> dict[str, int]:
    """Return the colour of each part of a bar; `other`, the rest, is grey."""
    return {part: 7 if part == "other" else color_of(i) for i, part in enumerate(parts, 1)}


def _thinned(line: Line) -> Line:
    size = math.ceil(len(line.xs) / MOST_POINTS)
    if size <= 1:
        return line
    places = range(0, len(line.xs), size)
    ys = [figures.mean(line.ys[i : i + size]) or 0.0 for i in places]
    return attrs.evolve(line, xs=[line.xs[min(len(line.xs) - 1, i + size // 2)] for i in places], ys=ys)


def _drawing(
    name: str,
    parts: Sequence[str],
    spoken: str,
    legend: Sequence[tuple[int, str]],
    caption: str,
    height: float = HEIGHT,
) -> Drawing:
    svg = (
        f'<svg viewBox="0 0 {WIDTH:g} {height:g}" role="img" aria-label="{escape(f"{name}. {spoken}")}">'
        f"{''.join(parts)}</svg>"
    )
    return Drawing(name=name, svg=Markup(svg), legend=list(dict.fromkeys(legend)), caption=caption)


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
