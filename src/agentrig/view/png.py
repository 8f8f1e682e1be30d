"""Draws plots as PNG files with matplotlib, for those who take them along; a page has SVG (`agentrig.view.svg`)."""

from __future__ import annotations

import io
import logging
import math
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrig.errors import extra
from agentrig.run.files import replacing
from agentrig.view.plots import Line, Plot, apart, plots_of
from agentrig.view.reading import RunData

if TYPE_CHECKING:
    from matplotlib.axes import Axes

log = logging.getLogger(__name__)

FILES: Mapping[str, Sequence[str]] = {
    "accuracy": ["accuracy"],
    "reward": ["reward"],
    "time": ["time"],
    "lengths": ["prompt tokens", "response tokens", "calls kept by the adapter per rollout"],
}
"""File stem to the plots that it has, one above the other."""

# They differ in lightness as well as in hue, so that they can be told apart in print and by colour-blind readers.
INK, MUTED, GRID, PAPER = "#1c1e21", "#62666d", "#e2e4e8", "#ffffff"
COLORS = (INK, "#1f5fa8", "#b34a10", "#1f7a4d", "#8a4fa3", "#7a6310", "#b23a5e", MUTED)
"""The colours by their numbers: text, the six of series, grey."""


def draw(runs: Sequence[RunData], name: str) -> bytes | None:
    """Return the plot of a name in `FILES` as a PNG file's bytes, or None when there is nothing to draw."""
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)  # it warns that it builds its cache
    with extra("plots", "an image needs matplotlib"):
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

    panels = [plot for plot in plots_of(runs) if plot.name in FILES[name]]
    if not panels:
        return None
    panels.sort(key=lambda plot: FILES[name].index(plot.name))
    options: Any = {"font.size": 10.0, "text.parse_math": False}  # a run may have a `$` in its name
    with matplotlib.rc_context(options), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # glyphs in a run's name that the font does not have
        names = [short(line.label) for line in panels[0].legend]
        rows = math.ceil(len(names) / _columns(names)) if names else 0  # each takes room of its own, not of the axes
        figure = Figure(
            figsize=(6.2, 2.8 + 0.2 * rows + 0.35 * len(panels)), dpi=160, layout="constrained", facecolor=PAPER
        )
        canvas: Any = FigureCanvasAgg(figure)
        several = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        for axes, plot in zip(several, panels, strict=True):
            _draw_steps(axes, plot)
            _finish(axes, plot, first=axes is several[0], last=axes is several[-1])
        of = short(runs[0].name) if len(runs) == 1 else f"{len(runs)} runs"
        figure.suptitle(f"{name}: {of}", x=0.01, ha="left", fontsize=11, fontweight="bold", color=INK)
        png = io.BytesIO()
        canvas.print_png(png)
    return png.getvalue()


def draw_all(runs: Sequence[RunData], folder: Path) -> None:
    """Write every plot as `folder/NAME.png`; one with nothing to draw is left out, and its old file removed."""
    if find_spec("matplotlib") is None:
        log.warning("%s has no images, because matplotlib is not installed: pip install 'agentrig[plots]'", folder)
        return
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        drawn = draw(runs, name)
        if drawn is None:
            (folder / f"{name}.png").unlink(missing_ok=True)
        else:
            with replacing(folder / f"{name}.png", folder / f".{name}.part") as part:
                part.write_bytes(drawn)


def _draw_steps(axes: Axes, plot: Plot) -> None:
    for line in plot.lines:
        for x, ends in zip(line.xs, line.intervals, strict=False):
            if ends:
                middle, half = sum(ends) / 2, (ends[1] - ends[0]) / 2
                axes.errorbar(x, middle, yerr=half, fmt="none", capsize=3, lw=1.2, ecolor=COLORS[line.color])
        axes.plot(line.xs, line.ys, **_look(line, alone=len(line.xs) == 1))


def _look(line: Line, *, alone: bool = False) -> dict[str, Any]:
    """Return how matplotlib draws a line; `alone` is a line of one point."""
    return {
        "color": COLORS[line.color],
        "alpha": 0.6 if line.faint else 1.0,
        "lw": 1.0 if line.faint or line.thin else 1.7,
        "ls": "none" if not line.joined else "--" if line.dashed else "-",
        "marker": {"dot": "o", "diamond": "D"}.get(line.mark, "o" if alone else ""),
        "ms": 5.5 if line.mark == "diamond" else 3.6,
    }


def _tag(axes: Axes, plot: Plot) -> None:
    """Write the number of each run behind the last point of its curve."""
    groups: dict[float, list[Line]] = {}
    for line in plot.tagged:
        groups.setdefault(line.xs[-1], []).append(line)
    low, high = axes.get_ylim()
    for x, several in groups.items():
        ys = apart([line.ys[-1] for line in several], (high - low) / 18, low, high)
        for line, y in zip(several, ys, strict=True):
            about: Any = {"color": COLORS[line.color], "fontsize": 9, "fontweight": "bold", "va": "center"}
            axes.annotate(line.tag, (x, y), (6, 0), textcoords="offset points", annotation_clip=False, **about)


def short(name: str, limit: int = 44) -> str:
    """Return a name for a legend: cut, and escaped if it starts with `_`, which legends would hide."""
    name = f"\u200b{name}" if name.startswith("_") else name
    return name if len(name) <= limit else name[: limit - 1] + "…"


def _finish(axes: Axes, plot: Plot, *, first: bool, last: bool) -> None:
    """Style axes: a light grid, no frame, and above the first of them a legend."""
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator

    alone = first and last
    axes.patch.set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(axis="y", color=GRID, lw=0.8)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(MUTED)
    axes.tick_params(colors=MUTED, length=0, labelsize=9)
    measure = f"{plot.name}, {plot.unit.strip()}" if plot.unit else plot.name
    axes.set_ylabel(measure if alone else measure.replace(" ", "\n", 1), color=MUTED)
    below = "step" if last else ""
    axes.set_xlabel("\n".join([below, *textwrap.wrap(plot.caption if alone else "", 100)]), color=MUTED, fontsize=8)
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))
    if plot.from_zero:
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    _tag(axes, plot)
    if entries := plot.legend if first else []:
        names = [f"{line.tag} {short(line.label)}".strip() for line in entries]
        axes.legend(
            [Line2D([], [], **_look(line)) for line in entries],
            names,
            frameon=False,
            fontsize=9,
            labelcolor=INK,
            loc="lower left",
            bbox_to_anchor=(0, 1),
            ncols=_columns(names),
            borderaxespad=0.2,
            columnspacing=1.4,
            handlelength=1.6,
        )


def _columns(names: Sequence[str]) -> int:
    """Return how many columns a legend with these names has."""
    return min(len(names), max(2, 64 // (6 + max(map(len, names)))))
