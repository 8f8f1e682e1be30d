"""Makes docs/reference.md and docs/reference/ from the code: `python tests/support/reference.py` writes them.

A test compares them.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import attrs

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference.md"

HEAD = """# Reference: objects, spans, variables

This page is made from the code by `tests/support/reference.py`; a test fails when the two differ. Beside it:
[the command line](reference/command-line.md), [every key](reference/configuration.md) and
[the API](reference/api.md).
"""


def described(cls: type) -> dict[str, str]:
    """Return the section `Attributes:` of a class's docstring: name to text."""
    text = inspect.getdoc(cls) or ""
    _, _, section = text.partition("Attributes:\n")
    found: dict[str, str] = {}
    for line in section.split("\n\n")[0].splitlines():
        start = re.match(r"    (\w+): (.*)", line)
        if start:
            name = start[1]
            found[name] = start[2]
        elif found:
            found[name] += " " + line.strip()
    return found


def table(head: str, rows: Mapping[str, str]) -> Iterator[str]:
    yield f"| {head} | |"
    yield "| --- | --- |"
    for name, text in rows.items():
        yield f"| `{name}` | {text.replace('|', chr(92) + '|')} |"
    yield ""


def fields(cls: type) -> dict[str, str]:
    """Return an object's fields with their descriptions; a field without one is an error."""
    words = described(cls)
    names = [f.name for f in attrs.fields(cls)] if attrs.has(cls) else list(inspect.get_annotations(cls))
    names += [n for n, v in vars(cls).items() if isinstance(v, property)]
    for name, value in vars(cls).items():
        if isinstance(value, property):
            words[name] = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
    missing = [n for n in names if not n.startswith("_") and not words.get(n)]
    if missing:
        raise ValueError(f"{cls.__name__} does not describe {', '.join(missing)} under Attributes: in its docstring")
    return {n: words[n] for n in names if not n.startswith("_")}


def methods(cls: type) -> dict[str, str]:
    found = {}
    for name, value in vars(cls).items():
        if inspect.isfunction(value) and not name.startswith("_"):
            found[f"{name}()"] = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
    return found


def page() -> str:
    from agentrig import Endpoint, Outcome, Score, Span, Task, Trace, Triplet, observers
    from agentrig.algorithms import Session
    from agentrig.rollouts import Rollout
    from agentrig.traces import ATTRIBUTES
    from agentrig.variables import INTERNAL, VARIABLES

    lines = [HEAD]
    lines += ["## Environment variables", "", "A user may set these:", "", *table("variable", VARIABLES)]
    lines += ["agentrig sets these for its own processes:", "", *table("variable", INTERNAL)]
    lines += ["Which of all these a runner gets: [Secrets](secrets.md).", ""]
    lines += ["## Attributes of spans", "", *table("attribute", ATTRIBUTES)]
    lines += ["## What a rollout is made of", ""]
    for cls in (Rollout, Outcome, Score, Trace, Span, Triplet, Task, Endpoint):
        lines += [f"### `{cls.__name__}`", "", *table("field", fields(cls))]
    lines += ["## What algorithms are lent: `Session`", "", *table("field", fields(Session))]
    lines += [*table("method", methods(Session)), "## What observers are told", ""]
    for cls in (observers.RunStart, observers.StepEnd, observers.RunEnd, observers.RunError):
        lines += [f"### `{cls.__name__}`", "", *table("field", fields(cls))]
    lines += ["`on_rollout_end` gets a `Rollout`.", ""]
    return "\n".join(lines)


def missing() -> list[str]:
    """Return the distributions of `plugins/` that are not installed here: their keys would be left out."""
    folders = [file.parent.name for file in sorted(PAGE.parents[1].glob("plugins/*/pyproject.toml"))]
    there = {str(found.metadata["Name"]) for found in importlib.metadata.distributions()}
    return [name for name in folders if name not in there]


if __name__ == "__main__":
    import model_table
    import reference_pages

    if missing():
        raise SystemExit(f"not installed: {', '.join(missing())}; run `make setup` first")
    PAGE.write_text(page(), "utf-8")
    model_table.PAGE.write_text(model_table.page(), "utf-8")
    for path, make in reference_pages.PAGES.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(make(), "utf-8")
