"""The notebook docs/tutorials/read-a-run.ipynb is executed, cell by cell; the page beside it has the same content."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.notebook import FILE, executed


def cells() -> list[dict[str, Any]]:
    notebook = json.loads(FILE.read_text("utf-8"))
    assert (notebook["nbformat"], notebook["metadata"]["language_info"]) == (4, {"name": "python"})
    return [{**cell, "source": "".join(cell["source"])} for cell in notebook["cells"]]


def texts(outputs: list[dict[str, Any]]) -> list[list[str]]:
    """Return what a cell's outputs are as text, without pictures, which other versions of a library draw otherwise."""
    return [output.get("text") or output["data"]["text/plain"] for output in outputs]


def held_out(run: Any) -> list[tuple[int, Any]]:
    """Return the held-out rollouts before and after training."""
    return [(step, run.rollouts("report", step=step)) for step in (0, 12)]


def test_every_cell_of_the_notebook_runs_and_shows_something(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    space, shown, outputs = executed(tmp_path)
    stored = [cell["outputs"] for cell in cells() if cell["cell_type"] == "code"]
    assert [texts(found) for found in stored] == [texts(found) for found in outputs], (
        "the notebook has other outputs: python tests/support/notebook.py"
    )
    assert any(
        "No fault was found, and the run got better." in line for found in outputs for line in found[0].get("text", ())
    )
    run, _, figures, plot, means, failures, worse, turns, tokens, calls, reply = shown
    assert run._repr_html_().count("data:image/png;base64,") == 4
    assert list(figures.columns) == ["reward", "response_tokens", "algorithm.loss"]
    assert plot._repr_png_().startswith(b"\x89PNG")
    assert list(means.index) == [8, 9, 10, 11, 12]
    assert dict(failures) == {"llm-error": 2}
    rows = space["rollouts"].to_dict("records")
    correct = {step: dict(zip(f["task_id"], f["correct"], strict=True)) for step, f in held_out(run)}
    assert set(worse["task_id"]) == {task for task in correct[0] if correct[0][task] and not correct[12][task]}
    assert 0 < len(worse) < 5
    values = [[value for value in row["call_values"] if value is not None] for row in rows]
    first, second = ([of[turn] for of in values if len(of) > turn] for turn in (0, 1))
    assert turns.to_dict("index") == {
        1: {"mean": pytest.approx(sum(first) / len(first)), "count": len(first)},
        2: {"mean": pytest.approx(sum(second) / len(second)), "count": len(second)},
    }
    for name, of in {
        "right": [row for row in rows if row["correct"] is True],
        "wrong": [row for row in rows if row["correct"] is False],
        "llm-error": [row for row in rows if row["failure"] == "llm-error"],
    }.items():
        assert of
        assert tokens.loc[name, ("prompt_tokens", "sum")] == sum(row["prompt_tokens"] for row in of)
    assert set(calls.index) == {"write_query", "check_query", "rewrite_query"}
    assert (calls["response_tokens"] == 20).all()
    assert any("SELECT" in str(text) for text in reply["reply"])


def test_the_page_has_the_text_and_the_code_of_the_notebook() -> None:
    page = " ".join(FILE.with_suffix(".md").read_text("utf-8").split())
    for cell in cells():
        text = cell["source"]
        wanted = f"```python\n{text}\n```" if cell["cell_type"] == "code" else text
        assert " ".join(wanted.split()) in page
