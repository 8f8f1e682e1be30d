"""Draws a plot as SVG text: no plotting library, colours from the page's CSS.

A page that is drawn again with every step needs this in milliseconds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence

import attrs
from markupsafe import Markup, escape

from agentrig.view.figures import mean_of_known
from agentrig.view.plots import Line, Plot, apart

WIDTH, HEIGHT = 620.0, 250.0
LEFT, RIGHT, TOP, BOTTOM = 64.0, 8.0, 10.0, 34.0
"""The frame of a drawing, and what is left around its axes for labels."""

TAG_WIDTH, TAG_HEIGHT = 28.0, 17.0
"""What is left on the right for the numbers of runs, and how far apart they are."""

MOST_POINTS = 240
"""Points of a line; a longer one is drawn by the means of neighbours."""

MOST_DOTS = 60
"""Raw values that are drawn as dots below their mean; more are a pale line only."""


def svg(plot: Plot) -> Markup:
    """Return a plot as an SVG element, with its content as text for those who cannot see it."""
    lines, frame = _framed(plot)
    shapes = list(frame.axes(plot.unit))
    for line in sorted(lines, key=lambda each: (not each.faint, each.mark == "dot")):  # a diamond would hide a dot
        shapes += _line(line, frame, plot.unit)
    shapes += _tags(plot.tagged, frame)
    spoken = "; ".join(
        f"{_said(plot, line)}: from {line.ys[0]:.3g} to {line.ys[-1]:.3g}{plot.unit}"
        for line in (line.known for line in lines)
        if not line.faint
    )
    return Markup(
        f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="{escape(f"{plot.name}. {spoken}")}">'
        f"{''.join(shapes)}</svg>"
    )


def points_of(plot: Plot) -> str:
    """Return a drawing's points as JSON, for the script that shows values and zooms."""
    lines, frame = _framed(plot)
    told = [
        {
            "label": said,
            "run": line.run,
            "mode": line.mode,
            "points": [
                [int(step), round(frame.x(x), 1), round(frame.y(y), 1), f"{y:.4g}{plot.unit}"]
                for step, x, y in zip(line.at, line.xs, line.ys, strict=True)
            ],
        }
        for said, line in zip(_beside(plot, lines), (line.known for line in lines), strict=True)
    ]
    ends = {"left": LEFT, "right": WIDTH - frame.right, "bottom": HEIGHT - BOTTOM, "from": frame.x0, "to": frame.x1}
    of = max(math.ceil(len(whole.xs) / len(line.xs)) for whole, line in zip(plot.lines, lines, strict=True))
    return json.dumps({**ends, "of": of, "lines": told}, ensure_ascii=False, separators=(",", ":"))


def _framed(plot: Plot) -> tuple[list[Line], Frame]:
    """Return the lines as they are drawn, and the ranges of the axes."""
    lines = [_thinned(line) for line in plot.lines]
    values = [y for line in lines for y in (*line.known.ys, *(end for ends in line.intervals if ends for end in ends))]
    first, last = plot.window or (min(line.xs[0] for line in lines), max(line.xs[-1] for line in lines))
    low = min(0.0, *values) if plot.from_zero and plot.window is None else min(values)
    least = 1.0 if all(float(value).is_integer() for value in values) else 0.0  # there is no half of a rollout
    frame = Frame.around(first, last, low, max(values), plot.axis, least)
    return lines, attrs.evolve(frame, right=TAG_WIDTH) if plot.tagged else frame


def _said(plot: Plot, line: Line) -> str:
    """Return the name of a curve: its label, and beside other runs what it shows of its run."""
    return ", ".join(filter(None, [line.label or plot.name, line.kind, "each step" if line.faint else ""]))


def _beside(plot: Plot, lines: Sequence[Line]) -> Iterator[str]:
    """Yield the name of each curve; a mean behind its own steps is named only by what it is a mean of."""
    name = ""
    for line, said in zip(lines, (_said(plot, line) for line in lines), strict=True):
        yield said.removeprefix(f"{name}, ") if name else said
        name = said.removesuffix(", each step") if line.faint else ""


def key(line: Line) -> Markup:
    """Return a small drawing of what a line looks like, for the legend."""
    style = _style(line)
    shapes = [f'<path class="{style} series-{line.color}" d="M0,7h28"/>'] if line.joined else []
    if line.mark:
        shape = 'path d="M14,1l6,6-6,6-6-6z"' if line.mark == "diamond" else 'circle cx="14" cy="7" r="4"'
        shapes.append(f'<{shape} class="dot series-{line.color}"/>')
    return Markup(f'<svg class="key" viewBox="0 0 28 14" aria-hidden="true">{"".join(shapes)}</svg>')


def _style(line: Line) -> str:
    """Return the classes of a line, which the page's CSS draws."""
    classes = {"line": True, "dashed": line.dashed, "thin": line.thin}
    return "faint" if line.faint else " ".join(name for name, given in classes.items() if given)


def _tags(lines: Sequence[Line], frame: Frame) -> Iterator[str]:
    """Yield the number of each run, behind the last point of its curve."""
    groups: dict[int, list[Line]] = {}
    for line in (line.known for line in lines):
        groups.setdefault(round(frame.x(line.xs[-1]) / TAG_WIDTH), []).append(line)
    for several in groups.values():
        ys = apart([frame.y(line.ys[-1]) for line in several], TAG_HEIGHT, TOP, HEIGHT - BOTTOM)
        for line, y in zip(several, ys, strict=True):
            at = f'x="{frame.x(line.xs[-1]) + 8:.1f}" y="{y + 6:.1f}"'
            yield f'<text class="tag series-{line.color}" {at}>{escape(line.tag)}</text>'


def _line(line: Line, frame: Frame, unit: str) -> Iterator[str]:
    parts, line = line.parts, line.known
    kind = _style(line)
    for part in parts if line.joined else ():
        if len(part.xs) > 1:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in _places(part, frame))
            yield f'<polyline class="{kind} series-{line.color}" points="{path}"/>'
    points, alone = _places(line, frame), {part.xs[0] for part in parts if len(part.xs) == 1}
    if line.faint and len(points) > 1:
        for (px, py), x, step, y in zip(points, line.xs, line.at, line.ys, strict=True):
            if len(points) <= MOST_DOTS or x in alone:
                said = f"<title>step {step:g}: {y:.4g}{escape(unit)}</title>"
                yield f'<circle cx="{px:.1f}" cy="{py:.1f}" r="2.5" class="raw series-{line.color}">{said}</circle>'
    intervals = line.intervals or [None] * len(points)
    for (x, _), ends in zip(points, intervals, strict=True):
        if ends:
            low, high = (frame.y(end) for end in ends)
            path = f"M{x:.1f},{low:.1f}V{high:.1f}M{x - 5:.1f},{low:.1f}h10M{x - 5:.1f},{high:.1f}h10"
            yield f'<path class="line interval series-{line.color}" d="{path}"/>'
    if not line.mark and len(points) > 1:
        return
    for (px, py), x, y, ends in zip(points, line.at, line.ys, intervals, strict=True):
        said = f"step {x:g}: {y:.4g}{unit}" + (f", 95% interval {ends[0]:.4g} to {ends[1]:.4g}{unit}" if ends else "")
        at = f"M{px:.1f},{py - 6:.1f}l6,6-6,6-6-6z"
        shape = f'path d="{at}"' if line.mark == "diamond" else f'circle cx="{px:.1f}" cy="{py:.1f}" r="4"'
        tag = shape.split(" ", 1)[0]
        yield f'<{shape} class="dot series-{line.color}"><title>{escape(said)}</title></{tag}>'


def _places(line: Line, frame: Frame) -> list[tuple[float, float]]:
    """Return where the points of a line are in the drawing."""
    return [(frame.x(x), frame.y(y)) for x, y in zip(line.xs, line.ys, strict=True)]


def _thinned(line: Line) -> Line:
    size = math.ceil(len(line.xs) / MOST_POINTS)
    if size <= 1:
        return line
    places = range(0, len(line.xs), size)
    ys = [mean_of_known(line.ys[i : i + size]) for i in places]
    middles = [min(len(line.xs) - 1, i + size // 2) for i in places]
    steps = [line.steps[i] for i in middles] if line.steps else ()
    return attrs.evolve(line, xs=[line.xs[i] for i in middles], ys=ys, steps=steps, intervals=())


@attrs.frozen
class Frame:
    """The ranges of both axes, and where a value is in the drawing; `step` is between two numbers of the y axis."""

    x0: float
    x1: float
    y0: float
    y1: float
    step: float
    axis: str = "step"
    right: float = RIGHT

    @classmethod
    def around(cls, x0: float, x1: float, low: float, high: float, axis: str = "step", least: float = 0.0) -> Frame:
        """Return a frame around these values, with round numbers at both ends of the y axis, `least` apart."""
        span = high - low or abs(high) or 1.0
        step = max(least, _round(span / 4))
        bottom = math.floor(low / step + 1e-9) * step
        top = math.ceil(high / step - 1e-9) * step
        top = top if top > bottom else bottom + step
        return cls(x0, x1 if x1 > x0 else x0 + 1, bottom, top, max(least, _round((top - bottom) / 4)), axis)

    def x(self, value: float) -> float:
        """Return where a step, a time or a number of tokens is."""
        return LEFT + (value - self.x0) / (self.x1 - self.x0) * (WIDTH - LEFT - self.right)

    def y(self, value: float) -> float:
        """Return where a value is."""
        return HEIGHT - BOTTOM - (value - self.y0) / (self.y1 - self.y0) * (HEIGHT - TOP - BOTTOM)

    def axes(self, unit: str) -> Iterator[str]:
        """Yield grid lines and the numbers beside them."""
        for value in _ticks(self.y0, self.y1, self.step):
            y = self.y(value)
            yield f'<line class="grid" x1="{LEFT:g}" x2="{WIDTH - self.right:g}" y1="{y:.1f}" y2="{y:.1f}"/>'
            text = f"{value:.4g}{escape(unit)}"
            yield f'<text class="tick" x="{LEFT - 7:g}" y="{y + 5:.1f}" text-anchor="end">{text}</text>'
        apart = (self.x1 - self.x0) / 6
        for value in _ticks(self.x0, self.x1, _clock(apart) if self.axis == "time" else max(1.0, _round(apart))):
            x, text = self.x(value), f"{value:.0f}" if self.axis == "step" else _short(value, self.axis)
            # the name of the axis is on the left
            at = f'x="{x:.1f}" text-anchor="middle"' if x > LEFT + 20 else f'x="{x - 4:.1f}" text-anchor="start"'
            yield f'<text class="tick" {at} y="{HEIGHT - 7:g}">{text}</text>'
        yield f'<text class="tick" x="{LEFT - 11:g}" y="{HEIGHT - 7:g}" text-anchor="end">{self.axis}</text>'


def _round(value: float) -> float:
    """Return 1, 2 or 5 times a power of ten, at least the value."""
    if value <= 0 or not math.isfinite(value):
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= value * (1 - 1e-9))


def _clock(seconds: float) -> float:
    """Return a round number of seconds, minutes or hours, at least as long."""
    round_ones = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
    return next((float(each) for each in round_ones if each >= seconds), 86400 * _round(seconds / 86400))


def _short(value: float, axis: str) -> str:
    """Return a number of seconds or tokens in a few characters."""
    sizes = ((3600, " h"), (60, " min"), (1, " s")) if axis == "time" else ((1e9, "G"), (1e6, "M"), (1e3, "k"))
    size, unit = next(((size, unit) for size, unit in sizes if value >= size), (1, ""))
    return f"{value / size:.3g}{unit}"


def _ticks(low: float, high: float, step: float) -> list[float]:
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]
