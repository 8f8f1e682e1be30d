"""The plots of a run, parsed as SVG."""

from __future__ import annotations

import itertools
import json
import logging
import re
from pathlib import Path
from xml.etree import ElementTree

import attrs
import pytest

from agentrig.testing.run_directory import write_run
from agentrig.view import figures
from agentrig.view.page import render, view
from agentrig.view.plots import Line, Plot, apart, colors_of, plots_of
from agentrig.view.png import draw
from agentrig.view.reading import read_run
from agentrig.view.svg import MOST_POINTS, TAG_HEIGHT, points_of, svg


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
    assert [line.label for line in drawn["accuracy"].legend][-2:] == ["held out, 95% interval", "each step"]
    assert drawn["accuracy"].legend[-1].color == drawn["accuracy"].legend[0].color, "of the training rollouts"


def test_the_first_step_has_its_number_and_a_dot_is_not_hidden_by_a_diamond(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", steps=8))
    drawn = {plot.name: plot for plot in plots_of([run])}
    drawing = parsed(drawn["accuracy"])
    assert "0" in [text.text for text in drawing.iter("text") if text.get("text-anchor") == "start"]
    marks = [tag.tag.rpartition("}")[2] for tag in drawing.iter() if tag.get("class", "").startswith("dot")]
    assert marks.index("path") < marks.index("circle")
    numbers = [text.text for text in parsed(drawn["failed rollouts"]).iter("text") if text.get("text-anchor") == "end"]
    assert numbers == ["0", "1", "step"], "there is no half of a rollout"
    labels = [line["label"] for line in json.loads(points_of(drawn["accuracy"]))["lines"]]
    assert labels[:2] == ["training, each step", "mean of up to 2 steps"]


@pytest.mark.parametrize("n", [1, 2])
def test_validations_of_one_run_are_joined_in_both_curves(tmp_path: Path, n: int) -> None:
    runs = [read_run(write_run(tmp_path / f"run-{i}", steps=8)) for i in range(n)]
    for row in (row for run in runs for row in run.steps if "validation_accuracy" in row):
        row["validation_reward"] = row["validation_accuracy"]
    drawn = {plot.name: [line.joined for line in plot.lines if line.mark == "dot"] for plot in plots_of(runs)}
    assert (drawn["accuracy"], drawn["reward"]) == ([True] * n, [n == 1] * n)  # of several, training is the line


def test_several_runs_have_a_number_each_at_their_curve_and_in_the_legend(tmp_path: Path) -> None:
    """There are more runs than colours."""
    names = ["one", "<two>", *(f"run-{i}" for i in range(3, 10))]
    runs = [read_run(write_run(tmp_path / name, steps=3, lr=(i + 1) * 1e-4, second_reward="strict" if i < 2 else ""))
            for i, name in enumerate(names)]  # fmt: skip
    drawn = {plot.name: plot for plot in plots_of(runs)}
    for name, plot in drawn.items():
        entries = plot.legend
        assert [(line.tag, line.label) for line in entries[:9]] == [(str(i), of) for i, of in enumerate(names, 1)]
        assert not any(line.dashed or line.mark for line in entries[:9])
        tags = [text for text in parsed(plot).iter("text") if "tag" in text.get("class", "")]
        assert sorted(text.text or "" for text in tags) == [str(i) for i in range(1, 10)], name
        ys = sorted(float(text.get("y", "")) for text in tags)
        assert min(b - a for a, b in itertools.pairwise(ys)) >= TAG_HEIGHT - 0.11, "none is written over another"
        edge = max(float(line.get("x2", "")) for line in parsed(plot).iter("line"))
        assert all(float(text.get("x", "")) > edge for text in tags), "they are not over the curves"
    kinds = {name: [line.label for line in plot.legend[9:]] for name, plot in drawn.items()}
    assert kinds["accuracy"] == ["training", "validation", "held out, 95% interval"]
    assert kinds["reward"] == [
        "training, mean of up to 16 steps, of a short run a quarter",
        "second reward: strict",
        "each step",
    ]
    assert kinds["time"] == ["each step"]
    looks = {line.label: (line.dashed, line.mark) for line in drawn["accuracy"].legend[9:]}
    assert looks == {
        "training": (True, ""), "validation": (False, "dot"), "held out, 95% interval": (False, "diamond")
    }  # fmt: skip
    said = {line["label"] for line in json.loads(points_of(drawn["accuracy"]))["lines"]}
    assert {"one, training", "one, validation", "one, held out, 95% interval"} <= said


def test_runs_that_differ_only_in_their_seed_share_a_colour_and_an_entry_of_the_legend(tmp_path: Path) -> None:
    names = ["old-0", "new-0", "old-1", "new-1", "other-0", "other-1", "other-2"]
    rates = {"old": 1e-4, "new": 2e-4, "other": 3e-4}
    runs = [read_run(write_run(tmp_path / name, steps=3, seed=i, lr=rates[name.partition("-")[0]]))
            for i, name in enumerate(names)]  # fmt: skip
    assert colors_of(runs) == [1, 2, 1, 2, 3, 3, 3]
    for plot in plots_of(runs):
        assert [(line.tag, line.label, line.color) for line in plot.legend[:3]] == [
            ("1 3", "old-0, old-1", 1), ("2 4", "new-0, new-1", 2), ("5–7", "other-0, other-1, other-2", 3),
        ]  # fmt: skip
        assert {(line.run, line.color) for line in plot.lines} == set(enumerate(colors_of(runs)))
        assert all(line.thin for line in plot.lines)
        drawn = svg(plot)
        assert {*re.findall(r'"line (?:dashed )?thin series-(\d)"', drawn)} == {"1", "2", "3"}
    assert not any(line.thin for plot in plots_of(runs[:2]) for line in plot.lines)
    page = render(runs)
    assert re.findall(r'swatch series-(\d)"></span>(\w+-?\d?)<', page)[:7] == [*zip("1212333", names, strict=True)]


def test_each_part_of_a_step_has_a_look_of_its_own(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", steps=3))
    names = ["rollout", "reward", "update", "push", "delivery", "validation", "checkpoint", "second_reward"]
    for row in run.steps:
        row |= {"time_s": dict.fromkeys(names, 1.0), "step_s": 9.0}
    (time,) = (plot for plot in plots_of([run]) if plot.name == "time")
    looks = [(line.color, line.dashed) for line in time.lines]
    assert len(set(looks)) == len(looks) == 9


def test_the_time_that_a_step_waits_for_the_auditor_is_a_part_of_its_own(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", steps=3))
    run.steps[1]["time_s"]["audit"] = 45.0
    run.steps[1]["step_s"] += 45.0
    (time,) = (plot for plot in plots_of([run]) if plot.name == "time")
    assert [line.ys for line in time.lines if line.label == "auditing the step before"] == [[0.0, 45.0, 0.0]]
    (steps,) = (remark for name, _, remark in view(run)["tiles"] if name == "steps")
    assert steps.endswith(" s each, 15.0 s of it auditing")
    left = attrs.evolve(run, summary={}, running=True, config={"algorithm": {"steps": 4}})
    assert figures.progress(left) == "step 4 of 4, about 6.7 s left, then the last measurement"


def test_that_matplotlib_builds_its_fonts_is_not_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert draw([read_run(write_run(tmp_path / "run", steps=2))], "time")
    logging.getLogger("matplotlib.font_manager").warning(
        "Matplotlib is building the font cache; this may take a moment."
    )
    assert not caplog.messages


def test_an_image_grows_with_its_legend(tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path / f"run-{i}", steps=2, lr=(i + 1) * 1e-5)) for i in range(20)]
    heights = []
    for some in (runs[:1], runs):
        image = draw(some, "accuracy")
        assert image is not None
        heights.append(int.from_bytes(image[20:24], "big"))
    entries = len(plots_of(runs)[0].legend)
    rows = entries // 3
    assert heights[1] - heights[0] > 160 * 0.15 * (rows - 2)


@pytest.mark.parametrize(
    ("places", "found"),
    [
        ([50.0], [50.0]),
        ([50.0, 50.0], [45.0, 55.0]),
        ([10.0, 80.0], [10.0, 80.0]),
        ([0.0, 0.0, 0.0], [0.0, 10.0, 20.0]),
        ([100.0, 99.0, 20.0], [100.0, 90.0, 20.0]),
        ([5.0] * 21, [5.0 * i for i in range(21)]),
    ],
)
def test_numbers_are_moved_apart_within_the_drawing(places: list[float], found: list[float]) -> None:
    moved = apart(places, 10.0, 0.0, 100.0)
    assert all(0 <= place <= 100 for place in moved)
    if len(places) < 4:
        assert moved == pytest.approx(found, abs=4.0)
    ordered = sorted(moved)
    least = min((b - a for a, b in itertools.pairwise(ordered)), default=10.0)
    assert least >= min(10.0, 100 / max(1, len(places) - 1)) - 1e-9
    assert sorted(range(len(places)), key=lambda i: (places[i], i)) == sorted(range(len(moved)), key=moved.__getitem__)


def test_steps_without_an_update_are_gaps_in_the_curves_of_the_algorithm(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", steps=8))
    for row in run.steps:
        idle = row["step"] in (1, 4, 5, 6)
        row["calls"] = {"recorded": 16, "trained": 0 if idle else 16}
        row["algorithm"] |= {} if idle else {"entropy": 0.1 * row["step"]}
    (plot,) = (plot for plot in plots_of([run], axis="time") if plot.name == "entropy, nats")
    drawing = parsed(plot)
    parts = [(line.get("class"), len(line.get("points", "").split())) for line in drawing.iter("polyline")]
    assert parts == [("faint series-2", 2), ("faint series-2", 2), ("line series-2", 3), ("line series-2", 2)]
    assert [title.partition(":")[0] for title in titles(drawing)] == ["step 2", "step 3", "step 7", "step 8"]
    assert [step for step, *_ in json.loads(points_of(plot))["lines"][0]["points"]] == [2, 3, 7, 8]
    rows = [row.split(",") for row in plot.csv().splitlines()[1:]]
    assert [(row[0], row[2][:4], row[3][:4]) for row in rows][2:6] == [
        ("3", "0.30", "0.25"), ("4", "", "0.30"), ("5", "", ""), ("6", "", "")
    ]  # fmt: skip


def test_long_runs_are_drawn_with_a_bounded_number_of_points(tmp_path: Path) -> None:
    steps = list(range(1, 5001))
    line = parsed(Plot(name="x", lines=[Line(label="a", xs=steps, ys=[float(s % 7) for s in steps])]))
    (path,) = (line.get("points", "").split() for line in line.iter("polyline"))
    assert MOST_POINTS / 2 < len(path) <= MOST_POINTS
