"""A run's rewards as the live page shows them: how often each value was given, and tasks by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from agentrig.figures import number, percent
from agentrig.view.reading import is_correct, verdict
from agentrig.view.watch.rollouts import Filter
from agentrig.view.watch.runs import Run
from agentrig.view.watch.views import asked, query

VALUES = 12
"""Different values that have a row each in the histogram; more are put together."""

BINS = 10
"""Rows of the histogram of more values."""

TASKS = 30
"""Tasks of a page of the heat map."""

COLUMNS = 40
"""Columns of the heat map; more steps are put together."""

LEVELS = 8
"""Shades of the heat map."""

ORDERS = {
    "task": "task id",
    "lowest": "lowest mean first",
    "change": "largest change first",
    "often": "most often measured first",
}
"""Orders of the heat map's tasks, and their names."""


def rewards_of(run: Run, mode: str, order: str, page: int) -> dict[str, Any]:
    """Return the histogram and the heat map of the rollouts of a mode that are read so far."""
    import pyarrow.compute as pc

    table = run.rollouts.known().filter(pc.field("mode") == mode)
    rows = table.select(["id", "task_id", "step", "value", "failure", "correct"]).to_pylist()
    steps = sorted({row["step"] for row in rows})
    found = {"histogram": _histogram(rows, steps, mode), "steps": steps}
    return {**found, **_heat_map(run, rows, steps, mode, order, page)}


def _histogram(rows: Sequence[Mapping[str, Any]], steps: Sequence[int], mode: str) -> dict[str, Any]:
    """Return how many rollouts have each value, in the first quarter of the steps and in the last one."""
    few = max(1, len(steps) // 4)
    ends = [steps[:few], steps[-few:]] if len(steps) > 1 else [steps] if steps else []
    several = [[row for row in rows if end[0] <= row["step"] <= end[-1]] for end in ends]
    scored = [
        [(number(row["value"]) or 0.0, is_correct(row)) for row in some if verdict(row) != "failed"] for some in several
    ]
    lines = []
    for low, high in _bins(sorted({value for values in scored for value, _ in values})):
        inside = [[right for value, right in values if low <= value <= high] for values in scored]
        score = "..".join(np.format_float_positional(value, trim="-") for value in (low, high))
        name = f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"
        if low == high and len({right for rights in inside for right in rights}) == 2:
            wrong = "wrong" if low <= 0 else "part"
            lines.append((f"{name}, right", f"right {score}", [sum(rights) for rights in inside]))
            lines.append((f"{name}, counted as wrong", f"{wrong} {score}", [rights.count(False) for rights in inside]))
        else:
            lines.append((name, score, [len(rights) for rights in inside]))
    failed = [len(some) - len(values) for some, values in zip(several, scored, strict=True)]
    if any(failed):
        lines.append(("failed", "failed", failed))
    most = max((n / len(some) for _, _, ns in lines for n, some in zip(ns, several, strict=True) if some), default=1)
    return {
        "heads": [f"step {end[0]}" if len(end) == 1 else f"steps {end[0]} to {end[-1]}" for end in ends],
        "rows": [
            {
                "name": name,
                "cells": [
                    {
                        "n": n,
                        "share": percent(n / len(some)),
                        "width": round(100 * n / len(some) / most, 1),
                        "query": query(Filter(mode=mode, score=score, step=end[0], last=end[-1])),
                    }
                    for n, some, end in zip(counts, several, ends, strict=True)
                ],
            }
            for name, score, counts in lines
        ],
    }


def _bins(values: Sequence[float]) -> list[tuple[float, float]]:
    """Return ranges of values, both ends included: one for each value if they are few."""
    if len(values) <= VALUES:
        return [(value, value) for value in values]
    borders = np.linspace(values[0], values[-1], BINS + 1)[1:-1]
    groups = [list(group) for _, group in groupby(values, key=lambda value: int(np.digitize(value, borders)))]
    return [(group[0], group[-1]) for group in groups]


def _heat_map(
    run: Run, rows: Sequence[Mapping[str, Any]], steps: Sequence[int], mode: str, order: str, page: int
) -> dict[str, Any]:
    size = max(1, -(-len(steps) // COLUMNS))
    columns = [(part[0], part[-1]) for part in (steps[i : i + size] for i in range(0, len(steps), size))]
    column = {step: i // size for i, step in enumerate(steps)}
    cells: dict[str, dict[int, list[float | None]]] = {}
    ids: dict[str, str] = {}
    for row in rows:
        value = None if verdict(row) == "failed" else number(row["value"])
        cells.setdefault(row["task_id"], {}).setdefault(column[row["step"]], []).append(value)
        ids[row["task_id"]] = row["id"]  # the latest: those of many tasks are in one file
    means = {task: {at: _mean(values) for at, values in of.items()} for task, of in cells.items()}
    known = [mean for of in means.values() for mean in of.values() if mean is not None]
    low, high = min(known, default=0.0), max(known, default=1.0)
    low, high = (0.0, 1.0) if low >= 0 and high <= 1 else (low, high)

    def rank(task: str) -> tuple[float, str]:
        scored = [mean for _, mean in sorted(means[task].items()) if mean is not None]
        if order == "lowest":
            return (_mean(scored) or 0.0) if scored else high, task
        if order == "change":
            return -abs(scored[-1] - scored[0]) if scored else 1.0, task
        return (-sum(map(len, cells[task].values())) if order == "often" else 0.0), task

    tasks = sorted(cells, key=rank)[(page - 1) * TASKS :][:TASKS]
    questions = run.rollouts.inputs([ids[task] for task in tasks])

    def cell(task: str, at: int) -> dict[str, Any] | None:
        if at not in cells[task]:
            return None
        mean, (first, last) = means[task][at], columns[at]
        n = len(cells[task][at])
        return {
            "text": "×" if mean is None else f"{mean:.2g}".replace("0.", ".", 1),
            "level": "failed" if mean is None else f"h{round((LEVELS - 1) * (mean - low) / ((high - low) or 1))}",
            "said": f"{named(first, last)}: {'failed' if mean is None else f'mean {mean:.3g}'}, "
            f"{n} rollout{'s' if n > 1 else ''}",
            "query": query(Filter(task=task, mode=mode, step=first, last=None if first == last else last)),
        }

    def named(first: int, last: int) -> str:
        return f"step {first}" if first == last else f"steps {first} to {last}"

    return {
        "columns": [(f"{first}", named(first, last), query(Filter(mode=mode, step=first))) for first, last in columns],
        "tasks": [
            {
                "task": task,
                "question": asked(questions.get(ids[task]), task),
                "query": query(Filter(task=task, mode=mode)),
                "cells": [cell(task, at) for at in range(len(columns))],
            }
            for task in tasks
        ],
        "of": len(cells),
        "repeated": any(len(of) > 1 for of in cells.values()),
        "pages": max(1, -(-len(cells) // TASKS)),
        "low": low,
        "high": high,
        "levels": LEVELS,
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
