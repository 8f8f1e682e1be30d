"""The names of a run's figures in trackers: one scheme for all trackers and all algorithms.

A figure's name is its path in `metrics.jsonl`, with `/` between the parts: `time_s/update`, `algorithm/loss`. Figures
of the step itself are under `train/`, those of validation under `validation/`, and the held-out results of
`summary.json` under `report/`. A part has letters, digits and `_ . -`; every other character becomes `_`, because some
trackers refuse it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from agentrig.text import flat

APART = ("step", "time", "digests", "delivery")
"""Keys of a line that are no figures."""

HELD_OUT = ("accuracy", "reward")
"""Keys of `summary.json` with the held-out results `before` and `after`."""


MAIN = frozenset(
    f"train/{name}"
    for name in (
        *("reward", "accuracy", "failed", "zero_variance_groups", "response_tokens", "transitions_per_rollout"),
        *("step_s", "rollouts_per_s", "tokens_per_s"),
    )
)
MAIN_OF_ALGORITHM = re.compile(r"algorithm/(.*/)?(\w*loss|kl|ppo_kl|entropy|grad_norm|\w*clip_?frac\w*|lr)", re.ASCII)
"""The figures that `figures = "main"` keeps, with those of validation and the results."""


def main_of(figures: Mapping[str, float]) -> dict[str, float]:
    """Return the figures that most look at."""
    return {
        name: value
        for name, value in figures.items()
        if name in MAIN or name.startswith(("validation/", "report/")) or MAIN_OF_ALGORITHM.fullmatch(name)
    }


def of_step(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of a line of `metrics.jsonl`: name to value; None, NaN and texts are left out."""
    found: dict[str, float] = {}
    for key, value in line.items():
        if key in APART:
            continue
        if isinstance(value, Mapping):
            found.update(_flat(key, value))
        elif key.startswith("validation_"):
            found.update(_flat("validation", {key.removeprefix("validation_"): value}))
        else:
            found.update(_flat("train", {key: value}))
    if isinstance(line.get("failures"), Mapping):
        found["train/failed"] = float(sum(line["failures"].values()))
    return found


def of_summary(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the results of `summary.json`: `report/accuracy_before`, `report/accuracy_after` and so on."""
    found: dict[str, float] = {}
    for key in HELD_OUT:
        for when, value in (summary.get(key) or {}).items():
            if when in ("before", "after"):
                found.update(_flat("report", {f"{key}_{when}": value}))
    found.update(_flat("report", {key: summary.get(key) for key in ("wall_s", "rollouts")}))
    return found


def flat_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration as `section.key` to text, number or bool; lists become text."""
    known = ((name, value) for name, value in flat(config) if value is not None)
    return {name: value if isinstance(value, str | int | float | bool) else str(list(value)) for name, value in known}


def _flat(path: str, keys: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in keys.items():
        name = f"{path}/{_part(str(key))}"
        if isinstance(value, Mapping):
            yield from _flat(name, value)
        elif isinstance(value, int | float) and math.isfinite(value):
            yield name, float(value)


def _part(key: str) -> str:
    """Return a key as one or more parts of a name; verl's `actor/loss` stays two."""
    return "/".join(re.sub(r"[^\w.-]", "_", part, flags=re.ASCII) for part in key.split("/") if part) or "_"
