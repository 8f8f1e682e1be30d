"""Draws a plot as SVG text: no plotting library, colours from the page's CSS.

A page that is drawn again with every step needs this in milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import attrs
from markupsafe import Markup, escape

from agentrig.figures import mean
from agentrig.view.plots import Line, Plot

WIDTH, HEIGHT = 620.0, 250.0
LEFT, RIGHT, TOP, BOTTOM = 64.0, 8.0, 10.0, 28.0
"""The frame of a drawing, and what is left around its axes for labels."""

MOST_POINTS = 240
"""Points of a line; a longer one is drawn by the means of neighbours."""

MOST_DOTS = 60
"""Raw values that are drawn as dots below their mean; more are a pale line only."""

MOST_BARS = 100
"""Bars of a drawing; more steps are drawn by the means of neighbours."""

ROW = 46.0
"""Height of a row: a name, and a bar below it."""


def svg(plot: Plot) -> Markup:
    """Return a plot as an SVG element, with its content as text for those who cannot see it."""
    height = ROW * len(plot.rows) if plot.kind == "rows" else HEIGHT
    draw = {"lines": _draw_lines, "bars": _draw_bars, "rows": _draw_rows}[plot.kind]
    shapes, spoken = draw(plot)
    return Markup(
        f'<svg viewBox="0 0 {WIDTH:g} {height:g}" role="img" aria-label="{escape(f"{plot.name}. {spoken}")}">'
        f"{''.join(shapes)}</svg>"
    )


def _draw_lines(plot: Plot) -> tuple[list[str], str]:
    lines = [_thinned(line, MOST_POINTS) for line in plot.lines]
    values = [y for line in lines for y in (*line.ys, *(end for ends in line.intervals if ends for end in ends))]
    first, last = min(line.xs[0] for line in lines), max(line.xs[-1] for line in lines)
    frame = Frame.around(first, last, min(0.0, *values) if plot.from_zero else min(values), max(values))
    shapes = list(frame.axes(plot.unit))
    for line in sorted(lines, key=lambda each: not each.faint):
        shapes += _line(line, frame, plot.unit)
    spoken = (
        f"{line.label or plot.name}: from {line.ys[0]:.3g} to {line.ys[-1]:.3g}{plot.unit}"
        for line in lines
        if not line.faint
    )
    return shapes, "; ".join(spoken)


def _line(line: Line, frame: Frame, unit: str) -> Iterator[str]:
    points = [(frame.x(x), frame.y(y)) for x, y in zip(line.xs, line.ys, strict=True)]
    if line.joined and len(points) > 1:
        kind = "faint" if line.faint else "line dashed" if line.dashed else "line"
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        yield f'<polyline class="{kind} series-{line.color}" points="{path}"/>'
    if line.faint and 1 < len(points) <= MOST_DOTS:
        for (px, py), x, y in zip(points, line.xs, line.ys, strict=True):
            said = f"<title>step {x:g}: {y:.4g}{escape(unit)}</title>"
            yield f'<circle cx="{px:.1f}" cy="{py:.1f}" r="2.5" class="raw series-{line.color}">{said}</circle>'
    intervals = line.intervals or [None] * len(points)
    for (x, _), ends in zip(points, intervals, strict=True):
        if ends:
            low, high = (frame.y(end) for end in ends)
            path = f"M{x:.1f},{low:.1f}V{high:.1f}M{x - 5:.1f},{low:.1f}h10M{x - 5:.1f},{high:.1f}h10"
            yield f'<path class="line interval series-{line.color}" d="{path}"/>'
    if not line.mark and len(points) > 1:
        return
    for (px, py), x, y, ends in zip(points, line.xs, line.ys, intervals, strict=True):
        said = f"step {x:g}: {y:.4g}{unit}" + (f", 95% interval {ends[0]:.4g} to {ends[1]:.4g}{unit}" if ends else "")
        at = f"M{px:.1f},{py - 6:.1f}l6,6-6,6-6-6z"
        shape = f'path d="{at}"' if line.mark == "diamond" else f'circle cx="{px:.1f}" cy="{py:.1f}" r="4"'
        tag = shape.split(" ", 1)[0]
        yield f'<{shape} class="dot series-{line.color}"><title>{escape(said)}</title></{tag}>'


def _draw_bars(plot: Plot) -> tuple[list[str], str]:
    steps = plot.lines[0].xs
    size = math.ceil(len(steps) / MOST_BARS)
    parts = [_thinned(line, MOST_BARS) for line in plot.lines]
    few = [steps[i] for i in range(0, len(steps), size)]
    totals = [sum(values) for values in zip(*(part.ys for part in parts), strict=True)]
    frame = Frame.around(steps[0] - 0.5, steps[-1] + 0.5, 0.0, max(totals))
    shapes = list(frame.axes(plot.unit))
    width = max(0.6, (frame.x(few[0] + size) - frame.x(few[0])) * 0.9)
    lefts = [frame.x(step + (size - 1) / 2) - width / 2 for step in few]
    bottoms = [0.0] * len(few)
    for part in parts:
        path = ""
        for i, value in enumerate(part.ys):
            top, bottom = frame.y(bottoms[i] + value), frame.y(bottoms[i])
            path += f"M{lefts[i]:.1f},{top:.1f}h{width:.1f}V{bottom:.1f}h-{width:.1f}z"
            bottoms[i] += value
        shapes.append(f'<path class="bar series-{part.color}" d="{path}"/>')
    for i, step in enumerate(few):  # one tooltip for the whole bar
        said, top = f"step {step}: {_said(parts, i, plot.unit)}", frame.y(totals[i])
        shapes.append(
            f'<rect class="hit" x="{lefts[i]:.1f}" y="{top:.1f}" width="{width:.1f}" '
            f'height="{max(0.0, frame.y(0) - top):.1f}"><title>{escape(said)}</title></rect>'
        )
    return shapes, "; ".join(f"{line.label}: {mean(line.ys):.3g}{plot.unit} a step" for line in plot.lines)


def _draw_rows(plot: Plot) -> tuple[list[str], str]:
    scale = (WIDTH - 2 * RIGHT) / max(sum(line.ys[i] for line in plot.lines) for i in range(len(plot.rows)))
    shapes = []
    for i, row in enumerate(plot.rows):
        shapes.append(f'<text class="tick" x="{RIGHT:g}" y="{i * ROW + 16:g}">{escape(row)}</text>')
        left = RIGHT
        for line in plot.lines:
            width = line.ys[i] * scale
            said = f"{row}: {_said([line], i, plot.unit)}"
            shapes.append(
                f'<rect class="bar series-{line.color}" x="{left:.1f}" y="{i * ROW + 22:g}" width="{width:.1f}" '
                f'height="16"><title>{escape(said)}</title></rect>'
            )
            left += width
    return shapes, "; ".join(f"{row}: {_said(plot.lines, i, plot.unit)}" for i, row in enumerate(plot.rows))


def _said(parts: Sequence[Line], i: int, unit: str) -> str:
    return ", ".join(f"{part.label} {part.ys[i]:.3g}{unit}" for part in parts)


def _thinned(line: Line, most: int) -> Line:
    size = math.ceil(len(line.xs) / most)
    if size <= 1:
        return line
    places = range(0, len(line.xs), size)
    ys = [mean(line.ys[i : i + size]) or 0.0 for i in places]
    return attrs.evolve(line, xs=[line.xs[min(len(line.xs) - 1, i + size // 2)] for i in places], ys=ys)


@attrs.frozen
class Frame:
    """The ranges of both axes, and where a value is in the drawing."""

    x0: float
    x1: float
    y0: float
    y1: float

    @classmethod
    def around(cls, x0: float, x1: float, low: float, high: float) -> Frame:
        """Return a frame around these values, with round numbers at both ends of the y axis."""
        span = high - low or abs(high) or 1.0
        step = _round(span / 4)
        bottom = math.floor(low / step + 1e-9) * step
        top = math.ceil(high / step - 1e-9) * step
        return cls(x0, x1 if x1 > x0 else x0 + 1, bottom, top if top > bottom else bottom + step)

    def x(self, value: float) -> float:
        """Return where a step is."""
        return LEFT + (value - self.x0) / (self.x1 - self.x0) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        """Return where a value is."""
        return HEIGHT - BOTTOM - (value - self.y0) / (self.y1 - self.y0) * (HEIGHT - TOP - BOTTOM)

    def axes(self, unit: str) -> Iterator[str]:
        """Yield grid lines and the numbers beside them."""
        for value in _ticks(self.y0, self.y1, _round((self.y1 - self.y0) / 4)):
            y = self.y(value)
            yield f'<line class="grid" x1="{LEFT:g}" x2="{WIDTH - RIGHT:g}" y1="{y:.1f}" y2="{y:.1f}"/>'
            text = f"{value:.4g}{escape(unit)}"
            yield f'<text class="tick" x="{LEFT - 7:g}" y="{y + 5:.1f}" text-anchor="end">{text}</text>'
        for value in _ticks(self.x0, self.x1, max(1.0, _round((self.x1 - self.x0) / 6))):
            x = self.x(value)
            yield f'<text class="tick" x="{x:.1f}" y="{HEIGHT - 7:g}" text-anchor="middle">{value:.0f}</text>'


def _round(value: float) -> float:
    """Return 1, 2 or 5 times a power of ten, at least the value."""
    if value <= 0 or not math.isfinite(value):
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= value * (1 - 1e-9))


def _ticks(low: float, high: float, step: float) -> list[float]:
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]
