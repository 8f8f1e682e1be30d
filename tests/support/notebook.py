"""Executes the notebook of the docs; `python tests/support/notebook.py` stores its outputs in it.

A runner of its own: neither Jupyter nor nbclient is among the packages of the tests.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from agentrig.testing.run_directory import write_run

FILE = Path(__file__).resolve().parents[2] / "docs" / "tutorials" / "read-a-run.ipynb"

RUN, STEPS = Path("runs") / "mini-20260101-120000", 12
"""The run directory that it reads, and its steps."""


def executed(folder: Path) -> tuple[dict[str, Any], list[Any], list[list[dict[str, Any]]]]:
    """Execute the code cells in a folder, where a run directory is made first.

    Returns:
        The variables, the value of each cell's last expression, and each cell's outputs as a notebook stores them.
    """
    with contextlib.chdir(folder):
        write_run(RUN, steps=STEPS)
        space: dict[str, Any] = {}
        shown, outputs = [], []
        for number, code in enumerate(codes(), 1):
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                value = _value(code, space)
            shown.append(value)
            stream = {"output_type": "stream", "name": "stdout", "text": printed.getvalue().splitlines(keepends=True)}
            result = {"output_type": "execute_result", "execution_count": number, "metadata": {}, "data": _data(value)}
            outputs.append([*([stream] if stream["text"] else []), *([] if value is None else [result])])
        return space, shown, outputs


def codes() -> list[str]:
    cells = json.loads(FILE.read_text("utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def _value(code: str, space: dict[str, Any]) -> Any:
    """Run a cell; return the value of its last expression, which a notebook shows."""
    tree = ast.parse(code)
    shown = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), space)
    return None if shown is None else eval(compile(ast.Expression(shown.value), "cell", "eval"), space)


def _data(value: Any) -> dict[str, Any]:
    data: dict[str, Any] = {"text/plain": repr(value).splitlines(keepends=True)}
    if hasattr(value, "_repr_png_"):
        data["image/png"] = base64.b64encode(value._repr_png_()).decode()
    html = value._repr_html_() if hasattr(value, "_repr_html_") else None
    return {**data, "text/html": html.splitlines(keepends=True)} if html else data


def main() -> None:
    notebook = json.loads(FILE.read_text("utf-8"))
    os.environ["COLUMNS"] = "100"
    with tempfile.TemporaryDirectory() as folder:
        _, _, outputs = executed(Path(folder))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, (cell, found) in enumerate(zip(cells, outputs, strict=True), 1):
        cell["execution_count"], cell["outputs"] = number, found
    FILE.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    main()
