"""Renders plots as PNG files with matplotlib."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from agentrig.errors import extra
from agentrig.report.reading import RunData

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 6.2
"""Width of every plot, in inches."""

DPI = 160
"""Pixels an inch in a PNG."""


@attrs.frozen(kw_only=True)
class Colors:
    """The colours of a drawing, all different: series, text, muted text, grid and background."""

    series: Sequence[str]
    ink: str
    muted: str
    grid: str
    paper: str


# They differ in lightness as well as in hue, so that they can be told apart in print and by colour-blind readers.
LIGHT = Colors(
    series=("#1f5fa8", "#c8591a", "#2c8a5b", "#8a4fa3", "#a8891a", "#b23a5e"),
    ink="#1c1e21",
    muted="#62666d",
    grid="#e2e4e8",
    paper="#ffffff",
)
Draw = Callable[["Figure", Sequence[RunData], Colors], bool]
"""Draws into a figure; False when the runs have nothing to draw."""


def render(draw: Draw, runs: Sequence[RunData], height: float) -> bytes | None:
    """Return a drawing as a PNG file's bytes, or None when there is nothing to draw.

    Args:
        draw: What to draw.
        runs: The runs to draw.
        height: In inches.
    """
    with extra("plots", "an image needs matplotlib"):
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

    options: Any = {"font.size": 10.0, "text.parse_math": False}  # a run may have a `$` in its name
    with matplotlib.rc_context(options), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # glyphs in a run's name that the font does not have
        figure = Figure(figsize=(WIDTH, height), dpi=DPI, layout="constrained", facecolor=LIGHT.paper)
        canvas: Any = FigureCanvasAgg(figure)
        if not draw(figure, runs, LIGHT):
            return None
        png = io.BytesIO()
        canvas.print_png(png)
    return png.getvalue()


def color_of(colors: Colors, i: int) -> str:
    """Return the colour of the i-th series; colours repeat after the last."""
    return colors.series[i % len(colors.series)]


def short(name: str, limit: int = 36) -> str:
    """Return a run's name for a legend: cut, and escaped if it starts with `_`, which legends would hide."""
    name = f"\u200b{name}" if name.startswith("_") else name
    return name if len(name) <= limit else name[: limit - 1] + "…"


def finish(axes: Axes, colors: Colors, *, ylabel: str = "", xlabel: str = "step", grid: Any = "y") -> None:
    """Style axes for the report: a light grid, no frame, and a legend above if there are labels."""
    from matplotlib.ticker import MaxNLocator

    axes.patch.set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(axis=grid, color=colors.grid, lw=0.8)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(colors.muted)
    axes.tick_params(colors=colors.muted, length=0, labelsize=9)
    axes.set_xlabel(xlabel, color=colors.muted)
    axes.set_ylabel(ylabel, color=colors.muted)
    if xlabel.startswith("step"):
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        axes.legend(
            handles,
            labels,
            frameon=False,
            fontsize=9,
            labelcolor=colors.ink,
            loc="lower left",
            bbox_to_anchor=(0, 1),
            ncols=len(labels) if sum(map(len, labels)) < 64 else 2,
            borderaxespad=0.2,
            columnspacing=1.4,
            handlelength=1.6,
        )
