"""The numbers of a report: intervals, smoothed curves, means, and a run's row of the results table."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from agentrig.figures import wilson
from agentrig.report.reading import RunData, mapping, number

SMOOTHING = 16
"""Number of steps over which training curves are smoothed, as in the reference's published curves."""

PARTS = ("rollout", "reward", "update")
"""The parts of a step's time that every algorithm reports; it may add others."""


def sign_test(better: int, worse: int) -> float:
    """Return the two-sided p of the exact sign test: how likely is this split of the changed tasks by chance?"""
    n = better + worse
    if n == 0:
        return 1.0
    tail = sum(math.comb(n, k) for k in range(min(better, worse) + 1))
    return min(1.0, float(2 * tail / 2**n))


def smoothed(values: Sequence[float], window: int = SMOOTHING) -> list[float]:
    """Return the mean of each value and those before it, at most `window` of them."""
    return [mean(values[max(0, i + 1 - window) : i + 1]) or 0.0 for i in range(len(values))]


def averaged(run: RunData, steps: Sequence[int], values: Sequence[float]) -> tuple[Sequence[int], list[float]]:
    """Return the steps and values of a training curve: the moving mean, or for a binned run the mean of each 16 steps.

    Steps 1 to 16 are one bin, which is drawn at its last step; a bin that has not ended is drawn at its latest.
    """
    if not run.binned:
        return steps, smoothed(values)
    bins: dict[int, list[tuple[int, float]]] = {}
    for step, value in zip(steps, values, strict=True):
        bins.setdefault((step - 1) // SMOOTHING, []).append((step, value))
    return [found[-1][0] for found in bins.values()], [mean(v for _, v in found) or 0.0 for found in bins.values()]


def mean(values: Iterable[float]) -> float | None:
    """Return the mean, or None without values."""
    found = list(values)
    return math.fsum(found) / len(found) if found else None


def series(run: RunData, *path: str) -> tuple[list[int], list[float]]:
    """Return the steps and values of a metric in `metrics.jsonl`; steps without it are left out.

    Example:
        `series(run, "time_s", "rollout")`
    """
    steps, values = [], []
    for row in run.steps:
        value: Any = row
        for key in path:
            value = mapping(value).get(key)
        found = number(value)
        if found is not None:
            steps.append(int(row["step"]))
            values.append(found)
    return steps, values


def validation(run: RunData) -> tuple[list[int], list[float]]:
    """Return steps and accuracies on the validation split; step 0 is before training."""
    steps, values = series(run, "validation_accuracy")
    before = number(run.progress.get("validation_before", run.summary.get("validation_before")))
    return (steps, values) if before is None else ([0, *steps], [before, *values])


def validation_rewards(run: RunData) -> dict[int, float]:
    """Return the mean reward on the validation split by step; step 0 is before training."""
    before = number(run.progress.get("validation_reward_before"))
    found = dict(zip(*series(run, "validation_reward"), strict=True))
    return found if before is None else {0: before, **found}


@attrs.frozen
class Change:
    """A metric at the start and at the end of a run; equal if there is only one value."""

    first: float
    last: float


def change(run: RunData, key: str) -> Change | None:
    """Return the means of a metric over a run's first and last steps.

    Each mean is over 16 steps, or over a quarter of the run's steps if that is fewer. For a run without
    metrics, the summary's value is used.
    """
    _, values = series(run, key)
    if not values:
        only = number(run.summary.get(key))
        return None if only is None else Change(only, only)
    width = min(SMOOTHING, max(1, len(values) // 4))
    return Change(mean(values[:width]) or 0.0, mean(values[-width:]) or 0.0)


@attrs.frozen(kw_only=True)
class Rewards:
    """The mean held-out reward; None where it was not measured."""

    before: float | None
    after: float | None


def rewards(run: RunData) -> Rewards:
    """Return a run's mean held-out reward: the summary's, or what was measured so far."""
    measured = {when: mapping(run.progress.get(when)).get("reward") for when in ("before", "after")}
    stated = mapping(run.summary.get("reward")) or measured
    return Rewards(before=number(stated.get("before")), after=number(stated.get("after")))


@attrs.frozen(kw_only=True)
class Accuracy:
    """The held-out accuracy, as fractions, with 95% intervals; None where it was not measured."""

    before: float | None
    after: float | None
    n: int
    before_ci95: tuple[float, float] | None
    after_ci95: tuple[float, float] | None
    best_validation: float | None


def accuracy(run: RunData) -> Accuracy:
    """Return a run's accuracy: the summary's, or what was measured so far; and the best on the validation split."""
    measured = {when: mapping(run.progress.get(when)) for when in ("before", "after")}
    stated = mapping(run.summary.get("accuracy")) or {when: m.get("accuracy") for when, m in measured.items()}
    before, after = number(stated.get("before")), number(stated.get("after"))
    counts = {when: int(number(m.get("n")) or number(stated.get("n")) or 0) for when, m in measured.items()}
    _, validated = validation(run)
    return Accuracy(
        before=before,
        after=after,
        n=counts["after"] or counts["before"],
        before_ci95=_interval(before, counts["before"]),
        after_ci95=_interval(after, counts["after"]),
        best_validation=max(validated, default=None),
    )


def _interval(share: float | None, n: int) -> tuple[float, float] | None:
    return None if share is None or not n else wilson(share * n, n)


def part_names(run: RunData) -> list[str]:
    """Return the parts of a step's time that a run has logged: the three common ones, then its own."""
    seen = {name for row in run.steps for name in mapping(row.get("time_s"))}
    return [p for p in PARTS if p in seen] + sorted(seen - set(PARTS))


def time_split(run: RunData) -> dict[str, float]:
    """Return mean seconds per step by part; `other` is the rest of the step's wall time."""
    rows = [r for r in run.steps if number(r.get("step_s")) is not None]
    if not rows:
        return {}
    split = {
        part: math.fsum(number(mapping(r.get("time_s")).get(part)) or 0.0 for r in rows) / len(rows)
        for part in part_names(run)
    }
    wall = math.fsum(float(r["step_s"]) for r in rows) / len(rows)
    split["other"] = max(0.0, wall - math.fsum(split.values()))
    return split


def time_share(run: RunData) -> dict[str, float]:
    """Return each part's share of the steps' wall time; from the summary if it has one."""
    split = time_split(run)
    wall = math.fsum(split.values())
    shares = {part: seconds / wall for part, seconds in split.items()} if wall else {}
    stated = {k: v for k, x in mapping(run.summary.get("time_share")).items() if (v := number(x)) is not None}
    return {**shares, **stated}


def totals(run: RunData, *path: str) -> dict[str, int]:
    """Return the sums over all steps of a metric that counts by name, such as `("nodes", "seen")`."""
    found: dict[str, int] = {}
    for row in run.steps:
        value: Any = row
        for key in path:
            value = mapping(value).get(key)
        for name, count in mapping(value).items():
            found[str(name)] = found.get(str(name), 0) + int(number(count) or 0)
    return found


def find_setting(config: Mapping[str, Any], *names: str) -> Any:
    """Return the first of these keys found in a section at any depth; names in order of preference."""
    for name in names:
        queue: list[Mapping[str, Any]] = [config]
        while queue:
            table = queue.pop(0)
            if table.get(name) not in (None, "", 0):
                return table[name]
            queue.extend(v for v in table.values() if isinstance(v, Mapping))
    return None


def model_name(run: RunData) -> str | None:
    """Return the model's short name: the last part of its path or repository."""
    stated = run.manifest.get("model") or find_setting(mapping(run.config.get("algorithm")), "model")
    if isinstance(stated, Mapping):
        stated = stated.get("name") or stated.get("path")
    return str(stated).rstrip("/").rsplit("/", 1)[-1] if stated else None


def context_length(run: RunData) -> int | None:
    """Return the context length in tokens from the run's settings, else from its latest checkpoint's model."""
    stated = find_setting(
        mapping(run.config.get("algorithm")), "max_length", "max_model_len", "max_prompt_length", "context"
    )
    if isinstance(stated, int):
        return stated
    try:
        latest = (run.directory / "checkpoints" / "latest").read_text("utf-8").strip()
        model = json.loads((run.directory / "checkpoints" / latest / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    found = number(mapping(model).get("max_position_embeddings"))
    return None if found is None else int(found)


def devices(run: RunData) -> list[str]:
    """Return the names of the devices that the run had."""
    found = mapping(run.manifest.get("hardware")).get("devices")
    if not isinstance(found, list):
        return []
    return [str(mapping(d).get("name", "?")) if isinstance(d, Mapping) else str(d) for d in found]


def accelerators(run: RunData) -> int | None:
    """Return how many accelerators the run had; 0 on the CPU, None when the manifest does not say."""
    hardware = mapping(run.manifest.get("hardware"))
    if not hardware:
        return None
    return 0 if hardware.get("name") == "cpu" else len(devices(run)) or None


def hours(run: RunData) -> float | None:
    """Return the run's wall time in hours: the summary's, else the sum of its steps."""
    wall = number(run.summary.get("wall_s"))
    if wall is None:
        _, seconds = series(run, "step_s")
        wall = math.fsum(seconds) if seconds else None
    return None if wall is None else wall / 3600


def status(run: RunData) -> str:
    """Return `finished`, `stopped: …` with the error's name, `interrupted` (Ctrl-C), or `unfinished`."""
    if run.error:
        return f"stopped: {run.error.get('error') or 'error'}"
    if not run.summary:
        return "unfinished"
    return "finished" if run.summary.get("complete", True) else "interrupted"
