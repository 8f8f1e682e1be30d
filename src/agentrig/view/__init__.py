"""The report: an HTML page about one run, or a comparison of several runs.

It reads only run directories (docs/report.md), so it can be built at any time, also for a run that is
still running or was interrupted; the page lists what is missing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import attrs

from agentrig.errors import AgentrigError
from agentrig.run.damage import writing
from agentrig.run.files import write_whole
from agentrig.text import storable
from agentrig.view.prices import Prices
from agentrig.view.reading import read_run


class ReportKept(AgentrigError):
    """A run's report was not replaced by one without curves."""


def build_report(
    run_dirs: Sequence[Path],
    out: Path | None = None,
    *,
    gold: bool = False,
    binned: bool = False,
    prices: Prices | None = None,
    each: bool = False,
) -> Path:
    """Write the report of a run, or one that compares several, and its plots.

    Args:
        run_dirs: At least one run directory.
        out: The page's path; `report.html` in the run's directory by default, and
            `comparison/report.html` beside the first of several. The plots go to a folder beside it, see
            `images_of`.
        gold: Whether the rollouts on the page come with the private part of their tasks, gold answers included;
            the runs' task sets are loaded for it.
        binned: Whether training curves are the mean of each 16 steps instead of a moving mean.
        prices: For several runs: what tokens and machines cost.
        each: For several runs: give those that differ only in their seed a line each.

    Returns:
        The page's path: one HTML file that needs no other.

    Raises:
        AgentrigError: One of them is no run directory or is named twice, or the page cannot be written.
        ReportKept: The figures of the run's steps are lost, and its directory has a report, which may show them.
    """
    from agentrig.view.page import render
    from agentrig.view.png import draw_all

    if not run_dirs:
        raise ValueError("build_report needs at least one run directory")
    runs = [attrs.evolve(read_run(Path(d)), binned=binned) for d in run_dirs]
    if out is None:
        first = runs[0].directory
        out = (first if len(runs) == 1 else first.parent / "comparison") / "report.html"
        if len(runs) == 1 and runs[0].ended and not runs[0].steps and out.exists():
            raise ReportKept(
                f"{out} and its plots are kept as they are: metrics.jsonl has no step that can be read, so new ones "
                "would have no curves. Restore it from a copy, or write the report elsewhere: --out PAGE.html"
            )
    with writing(out, "--out FILE"):
        out.parent.mkdir(parents=True, exist_ok=True)
        plots = images_of(out)
        in_the_way = os.path.lexists(plots) and not plots.is_dir()
        with writing(plots, "") if in_the_way else nullcontext():
            draw_all(runs, plots)
        images = plots.name if plots.is_dir() else ""
        write_whole(out, storable(render(runs, gold=gold, prices=prices, each=each, images=images)))
    return out


def images_of(page: Path) -> Path:
    """Return the folder of a page's plots: `plots` of a `report.html`, `NAME-plots` of another page `NAME.html`."""
    return page.parent / ("plots" if page.name == "report.html" else f"{page.stem}-plots")
