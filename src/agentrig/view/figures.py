"""The numbers of a report: intervals, smoothed curves, means, and a run's row of the results table."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from agentrig.figures import (
    NOTHING,
    SIGNIFICANT,
    amount,
    duration,
    judged,
    mean,
    number,
    sign_test,
    unaudited_s,
    wilson,
)
from agentrig.figures import machine as named_machine
from agentrig.run.checkpoints import SAVED
from agentrig.run.directory import ENDED
from agentrig.run.past import stated_ends
from agentrig.text import flat
from agentrig.traces import items
from agentrig.view.reading import RunData, dig, mapping

SMOOTHING = 16
"""Number of steps over which training curves are smoothed, as in the reference's published curves."""

PARTS = ("rollout", "reward", "update")
"""The parts of a step's time that every algorithm reports; it may add others."""

PART_NAMES = {
    "rollout": "rollouts",
    "reward": "scoring",
    "push": "sending weights",
    "delivery": "checking that weights arrived",
    "audit": "auditing the step before",
}
"""What parts of a step's time are called on the screen; others have their own names."""


ALL_AT_0 = ("run.train_tasks", "run.validation_tasks", "run.report_tasks", "hardware.memory_gib")
"""Settings whose 0 means all."""


UNMOVED = "no task changed"
"""What is said in the place of a test, which nothing is left to."""


def chance(better: int, worse: int) -> str:
    """Return in words whether this split of the changed tasks may be chance: `sign test p = 0.19: may be chance`."""
    if not better + worse:
        return UNMOVED
    return f"sign test {judged(sign_test(better, worse))}"


def setting_text(key: str, value: Any) -> str:
    """Return a setting's value as people read it: JSON, but `all` for a 0 that means all."""
    return "all" if key in ALL_AT_0 and value == 0 else json.dumps(value, ensure_ascii=False, default=str)


def settings_of(run: RunData) -> dict[str, Any]:
    """Return a run's settings by dotted key; of one that a resume changed, in words what it was until which step."""
    found = dict(flat(run.config))
    was: dict[str, list[str]] = {}
    for after, key, value in run.changes:
        was.setdefault(key, []).append(f"{setting_text(key, value)} up to step {after}")
    return found | {key: f"{', '.join(parts)}, then {setting_text(key, found.get(key))}" for key, parts in was.items()}


def unset(key: str, settings: Mapping[str, Any], every: Sequence[Mapping[str, Any]]) -> str:
    """Return what is said of a setting that a run does not have, and others have."""
    section = key.partition(".")[0]
    component = settings.get(f"{section}.use")
    if not component:
        return NOTHING
    same = any(key in other and other.get(f"{section}.use") == component for other in every)
    return "not set" if same else f"does not apply to {section} {component}"


def few(steps: int) -> int:
    """Return over how many of so many steps a mean is taken: 16, or a quarter of them if that is fewer."""
    return min(SMOOTHING, max(1, steps // 4))


def sampling(config: Mapping[str, Any], key: str) -> str:
    """Return how a run samples, as this key of its algorithm says: `temperature 1`, `greedy`, or '' without it."""
    temperature = number(dig(config, "algorithm", key))
    return "" if temperature is None else f"temperature {temperature:g}" if temperature else "greedy"


def labels(manifest: Mapping[str, Any], role: str = "train") -> tuple[int, int]:
    """Return how many of a run's tasks of a role its model has learned the answers of, and how many tasks there are."""
    known, tasks = (number(dig(manifest, "data", role, key)) for key in ("labels", "tasks"))
    return int(known or 0), int(tasks or 0)


def labels_words(known: int, tasks: int) -> str:
    """Return what such tasks mean for the training accuracy."""
    return f"{known} of the {amount(tasks, 'training task')} are the model's labels: their accuracy may be higher"


def held_out_labels(known: int, tasks: int, *, of: str = "held-out task") -> str:
    """Return what is said of measured tasks whose answers the starting model has learned; '' if there are none."""
    said = f"{known} of {amount(tasks, of)} were labels of the warm-up that made the starting model"
    return f"{said}: it has seen their answers." if known else ""


PAIRED = (
    "The 95% intervals overlap although the test{} is significant: the test compares task by task, and the intervals "
    "do not."
)
"""What is said where two sides have such intervals, with which test it is where there are several."""


def overlap(one: Sequence[float] | None, other: Sequence[float] | None, p: float | None) -> bool:
    """Whether two intervals overlap although the test of the two sides is significant, see `PAIRED`."""
    if not one or not other or p is None or p > SIGNIFICANT:
        return False
    return one[0] <= other[1] and other[0] <= one[1]


def window(run: RunData, steps: int) -> int:
    """Return of how many steps a point of a training curve is the mean, for a curve of so many steps."""
    return SMOOTHING if run.binned else max(2, few(steps))


def averaged(run: RunData, steps: Sequence[float], values: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    """Return the steps and values of a training curve: means of up to 16 steps, of a binned run of each 16.

    In a short run they are of a quarter of its steps, and of two at least. Of a binned run, steps 1 to 16 are one bin,
    which is drawn at its last step; a bin that has not ended is drawn at its latest. NaN, a step without a value, is no
    part of a mean.
    """
    if not run.binned:
        width = window(run, len(values))
        return steps, [mean_of_known(values[max(0, i - width) : i]) for i in range(1, len(values) + 1)]
    bins: dict[int, list[tuple[float, float]]] = {}
    for step, value in zip(steps, values, strict=True):
        bins.setdefault(int(step - 1) // SMOOTHING, []).append((step, value))
    return [found[-1][0] for found in bins.values()], [mean_of_known([v for _, v in found]) for found in bins.values()]


def mean_of_known(values: Sequence[float]) -> float:
    """Return the mean of the values that are not NaN; NaN without any."""
    found = mean([value for value in values if not math.isnan(value)])
    return math.nan if found is None else found


def series(run: RunData, *path: str) -> tuple[list[int], list[float]]:
    """Return the steps and values of a metric in `metrics.jsonl`; steps without it are left out.

    Example:
        `series(run, "time_s", "rollout")`
    """
    steps, values = [], []
    for row in run.steps:
        found = number(dig(row, *path))
        if found is not None:
            steps.append(int(row["step"]))
            values.append(found)
    return steps, values


def with_gaps(run: RunData, *path: str) -> tuple[list[int], list[float]]:
    """Return the same as `series`, with NaN for a step in which nothing was trained, if the algorithm has no value."""
    idle = set(without_update(run)) if path[0] == "algorithm" else set()
    measured = dict(zip(*series(run, *path), strict=True))
    steps = sorted(measured.keys() | idle) if measured else []
    return steps, [measured.get(step, math.nan) for step in steps]


def without_update(run: RunData) -> list[int]:
    """Return the steps in which no call was trained, for example because all groups had a single reward each."""
    return [int(row["step"]) for row in run.steps if dig(row, "calls", "trained") == 0]


def trained(run: RunData, key: str) -> tuple[list[int], list[float]]:
    """Return the steps and the `accuracy` or the mean `reward` in training; none where demonstrations are learned."""
    return ([], []) if demonstrated(run) else series(run, key)


def demonstrated(run: RunData) -> bool:
    """Whether a run learns from demonstrations, so that the answers of its training are not the model's."""
    return bool(run.setting("algorithm", "demonstrations"))


def metrics(run: RunData) -> dict[str, tuple[str, ...]]:
    """Return the metrics of a run that are numbers: their names as trackers have them, and their paths for `series`."""
    paths = {path for row in run.steps for path, value in _paths(row) if number(value) is not None}
    return {"/".join(path): path for path in sorted(paths, key="/".join) if path[-1] not in ("step", "time")}


def _paths(tree: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in tree.items():
        yield from _paths(value, (*above, key)) if isinstance(value, Mapping) else [((*above, key), value)]


def places(run: RunData, axis: str) -> dict[int, float]:
    """Return where each step ends on an x axis; step 0 is before training.

    `axis` is `step`, `time` (seconds that the steps took so far) or `tokens` (sampled in training so far). After a step
    that did not record it, no place is known.
    """
    path = {"step": ("step",), "time": ("step_s",), "tokens": ("call_tokens", "recorded")}[axis]
    found, sum_so_far = {0: 0.0}, 0.0
    for row in run.steps:
        value = number(dig(row, *path))
        if value is None:
            break
        sum_so_far = value if axis == "step" else sum_so_far + value
        found[int(row["step"])] = sum_so_far
    return found


def validation(run: RunData, key: str = "accuracy") -> tuple[list[int], list[float]]:
    """Return steps and the `accuracy` or the mean `reward` on the validation split; step 0 is before training."""
    steps, values = series(run, f"validation_{key}")
    name = "validation_before" if key == "accuracy" else "validation_reward_before"
    before = number(run.progress.get(name, run.summary.get(name)))
    return (steps, values) if before is None else ([0, *steps], [before, *values])


def change(run: RunData, *key: str) -> dict[str, float] | None:
    """Return the means of a metric over a run's `first` and `last` steps; None for a run without it.

    Each mean is over `few` steps.
    """
    _, values = series(run, *key)
    width = few(len(values))
    first, last = mean(values[:width]), mean(values[-width:])
    return None if first is None or last is None else {"first": first, "last": last}


def held_out(run: RunData) -> dict[str, dict[str, Any]]:
    """Return a run's held-out `accuracy` and mean `reward`, `before` and `after`; None where it was not measured.

    They are those of `progress.json` (see `stated_ends`), or if it is lost of `summary.json`. The accuracies are
    fractions, with their 95% intervals, the number of scored tasks, and the best accuracy on the validation split.
    """
    ends = ("before", "after")
    told = {key: mapping(run.summary.get(key)) for key in ("accuracy", "reward")}
    stated = stated_ends(run.progress)
    measured = {end: mapping(stated.get(end)) or {key: told[key].get(end) for key in told} for end in ends}
    accuracy: dict[str, Any] = {end: number(measured[end].get("accuracy")) for end in ends}
    tasks = {end: int(number(measured[end].get("n") or told["accuracy"].get("n")) or 0) for end in ends}
    accuracy["n"] = tasks["after"] or tasks["before"]
    for end in ends:
        share, n = accuracy[end], tasks[end]
        accuracy[f"{end}_ci95"] = wilson(share * n, n) if share is not None and n else None
    accuracy["best_validation"] = max(validation(run)[1], default=None)
    return {"accuracy": accuracy, "reward": {end: number(measured[end].get("reward")) for end in ends}}


def in_order(parts: Iterable[str]) -> list[str]:
    """Return parts of a step's time in the order to show them: the three common ones, other ones, and `other`."""
    return sorted(parts, key=lambda part: (part == "other", (*PARTS, part).index(part), part))


def counts(found: Any) -> dict[str, float]:
    """Return figures by name, such as a step's failures by kind; what is no number counts as 0."""
    return {str(name): number(value) or 0.0 for name, value in mapping(found).items()}


def seconds_by_part(row: Mapping[str, Any]) -> dict[str, float]:
    """Return a step's seconds by part; `other` is the rest of its wall time."""
    found = counts(row.get("time_s"))
    return {**found, "other": max(0.0, (number(row.get("step_s")) or 0.0) - math.fsum(found.values()))}


def time_split(run: RunData) -> dict[str, float]:
    """Return mean seconds per step by part; `other` is the rest of the step's wall time."""
    rows = [seconds_by_part(row) for row in run.steps if number(row.get("step_s")) is not None]
    names = in_order({part for row in rows for part in row})
    return {part: math.fsum(row.get(part, 0.0) for row in rows) / len(rows) for part in names}


def totals(run: RunData, *path: str) -> dict[str, int]:
    """Return the sums over all steps of a metric that counts by name, such as `("nodes", "seen")`."""
    found: dict[str, int] = {}
    for row in run.steps:
        for name, count in counts(dig(row, *path)).items():
            found[name] = found.get(name, 0) + int(count)
    return found


def books(run: RunData, key: str) -> dict[str, int]:
    """Return the ledger's `calls` or `call_tokens` of all steps: `recorded`, each place, `dropped` and each reason.

    Reasons come as `dropped: REASON`. Empty before the first step.
    """
    reasons = totals(run, key, "dropped")
    found = totals(run, key) | {f"dropped: {reason}": n for reason, n in reasons.items()}
    return found | {"dropped": sum(reasons.values())} if found else {}


def starting_model(run: RunData) -> str:
    """Return the path or the name of the model that a run began with, or that its server answers for; '' if unknown."""
    return str(run.manifest.get("model") or run.setting("algorithm", "model") or run.setting("server", "model") or "")


def model_name(run: RunData) -> str | None:
    """Return the model's short name: the run and step it comes from, or the last part of its path or repository."""
    for each in map(mapping, items(run.manifest.get("descent"))[:1]):
        return f"{each.get('run')}, step {each.get('step')}"
    stated = starting_model(run)
    return stated.rstrip("/").rsplit("/", 1)[-1] or None


def descent(run: RunData) -> str:
    """Return the runs that the starting model comes from, the nearest first; '' if it is no run's."""
    parts = []
    for each in items(run.manifest.get("descent")):
        digest = str(mapping(each).get("weights") or "")[:12]
        step = f"{mapping(each).get('run')}, step {mapping(each).get('step')}"
        parts.append(f"{step} (weights {digest})" if digest else step)
    return ", from ".join(parts)


def devices(run: RunData) -> list[str]:
    """Return the names of the devices that the run had."""
    found = items(mapping(run.manifest.get("hardware")).get("devices"))
    return [str(mapping(device).get("name", "?")) for device in found]


def machine(run: RunData) -> str:
    """Return the name of the machine that the run had."""
    return named_machine(str(dig(run.manifest, "hardware", "name") or ""), devices(run))


def accelerators(run: RunData) -> int | None:
    """Return how many accelerators the run had; 0 on the CPU, None when the manifest does not say."""
    hardware = mapping(run.manifest.get("hardware"))
    if not hardware:
        return None
    return 0 if hardware.get("name") == "cpu" else len(devices(run)) or None


def hours(run: RunData) -> float | None:
    """Return the run's wall time in hours, with what it took before a resume: the summary's.

    Without one, it is the time until the latest checkpoint, and that of the steps since; or that of all steps.
    """
    wall = number(run.summary.get("wall_s"))
    if wall is None:
        until, (steps, seconds) = number(run.progress.get("wall_s")), series(run, "step_s")
        names = [name.removeprefix("step-") for name in mapping(run.progress.get(SAVED))] if until else []
        saved = max((int(name) for name in names if name.isdecimal()), default=0)
        since = [took for step, took in zip(steps, seconds, strict=True) if step > saved]
        wall = math.fsum([until or 0.0, *since]) if until or since else None
    return None if wall is None else wall / 3600


def status(run: RunData) -> str:
    """Return `running`, `finished`, `stopped` (by a signal), `stopped by an error`, `crashed`, or `ended`.

    `ended` is a run whose file that says how it ended is damaged.
    """
    if run.error:
        kind = str(run.error.get("error") or "error")
        return "stopped" if kind in ("KeyboardInterrupt", "Interrupted") else "stopped by an error"
    if run.summary:
        return "finished" if run.summary.get("complete", True) else "stopped"
    if run.running:
        return "running"
    return "ended" if any((run.directory / name).exists() for name in ENDED) else "crashed"


def time_left(
    lines: Sequence[Mapping[str, Any]], *, done: int, steps: int, every: int, validation_s: float = 0.0
) -> float | None:
    """Return the seconds that the rest of a run's steps take, with their validations; None without a line.

    Args:
        lines: Those of its latest steps, without the first one, which is unlike the others: it also warms up, and
            waits for no checkpoint.
        every: After how many steps it validates; 0 for never.
        validation_s: Seconds of a validation, where no line has one.
    """
    known = [(s, number(dig(line, "time_s", "validation")) or 0.0) for line in lines if (s := unaudited_s(line))]
    each = mean([seconds - validation for seconds, validation in known])
    if each is None:
        return None
    validation_s = next((validation for _, validation in reversed(known) if validation), validation_s)
    return (steps - done) * each + (steps // every - done // every if every else 0) * validation_s


def progress(run: RunData) -> str:
    """Return where a running run is: its step, and the time that the remaining steps take; '' for another run."""
    if not run.running:
        return ""
    done, steps = max((int(row["step"]) for row in run.steps), default=0), number(run.setting("algorithm", "steps"))
    if not steps:
        return f"{amount(done, 'step')} so far"
    if done >= steps:
        return f"resuming after step {done}" if run.resuming else f"all {steps:.0f} steps, measuring held-out accuracy"
    every = int(number(run.setting("algorithm", "validate_every")) or 0)
    seconds = time_left(run.steps[1:][-SMOOTHING:], done=done, steps=int(steps), every=every)
    measured = ", then the last measurement" if run.progress.get("before") else ""
    left = "" if seconds is None else f", about {duration(seconds)} left{measured}"
    return f"step {done + 1} of {steps:.0f}{', resuming' if run.resuming else ''}{left}"
