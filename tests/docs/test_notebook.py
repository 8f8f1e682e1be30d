"""The notebook docs/tutorials/read-a-run.ipynb is executed, cell by cell; the page beside it has the same content.

A runner of its own executes the cells: neither Jupyter nor nbclient is among the packages of the tests.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from agentrig.testing.run_directory import write_run

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "tutorials"


def cells() -> list[tuple[str, str]]:
    """Return the kind and the text of each cell."""
    notebook = json.loads((FOLDER / "read-a-run.ipynb").read_text("utf-8"))
    assert (notebook["nbformat"], notebook["metadata"]["language_info"]) == (4, {"name": "python"})
    return [(cell["cell_type"], "".join(cell["source"])) for cell in notebook["cells"]]


def execute(code: str, space: dict[str, Any]) -> Any:
    """Run a cell; return the value of its last expression, which a notebook shows."""
    tree = ast.parse(code)
    shown = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), space)
    return None if shown is None else eval(compile(ast.Expression(shown.value), "cell", "eval"), space)


def held_out(run: Any) -> list[tuple[int, Any]]:
    """Return the held-out rollouts before and after training."""
    return [(step, run.rollouts("report", step=step)) for step in (0, 12)]


def test_every_cell_of_the_notebook_runs_and_shows_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "runs" / "mini-20260101-120000", steps=12)
    monkeypatch.chdir(tmp_path)
    space: dict[str, Any] = {}
    shown = [execute(text, space) for kind, text in cells() if kind == "code"]
    printed = capsys.readouterr().out
    assert "Nothing held learning back." in printed
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
    page = " ".join((FOLDER / "read-a-run.md").read_text("utf-8").split())
    for kind, text in cells():
        wanted = f"```python\n{text}\n```" if kind == "code" else text
        assert " ".join(wanted.split()) in page
