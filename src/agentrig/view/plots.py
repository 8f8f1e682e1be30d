"""The plots of a run, or of several side by side: the lines of each. `svg` and `png` draw them."""

from __future__ import annotations

import csv
import io
import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import groupby

import attrs

from agentrig.figures import number
from agentrig.text import spreadsheet_text
from agentrig.view import figures
from agentrig.view.reading import SECOND, RunData, mapping
from agentrig.view.related import named, settings_numbers

INK, GREY, COLORS = 0, 7, 6
"""Numbers of colours: that of text, grey, and the last of those that series have, from 1."""

AXES = {"step": "step", "time": "wall time of the steps, s", "tokens": "tokens sampled in training"}
"""What the x axis can have, and its name with the unit."""

SMALL = 0.001
"""A part with a smaller share of the time is too small to see."""

METRICS: Sequence[tuple[str, tuple[str, ...], str]] = (
    ("response tokens", ("response_tokens",), "Mean of the calls that the adapter keeps."),
    ("prompt tokens", ("prompt_tokens",), "Mean of the calls that the adapter keeps."),
    (
        "calls kept by the adapter per rollout",
        ("transitions_per_rollout",),
        "Also of rollouts that teach nothing.",
    ),
    (
        "entropy, nats",
        ("algorithm", "entropy"),
        "How uncertain the model is of a token of the trained calls: near 0, these hardly differ.",
    ),
    (
        "clip fraction",
        ("algorithm", "clip_fraction"),
        "Trained tokens that the loss ignores, because they have moved far enough.",
    ),
    (
        "gradient norm",
        ("algorithm", "grad_norm"),
        "Before it is clipped. AdamW's updates have other sizes: weight_change.",
    ),
)
"""Plots of a figure of each step: name, place in its line, caption; few need any but the first."""

CAPTIONS: Mapping[str, str] = {"/".join(path): caption for _, path, caption in METRICS} | {
    "algorithm/kl": "Nats a token by which the new policy is away from the sampling one (k3 estimate, never below 0).",
    "algorithm/kl_k1": "Nats a token by which the new policy is away from the sampling one (k1 estimate).",
    "algorithm/kl_reference": "Nats a token by which the policy is away from the starting model.",
    "algorithm/ratio_max": "Largest ratio of a trained token's probability in training to that in sampling.",
    "algorithm/weight_change": "L2 norm of the step's change of the trained weights.",
    "algorithm/trained_tokens": "Tokens of replies whose calls were trained, of every epoch. The loss divides by more: "
    "calls with advantage 0 count there too.",
    "algorithm/computed_tokens": "Tokens that went through the model in training.",
    "algorithm/traced_tokens": "Tokens that would go through the model if no two calls shared any.",
}
"""What metrics are, by their names as trackers have them."""

Points = tuple[Sequence[float], Sequence[float]]


@attrs.frozen(kw_only=True)
class Line:
    """One line of a plot.

    Attributes:
        label: In the legend; empty for none, and a pale line is not in it. Beside other runs, the run's name.
        kind: Beside other runs: what the line shows of its run, such as `validation`.
        tag: Beside other runs: the run's number, which is at the end of its curve and in the legend.
        xs: Where its points are on the x axis, in order.
        ys: Their values; NaN where a step has none: the line has a gap there.
        color: The number of its colour.
        settings: Beside other runs: the number of its run's settings; runs that differ only in their seed share it.
        thin: Draw it thinner: other runs have the same settings, and the colour with it.
        faint: Draw it pale, behind the others.
        dashed: Draw it dashed.
        mark: `dot` or `diamond` at each point; empty for none.
        joined: Draw the line between the points.
        intervals: The interval around each point, or None; empty for none.
        steps: The step of each point; empty if the x axis has the steps.
        run: Which of the runs it is of, from 0.
        mode: The rollouts that its values are of: `train`, `validation` or `report`.
    """

    label: str
    kind: str = ""
    tag: str = ""
    xs: Sequence[float]
    ys: Sequence[float]
    color: int = 1
    settings: int = 0
    thin: bool = False
    faint: bool = False
    dashed: bool = False
    mark: str = ""
    joined: bool = True
    intervals: Sequence[tuple[float, float] | None] = ()
    steps: Sequence[float] = ()
    run: int = 0
    mode: str = "train"

    @property
    def at(self) -> Sequence[float]:
        """The step of each point."""
        return self.steps or self.xs

    @property
    def known(self) -> Line:
        """The line with only those of its points that have a value."""
        return self.only([i for i, y in enumerate(self.ys) if not math.isnan(y)])

    @property
    def parts(self) -> list[Line]:
        """The parts of the line between its gaps, each without one."""
        parts = groupby(range(len(self.ys)), key=lambda i: math.isnan(self.ys[i]))
        return [self.only([*places]) for gap, places in parts if not gap]

    def only(self, kept: Sequence[int]) -> Line:
        """Return the line with these of its points."""
        return attrs.evolve(
            self,
            xs=[self.xs[i] for i in kept],
            ys=[self.ys[i] for i in kept],
            intervals=[self.intervals[i] for i in kept if self.intervals],
            steps=[self.steps[i] for i in kept if self.steps],
        )


@attrs.frozen(kw_only=True)
class Plot:
    """What a plot shows.

    Attributes:
        unit: Written behind the values, such as `%`.
        from_zero: Whether the axis begins at 0, or below it, unless only a part of the x axis is shown.
        caption: What it shows; empty if the title says it.
        axis: What the x axis has, a key of `AXES`.
        window: The part of the x axis that is shown; None for all.
        more: Whether few need it, so that a page folds it.
    """

    name: str
    lines: Sequence[Line]
    unit: str = ""
    from_zero: bool = False
    caption: str = ""
    axis: str = "step"
    window: tuple[float, float] | None = None
    more: bool = False

    @property
    def legend(self) -> list[Line]:
        """A line without points for each entry: each label, and of several runs each kind of line if there are more."""
        looks = [attrs.evolve(line, xs=(), ys=(), intervals=(), steps=()) for line in self.lines]
        strong = [line for line in looks if not line.faint]
        found = list({(line.color, line.label, line.tag): line for line in reversed(strong) if line.label}.values())[
            ::-1
        ]
        if any(line.tag for line in strong):
            several = groupby(sorted(found, key=lambda line: line.settings), key=lambda line: line.settings)
            found = [_entry(list(lines)) for _, lines in several]
            kinds = {line.kind: attrs.evolve(line, label=line.kind, color=INK, tag="") for line in strong}
            found += kinds.values() if len(kinds) > 1 else ()
        pale = {line.color: attrs.evolve(line, label="each step", tag="") for line in looks if line.faint}
        return [
            *found,
            *(attrs.evolve(line, color=line.color if len(pale) == 1 else INK) for line in [*pale.values()][:1]),
        ]

    @property
    def tagged(self) -> list[Line]:
        """Of each run with a number, the line that has it at its end: rather a joined one than dots or dashes."""
        strong = [line for line in self.lines if line.tag and not line.faint]
        strong.sort(key=lambda line: (line.run, line.dashed, not line.joined))
        return list({line.tag: line for line in reversed(strong)}.values())[::-1]

    def csv(self) -> str:
        """Return the points as CSV: a row for each place on the x axis of each run, a column for each line."""
        rows: dict[tuple[int, float, float], dict[str, float | str]] = {}
        names = dict.fromkeys(["step"] if self.axis == "step" else ["step", AXES[self.axis]])
        for line in self.lines:
            said = [line.label or self.name, "each step" if line.faint else "", line.mode]
            name = head = spreadsheet_text(", ".join(filter(None, said)))
            while name in names:
                name = f"{name}*"
            columns = [name, *([f"{head}: low", f"{head}: high"] if any(line.intervals) else [])]
            names |= dict.fromkeys(columns)
            ends = line.intervals or [None] * len(line.xs)
            for x, y, step, interval in zip(line.xs, line.ys, line.at, ends, strict=True):
                row = rows.setdefault((line.run, x, step), {"step": step, AXES[self.axis]: x})
                row.update(zip(columns, ("" if math.isnan(y) else y, *(interval or ())), strict=False))
        text = io.StringIO()
        writer = csv.DictWriter(text, list(names), extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows[key] for key in sorted(rows))
        return text.getvalue()


def _entry(lines: Sequence[Line]) -> Line:
    """Return the entry of the runs with the same settings: their numbers, and their names."""
    runs = {int(line.tag): line.label for line in lines}
    in_a_row = len(runs) > 2 and max(runs) - min(runs) + 1 == len(runs)
    tag = f"{min(runs)}–{max(runs)}" if in_a_row else " ".join(map(str, runs))
    return attrs.evolve(lines[0], label=named([*runs.values()], ", "), tag=tag, dashed=False, mark="", joined=True)


def apart(places: Sequence[float], least: float, low: float, high: float) -> list[float]:
    """Return places between two ends, moved so that they are `least` apart, or as far as there is room for."""
    order = sorted(range(len(places)), key=places.__getitem__)
    least = min(least, (high - low) / max(1, len(places) - 1))
    found, at = list(places), -math.inf
    for i in order:
        at = found[i] = max(found[i], at + least)
    moved = math.fsum(found) / len(found) - math.fsum(places) / len(places)  # half of it up, half of it down
    at = low - least
    for i in order:
        at = found[i] = max(found[i] - moved, at + least)
    at = high + least
    for i in reversed(order):
        at = found[i] = min(found[i], at - least)
    return found


def color_of(i: int) -> int:
    """Return the number of the i-th colour, from 1; colours repeat after the last."""
    return (i - 1) % COLORS + 1


def colors_of(runs: Sequence[RunData]) -> list[int]:
    """Return the number of each run's colour: runs that differ only in their seed have the same."""
    return [color_of(settings + 1) for settings in settings_numbers(runs)]


def second_rewards(run: RunData) -> list[str]:
    """Return the names of the second rewards, which are logged and not trained on."""
    return sorted({name for row in run.steps for name in mapping(row.get(SECOND))})


def plots_of(
    runs: Sequence[RunData],
    *,
    axis: str = "step",
    window: tuple[float | None, float | None] = (None, None),
    metrics: Sequence[str] = (),
) -> list[Plot]:
    """Return the plots of a run, or of several: what their `metrics.jsonl` has so far.

    Args:
        axis: What the x axis has, a key of `AXES`.
        window: The part of the x axis to show, from and to; None for its ends.
        metrics: Further metrics to draw, before the others: their names in `figures.metrics`.
    """
    accuracy = "The share of answers that are correct. Held-out tasks are measured once before and once after training."
    reward = "The mean over a step's rollouts that were scored."
    loss = "How unlikely the model finds the demonstrations."
    sampled = [run for run in runs if not figures.demonstrated(run)]
    pairs = {tuple(figures.sampling(run.config, key) for key in ("temperature", "val_temperature")) for run in sampled}
    training, held_out = pairs.pop() if len(pairs) == 1 else ("", "")
    differ, known = "", {counts for run in sampled if (counts := figures.labels(run.manifest))[0]}
    if known:
        one = len(known) == 1
        some = "Some training tasks are the models' labels: their accuracy may be higher"
        differ = f" {figures.labels_words(*known.pop()) if one else some}."
    if training and held_out and training != held_out:
        differ = f" Training: {training}; validation and held out: {held_out}.{differ or ' So their levels differ.'}"
    accuracy, reward = accuracy + differ, reward + differ
    paths = {name: path for run in runs for name, path in figures.metrics(run).items()}
    found = [
        *(
            _metric(runs, name, *paths[name], caption=CAPTIONS.get(name, ""), from_zero=False)
            for name in metrics
            if name in paths
        ),
        Plot(name="accuracy", lines=_measured(runs, "accuracy"), unit="%", from_zero=True, caption=accuracy),
        Plot(name="reward", lines=_measured(runs, "reward"), from_zero=True, caption=reward),
        *([] if sampled else [_metric(runs, "loss", "algorithm", "loss", caption=loss)]),
        _time(runs),
        *(_metric(runs, name, *path, caption=caption) for name, path, caption in METRICS),
        _failures(runs),
    ]
    more = {name for name, _, _ in METRICS[1:]}
    found = [attrs.evolve(plot, more=plot.name in more) for plot in found]
    places = [figures.places(run, axis) for run in runs]
    shown = [attrs.evolve(plot, lines=[line for line in plot.lines if line.known.xs]) for plot in found]
    shown = [_placed(plot, axis, places, window) for plot in shown if plot.lines]
    return [plot for plot in shown if plot.lines]


def _placed(
    plot: Plot, axis: str, places: Sequence[Mapping[int, float]], window: tuple[float | None, float | None]
) -> Plot:
    """Return a plot over steps with another x axis, or with a part of it."""
    lines = []
    low, high = (-float("inf") if window[0] is None else window[0]), (float("inf") if window[1] is None else window[1])
    for line in plot.lines:
        if axis != "step":
            known = places[line.run]
            line = line.only([i for i, step in enumerate(line.xs) if step in known])
            line = attrs.evolve(line, steps=line.xs, xs=[known[int(step)] for step in line.xs])
        first, last = bisect_left(line.xs, low), bisect_right(line.xs, high)
        lines.append(line.only(range(first, last)))
    lines = [line for line in lines if line.known.xs]
    shown = None
    if lines and window != (None, None):
        xs = [x for line in lines for x in (line.xs[0], line.xs[-1])]
        end = max((max(known.values()) for known in places), default=0.0)
        shown = (min(xs) if window[0] is None else max(0.0, low), max(xs) if window[1] is None else min(end, high))
    return attrs.evolve(plot, lines=lines, axis=axis, window=shown)


@attrs.frozen
class Pen:
    """Makes the lines of a run.

    Attributes:
        own: Its colour beside other runs, where its name is the label of its lines; None if it is alone.
        place: Which of the runs it is, from 0.
        settings: The number of its settings.
        thin: Whether other runs have the same settings.
    """

    run: RunData
    own: int | None
    place: int = 0
    settings: int = 0
    thin: bool = False

    def sampled(self, label: str, key: str, *more: str) -> str:
        """Return a label with how the run sampled, if it is alone."""
        if self.own is not None:
            return ", ".join([label, *more])
        return ", ".join(filter(None, [label, figures.sampling(self.run.config, key), *more]))

    def line(self, label: str, color: int, points: Points, *, mark: str = "", dashed: bool = False) -> Line:
        """Return a line with the label and the colour that it has in a plot of one run."""
        kind = tag = ""
        if self.own is not None:
            label, kind, color, tag = self.run.name, label, self.own, str(self.place + 1)
        return Line(
            label=label, kind=kind, tag=tag, xs=points[0], ys=points[1], color=color, mark=mark, joined=not mark,
            dashed=dashed, run=self.place, settings=self.settings, thin=self.thin,
            mode={"dot": "validation", "diamond": "report"}.get(mark, "train"),
        )  # fmt: skip

    def trained(self, label: str, color: int, points: Points, *, pale: bool = True, dashed: bool = False) -> list[Line]:
        """Return the mean of a few steps, behind it each step in a pale line if there is to be one."""
        averaged, of = figures.averaged(self.run, *points), f"{figures.window(self.run, len(points[0]))} steps"
        if self.own is not None:  # each run has its own
            of = f"{figures.SMOOTHING} steps, of a short run a quarter"
        named = ", ".join(filter(None, [label, f"mean of up to {of}"]))
        mean = self.line(named if pale else label, color, averaged, dashed=dashed)
        return [attrs.evolve(self.line(label, color, points), faint=True), mean] if pale else [mean]

    def ends(self, measured: Mapping[str, float | None]) -> Points:
        """Return the points of the measurements before the first step and after the last one."""
        last = max((int(row["step"]) for row in self.run.steps), default=0)
        ends = (0, measured["before"]), (last, measured["after"])
        there = [(step, value) for step, value in ends if value is not None]
        return [step for step, _ in there], [value for _, value in there]


def _pens(runs: Sequence[RunData]) -> list[Pen]:
    if len(runs) == 1:
        return [Pen(runs[0], None)]
    settings, colors = settings_numbers(runs), colors_of(runs)
    return [Pen(run, colors[i], i, settings[i], settings.count(settings[i]) > 1) for i, run in enumerate(runs)]


def _measured(runs: Sequence[RunData], key: str) -> list[Line]:
    """Return the `accuracy` in percent, or the mean `reward`: in training, in validation and on held-out tasks.

    Among several runs, the line of an accuracy is that of validation, and the line of a reward that of training.
    """
    lines, share = [], key == "accuracy"
    for pen in _pens(runs):
        measured, behind = figures.held_out(pen.run)[key], share and pen.own is not None
        points, label = figures.trained(pen.run, key), pen.sampled("training", "temperature")
        lines += pen.trained(label, 2, points, pale=not behind, dashed=behind)
        validation, label = figures.validation(pen.run, key), pen.sampled("validation", "val_temperature")
        lines.append(attrs.evolve(pen.line(label, 1, validation, mark="dot"), joined=share or pen.own is None))
        label = pen.sampled("held out", "val_temperature", *(["95% interval"] if share else []))
        intervals = [measured.get(f"{end}_ci95") for end in ("before", "after") if measured[end] is not None]
        lines.append(attrs.evolve(pen.line(label, INK, pen.ends(measured), mark="diamond"), intervals=intervals))
        for i, name in enumerate([] if share else second_rewards(pen.run), 3):
            points = figures.series(pen.run, SECOND, name, "mean")
            lines += pen.trained(f"second reward: {name}", color_of(i), points, pale=False, dashed=True)
    for i, line in enumerate(lines if share else ()):
        intervals = [ends and (100 * ends[0], 100 * ends[1]) for ends in line.intervals]
        lines[i] = attrs.evolve(line, ys=[100 * value for value in line.ys], intervals=intervals)
    return lines


def _metric(runs: Sequence[RunData], name: str, *path: str, caption: str = "", from_zero: bool = True) -> Plot:
    lines = [line for pen in _pens(runs) for line in pen.trained("", 2, figures.with_gaps(pen.run, *path))]
    return Plot(name=name, lines=lines, from_zero=from_zero, caption=caption)


def _parts(pen: Pen, found: Sequence[tuple[int, Mapping[str, float]]], least: float) -> list[Line]:
    """Return a line for each part with a larger share than the least; `other`, the rest, is grey.

    Parts beyond the number of colours have dashed lines.
    """
    steps, values = [step for step, _ in found], dict[str, list[float]]()
    for part in figures.in_order({part for _, parts in found for part in parts}):
        values[part] = [parts.get(part, 0.0) for _, parts in found]
    seen = [part for part in values if sum(values[part]) > least * sum(map(sum, values.values()))]
    lines = []
    for i, part in enumerate(seen, 1):
        color = GREY if part == "other" else color_of(i)
        line = pen.line(figures.PART_NAMES.get(part, part), color, (steps, values[part]))
        lines.append(attrs.evolve(line, dashed=i > COLORS and color != GREY))
    return lines


def _time(runs: Sequence[RunData]) -> Plot:
    """Return the wall time of each step, of one run by part."""
    if len(runs) > 1:
        caption = "Wall time of a step; the results have its parts."
        return attrs.evolve(_metric(runs, "time", "step_s", caption=caption), unit=" s")
    rows = [row for row in runs[0].steps if number(row.get("step_s")) is not None]
    found = [(int(row["step"]), figures.seconds_by_part(row)) for row in rows]
    lines = _parts(_pens(runs)[0], found, SMALL)
    return Plot(name="time", lines=lines, unit=" s", from_zero=True, caption="Wall time of a step by part.")


def _failures(runs: Sequence[RunData]) -> Plot:
    """Return how many rollouts of each step failed, of one run by kind."""
    lines = []
    for pen in _pens(runs):
        found = [(int(row["step"]), figures.counts(row.get("failures"))) for row in pen.run.steps]
        if pen.own is None:
            lines += _parts(pen, found, 0.0)
        else:
            lines.append(pen.line("", 0, ([step for step, _ in found], [sum(kinds.values()) for _, kinds in found])))
    return Plot(name="failed rollouts", lines=lines if any(any(line.ys) for line in lines) else [], from_zero=True)
