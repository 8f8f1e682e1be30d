"""The drawings of a run, parsed as SVG."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from agentrig.report import figures
from agentrig.report.curves import curves
from agentrig.report.drawing import MOST_BARS, MOST_POINTS, Drawing, Line, draw_bars, draw_lines
from agentrig.report.reading import read_run
from agentrig.testing.run_directory import write_run


def parsed(drawing: Drawing | None) -> ElementTree.Element:
    assert drawing is not None
    return ElementTree.fromstring(str(drawing.svg))


def titles(svg: ElementTree.Element) -> list[str]:
    return [title.text or "" for title in svg.iter("title")]


def test_held_out_accuracy_is_drawn_with_its_intervals(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", steps=8))
    drawn = {drawing.name: drawing for drawing in curves([run])}
    svg = parsed(drawn["accuracy"])
    found = figures.accuracy(run)
    assert found.before is not None
    assert found.before_ci95 is not None
    low, high = found.before_ci95
    said = f"step 0: {100 * found.before:.4g}%, 95% interval {100 * low:.4g}% to {100 * high:.4g}%"
    assert said.replace(f"{100 * low:.4g}% to", f"{100 * low:.4g} to") in titles(svg)
    marks = [path for path in svg.iter("path") if "interval" in path.get("class", "")]
    assert len(marks) == 2
    ends = [float(y) for y in re.findall(r"M[\d.]+,([\d.]+)V([\d.]+)", marks[0].get("d", ""))[0]]
    grid = {float(line.get("y1", "")) for line in svg.iter("line")}
    height = max(grid) - min(grid)  # from 0% up
    top = 20 * (len(grid) - 1)
    assert (ends[0] - ends[1]) / height * top == pytest.approx(100 * (high - low), abs=0.5)
    assert [label for _, label in drawn["accuracy"].legend][-1] == "held out, 95% interval"


def test_several_runs_have_a_colour_each_and_bars_of_their_time(tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path / name, steps=3, second_reward="strict")) for name in ("one", "<two>")]
    drawn = {drawing.name: drawing for drawing in curves(runs)}
    assert drawn["reward"].legend == [(1, "one"), (2, "<two>")]
    time = parsed(drawn["time"])
    split = figures.time_split(runs[1])
    assert f"<two>: rollout {split['rollout']:.3g} s" in titles(time)
    assert [text.text for text in time.iter("text")] == ["one", "<two>"]
    assert any("dashed" in line.get("class", "") for line in parsed(drawn["reward"]).iter("polyline")), (
        "the second reward"
    )


def test_long_runs_are_drawn_with_a_bounded_number_of_points(tmp_path: Path) -> None:
    steps = list(range(1, 5001))
    line = parsed(draw_lines("x", [Line(label="a", xs=steps, ys=[float(s % 7) for s in steps])]))
    (path,) = (line.get("points", "").split() for line in line.iter("polyline"))
    assert MOST_POINTS / 2 < len(path) <= MOST_POINTS
    bars = draw_bars("t", steps, {"a": [1.0] * 5000, "b": [2.0] * 5000, "none": [0.0] * 5000}, unit=" s")
    assert MOST_BARS / 2 < len(titles(parsed(bars))) <= MOST_BARS
    assert titles(parsed(bars))[0] == "step 1: a 1 s, b 2 s"
    assert len(str(bars and bars.svg)) < 30_000


def test_a_run_of_an_earlier_version_has_its_rewards_as_accuracy(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", steps=4, ended=False, held_out=2)
    lines = [json.loads(text) for text in (directory / "metrics.jsonl").read_text().splitlines()]
    kept = [{key: value for key, value in line.items() if "accuracy" not in key} for line in lines]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    accuracy = next(drawing for drawing in curves([read_run(directory)]) if drawing.name == "accuracy")
    assert "training, mean of 16 steps" in [label for _, label in accuracy.legend]
