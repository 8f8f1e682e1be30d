"""The plots of a run, parsed as SVG."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from agentrig.testing.run_directory import write_run
from agentrig.view import figures
from agentrig.view.plots import Line, Plot, plots_of
from agentrig.view.reading import read_run
from agentrig.view.svg import MOST_POINTS, svg


def parsed(plot: Plot) -> ElementTree.Element:
    return ElementTree.fromstring(str(svg(plot)))


def titles(svg: ElementTree.Element) -> list[str]:
    return [title.text or "" for title in svg.iter("title")]


def test_held_out_accuracy_is_drawn_with_its_intervals(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", steps=8))
    drawn = {plot.name: plot for plot in plots_of([run])}
    drawing = parsed(drawn["accuracy"])
    found = figures.held_out(run)["accuracy"]
    low, high = found["before_ci95"]
    said = f"step 0: {100 * found['before']:.4g}%, 95% interval {100 * low:.4g}% to {100 * high:.4g}%"
    assert said.replace(f"{100 * low:.4g}% to", f"{100 * low:.4g} to") in titles(drawing)
    marks = [path for path in drawing.iter("path") if "interval" in path.get("class", "")]
    assert len(marks) == 2
    ends = [float(y) for y in re.findall(r"M[\d.]+,([\d.]+)V([\d.]+)", marks[0].get("d", ""))[0]]
    grid = {float(line.get("y1", "")) for line in drawing.iter("line")}
    height = max(grid) - min(grid)  # from 0% up
    top = 20 * (len(grid) - 1)
    assert (ends[0] - ends[1]) / height * top == pytest.approx(100 * (high - low), abs=0.5)
    assert [label for _, label in drawn["accuracy"].legend][-1] == "held out, 95% interval"


def test_several_runs_have_a_colour_each(tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path / name, steps=3, second_reward="strict")) for name in ("one", "<two>")]
    drawn = {plot.name: plot for plot in plots_of(runs)}
    assert drawn["reward"].legend == drawn["time"].legend == [(1, "one"), (2, "<two>")]
    assert any("dashed" in line.get("class", "") for line in parsed(drawn["reward"]).iter("polyline")), (
        "the second reward"
    )


def test_long_runs_are_drawn_with_a_bounded_number_of_points(tmp_path: Path) -> None:
    steps = list(range(1, 5001))
    line = parsed(Plot(name="x", lines=[Line(label="a", xs=steps, ys=[float(s % 7) for s in steps])]))
    (path,) = (line.get("points", "").split() for line in line.iter("polyline"))
    assert MOST_POINTS / 2 < len(path) <= MOST_POINTS
