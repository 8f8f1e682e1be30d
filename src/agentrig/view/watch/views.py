"""What the live page's lists show, as plain values for the templates."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

import attrs

from agentrig.errors import AgentrigError
from agentrig.figures import mean, number
from agentrig.text import cut
from agentrig.view import figures
from agentrig.view.plots import AXES, CAPTIONS, Plot, plots_of
from agentrig.view.reading import RunData, first_line, verdict
from agentrig.view.rollout import chip, question
from agentrig.view.tables import spark
from agentrig.view.watch.notes import read_notes
from agentrig.view.watch.rollouts import Filter
from agentrig.view.watch.runs import Run

if TYPE_CHECKING:
    from starlette.requests import Request

log = logging.getLogger(__name__)

PAGE = 50
"""Rows of a list."""

UNSHOWN = {
    **dict.fromkeys(("state", "recipe", "steps", "spark", "started"), ""),
    **{"accuracy": {"before": None, "after": None}, "may_be_chance": False, "reward": None},
}
"""The figures of a run that cannot be read."""


def curves(request: Request, runs: Mapping[str, RunData]) -> tuple[dict[str, Any], list[Plot]]:
    """Return the curves of runs as a page's address asks for them, and what the form above them shows.

    It may have `x` (a key of `AXES`), `from` and `to` (where on that axis), and `metric`, several times.
    """
    asked, base = request.query_params, request.scope["root_path"]
    axis = asked.get("x", "step")
    axis = axis if axis in AXES else "step"
    window = tuple(finite(asked.get(end)) for end in ("from", "to"))
    known = sorted({name for run in runs.values() for name in figures.metrics(run)})
    metrics = [name for name in dict.fromkeys(asked.getlist("metric")) if name in known]
    plots = plots_of(list(runs.values()), axis=axis, window=(window[0], window[1]), metrics=metrics)
    unplaced = [run.name for run in runs.values() if run.steps and len(figures.places(run, axis)) <= len(run.steps)]
    hidden = [*(("run", key) for key in runs), *([("each", "1")] if "each" in asked else [])]
    shown = {"x": axis, "from": asked.get("from"), "to": asked.get("to")}
    named = [*((key, value) for key, value in shown.items() if value), *(("metric", name) for name in metrics)]
    chosen = {
        "axis": axis,
        "axes": list(AXES.items()),
        "window": window,
        "zoomed": window != (None, None),
        "known": {group: list(of) for group, of in groupby(known, key=lambda name: name.partition("/")[0])},
        "metrics": metrics,
        "captions": CAPTIONS,
        "hidden": hidden,
        "unplaced": f"Not recorded in every step, so the rest is left out: {', '.join(unplaced)}." if unplaced else "",
        "csv": f"{base}/chart.csv?{urlencode([*hidden, *named])}",
        "runs": [f"{base}/run/{quote(key, safe='')}" for key in runs],
    }
    return chosen, plots


def finite(text: str | None) -> float | None:
    """Return a number that somebody wrote, or None if it is none."""
    try:
        return number(float(text or ""))
    except ValueError:
        return None


ORDERS: Mapping[str, tuple[str, str, Callable[[Mapping[str, Any]], Any]]] = {
    "name": ("Run", "", lambda row: row["name"].lower()),
    "status": ("Status", "", lambda row: row["status"]),
    "steps": ("Steps", "n", lambda row: row["steps"] or None),
    "accuracy": ("Held out, %", "n", lambda row: row["accuracy"]["after"]),
    "reward": ("Last reward", "n", lambda row: row["reward"]),
    "curve": ("Training curve", "", lambda row: None),
    "recipe": ("Recipe", "wide-only recipe", lambda row: row["recipe"]),
    "started": ("Started", "wide-only", lambda row: row["started"]),
}
"""Columns of the list of runs: heading, how it is set, and what it is sorted by."""


def run_list(runs: Mapping[str, Run], asked: Mapping[str, str]) -> dict[str, Any]:
    """Return the list of a folder's runs, the newest first, as the address asks for it.

    It may ask for `text` (in the name, recipe, status, tags or note), `tag`, and `sort`: a key of `ORDERS`, after `-`
    for the largest first.
    """
    wanted = {key: asked.get(key, "").strip() for key in ("text", "tag", "sort")}
    every = [{"key": key, "notes": read_notes(run.directory), **listed(run)} for key, run in runs.items()]

    def fits(row: Mapping[str, Any]) -> bool:
        notes = row["notes"]
        words = " ".join([row["name"], row["recipe"], row["status"], *notes.tags, notes.note]).lower()
        return wanted["text"].lower() in words and wanted["tag"] in ("", *notes.tags)

    rows = [row for row in every if fits(row)]
    sort, falling = wanted["sort"].lstrip("-"), wanted["sort"].startswith("-")
    if sort in ORDERS:
        by = ORDERS[sort][2]
        known = sorted((row for row in rows if by(row) not in (None, "")), key=by, reverse=falling)
        rows = known + [row for row in rows if by(row) in (None, "")]
    columns = []
    for key, (name, kind, _) in ORDERS.items():
        down = not falling if key == sort else kind == "n"
        asks = {**wanted, "sort": f"-{key}" if down else key}
        link = "" if key == "curve" else urlencode({name: text for name, text in asks.items() if text})
        order = ("descending" if falling else "ascending") if key == sort else ""
        columns.append({"name": name, "kind": kind, "sorted": order, "query": link})
    orders = [
        ("", "last started or resumed first"),
        ("started", "oldest first"),
        *((key, key) for key in ("name", "status", "recipe")),
    ]
    for key, (name, kind, _) in ORDERS.items():
        orders += [(f"-{key}", f"{name}: largest first"), (key, f"{name}: smallest first")] if kind == "n" else []
    tags = sorted({tag for row in every for tag in row["notes"].tags})
    return {"rows": rows, "all": len(every), "wanted": wanted, "columns": columns, "orders": orders, "tags": tags}


def listed(run: Run) -> dict[str, Any]:
    """Return a run's row in the list of a folder's runs; of one that can't be shown, only why."""
    try:
        data = run.data()
        (_, rewards), (_, accuracies) = (figures.trained(data, key) for key in ("reward", "accuracy"))
        return {
            "name": data.name,
            "recipe": data.recipe,
            "state": figures.status(data),
            "status": ", ".join(filter(None, [figures.status(data), figures.progress(data)])),
            "steps": data.done,
            "accuracy": figures.held_out(data)["accuracy"],
            "may_be_chance": run.may_be_chance(),
            "reward": rewards[-1] if rewards else None,
            "spark": spark((accuracies or rewards)[-240:], width=80),
            "started": str(data.manifest.get("created") or ""),
        }
    except Exception as error:  # one run must not take the page of all
        log.warning(
            "the run %s cannot be shown: %s", run.directory, error, exc_info=not isinstance(error, AgentrigError)
        )
        return {"name": run.key, "status": f"cannot be shown: {first_line(error)}"} | UNSHOWN


def groups(run: Run, wanted: Filter) -> list[dict[str, Any]]:
    """Return a batch's groups: the task of each, and its rollouts with their scores."""
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in run.rollouts.find(wanted).to_pylist():
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
    found = run.rollouts.find(wanted).sort_by([("step", "descending")])
    shown = found.slice((page - 1) * PAGE, PAGE).to_pylist()
    questions = run.rollouts.inputs([row["id"] for row in shown])
    rows = [{**row, **chip(row), "question": asked(questions.get(row["id"]), row["task_id"])} for row in shown]
    return rows, len(found)


def asked(task_input: Any, task: str) -> str:
    """Return a task's question in one line, or its id if it has none."""
    return cut(" ".join(question({"input": task_input, "task_id": task}).split()), 240)


def neighbours(run: Run, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is beside a rollout: its group, the one before and after it, and its task in other steps."""
    batch = run.rollouts.find(Filter(mode=row["mode"], step=row["step"])).to_pylist()
    ids = [each["id"] for each in batch]
    place = ids.index(row["id"]) if row["id"] in ids else 0
    history: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for other in run.rollouts.find(Filter(task=row["task_id"])).to_pylist():
        if other["step"] != row["step"]:
            history.setdefault((other["mode"], other["step"]), []).append(chip(other))
    beside = [{"mode": mode, "step": step, "rollouts": chips[:16]} for (mode, step), chips in history.items()]
    same = [each for each in batch if (each["group"], each["task_id"]) == (row["group"], row["task_id"])]
    return {
        "before": ids[place - 1] if place > 0 else "",
        "after": ids[place + 1] if place + 1 < len(ids) else "",
        "group": [chip(each) for each in same],
        "history": beside[-60:],
    }


def query(wanted: Filter, **changed: Any) -> str:
    """Return a filter as the query of an address."""
    values = {**attrs.asdict(wanted), **changed}
    return urlencode({key: value for key, value in values.items() if value not in (None, "")})
