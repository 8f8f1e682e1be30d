"""What each page shows, as plain values for the templates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import attrs

from agentrig.figures import mean
from agentrig.text import cut
from agentrig.view import figures, table
from agentrig.view.page import differences, view
from agentrig.view.plots import plots_of
from agentrig.view.reading import RunData, verdict
from agentrig.view.rollouts import chip
from agentrig.view.sample_traces import question
from agentrig.view.watch.rollouts import Filter
from agentrig.view.watch.runs import Run

if TYPE_CHECKING:
    import polars as pl

PAGE = 50
"""Rows of a list."""


def overview(run: Run) -> dict[str, Any]:
    """Return a run's figures, curves, warnings and tables; its rollouts are not read."""
    data = run.data()
    return {"run": view(data, table.row_of(data), whole=False), "key": run.key}


def listing(runs: Mapping[str, Run]) -> list[dict[str, Any]]:
    """Return a row for each run of a folder."""
    found = []
    for key, run in runs.items():
        data = run.data()
        _, rewards = figures.series(data, "reward")
        found.append(
            {
                "key": key,
                "name": data.name,
                "recipe": data.recipe,
                "status": status_of(data),
                "steps": len(data.steps),
                "accuracy": figures.held_out(data)["accuracy"],
                "reward": rewards[-1] if rewards else None,
                "started": str(data.manifest.get("created") or ""),
            }
        )
    return found


def comparison(runs: Sequence[Run]) -> dict[str, Any]:
    """Return several runs side by side: their rows, curves, and the settings in which they differ."""
    data = [run.data() for run in runs]
    rows = [table.row_of(each) for each in data]
    return {
        "names": [each.name for each in data],
        "keys": [run.key for run in runs],
        "columns": table.COLUMNS,
        "cells": [table.cells(row) for row in rows],
        "curves": plots_of(data),
        "differences": differences(data),
    }


def status_of(data: RunData) -> str:
    """Return a run's status in one word or two."""
    return figures.status(data)


def steps_of(batches: Sequence[tuple[str, int]]) -> list[dict[str, Any]]:
    """Return the batches of rollouts for a choice: mode, step and a label."""
    words = {"report": "held-out tasks", "validation": "validation", "train": "training", "dev": "dev"}
    return [{"mode": mode, "step": step, "label": f"step {step}, {words.get(mode, mode)}"} for mode, step in batches]


def groups(run: Run, wanted: Filter) -> list[dict[str, Any]]:
    """Return a batch's groups: the task of each, and its rollouts with their scores."""
    found = run.rollouts.find(wanted)
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in found.sort("place").to_dicts():
        rows.setdefault((row["group"], row["task_id"]), []).append(row)
    questions = run.rollouts.inputs([members[0]["id"] for members in rows.values()])
    return [
        {
            "task": task,
            "question": asked(questions.get(members[0]["id"]), task),
            "rollouts": [chip(row) for row in members],
            "mean": mean([row["value"] for row in members if verdict(row) != "failed"]),
        }
        for (_, task), members in rows.items()
    ]


def found_rollouts(run: Run, wanted: Filter, page: int) -> tuple[list[dict[str, Any]], int]:
    """Return a page of the rollouts that a filter lets through, the newest first, and how many there are in all."""
    found: pl.DataFrame = run.rollouts.find(wanted).sort(["step", "place"], descending=[True, False])
    shown = found.slice((page - 1) * PAGE, PAGE).to_dicts()
    questions = run.rollouts.inputs([row["id"] for row in shown])
    return [{**row, **chip(row), "question": asked(questions.get(row["id"]), row["task_id"])} for row in shown], len(
        found
    )


def asked(task_input: Any, task: str) -> str:
    """Return a task's question in one line, or its id if it has none."""
    return cut(" ".join(question({"input": task_input, "task_id": task})[0].split()), 240)


def neighbours(run: Run, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is beside a rollout: its group, the one before and after it, and its task in other steps."""
    import polars as pl

    all_rows = run.rollouts.table()
    batch = all_rows.filter((pl.col("mode") == row["mode"]) & (pl.col("step") == row["step"])).sort("place")
    ids = batch["id"].to_list()
    place = ids.index(row["id"]) if row["id"] in ids else 0
    group = batch.filter((pl.col("group") == row["group"]) & (pl.col("task_id") == row["task_id"])).to_dicts()
    others = all_rows.filter((pl.col("task_id") == row["task_id"]) & (pl.col("step") != row["step"])).sort("step")
    history: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for other in others.to_dicts():
        history.setdefault((other["mode"], other["step"]), []).append(chip(other))
    return {
        "before": ids[place - 1] if place > 0 else "",
        "after": ids[place + 1] if place + 1 < len(ids) else "",
        "group": [chip(each) for each in group],
        "history": [{"mode": mode, "step": step, "rollouts": chips[:16]} for (mode, step), chips in history.items()][
            -60:
        ],
    }


def query(wanted: Filter, **changed: Any) -> str:
    """Return a filter as the query of an address."""
    values = {**attrs.asdict(wanted), **changed}
    return urlencode({key: value for key, value in values.items() if value not in (None, "")})
