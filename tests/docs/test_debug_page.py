"""The page docs/how-to/debug-a-run.md quotes existing messages and figures."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from agentrig.run import guards

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "how-to" / "debug-a-run.md").read_text("utf-8")


def test_the_messages_are_those_of_the_guards() -> None:
    whole = re.sub(r'"\s*\n\s*f?"', "", inspect.getsource(guards))  # texts over several lines
    source = re.sub(r"\{[^{}]*\}", "…", whole)
    table = PAGE[PAGE.index("| message |") : PAGE.index("## The reward does not rise")]
    quoted = [text for row in table.splitlines()[2:] if row for text in re.findall(r"`([^`]+)`", row.split("|")[1])]
    assert len(quoted) >= 6
    for text in quoted:
        parts = [part.strip() for part in re.split("…", text) if part.strip()]
        assert all(part in source for part in parts), f"no guard says {text!r}"


def test_the_figures_are_those_of_the_run_directory() -> None:
    known = (ROOT / "docs" / "report.md").read_text("utf-8")
    names = re.findall(r"^\d\. \*\*`(\w+)`\*\*", PAGE, re.M)
    assert "zero_variance_groups" in names
    assert all(f"`{name}`" in known for name in names)
