"""The docs can't lie: every hook has its page, every Python snippet compiles, every command is one that there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agentrig import hookspecs
from agentrig.cli import main

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("docs/**/*.md"), ROOT / "README.md", *ROOT.glob("plugins/*/README.md")])
HOOKS = [name for name in dir(hookspecs) if name.startswith(("register_", "on_"))]


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_has_a_page_that_shows_it(hook: str) -> None:
    pages = [p for p in ROOT.glob("docs/*.md") if f"def {hook}(" in p.read_text() or f"`{hook}(" in p.read_text()]
    assert pages, f"no page under docs/ shows {hook}"


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_has_an_example_in_its_docstring(hook: str) -> None:
    text = getattr(hookspecs, hook).__doc__
    assert "Example:" in text
    assert f"def {hook}(" in text


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_snippets_compile(page: Path) -> None:
    for snippet in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.S | re.M):
        compile(snippet, str(page), "exec")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_exist(page: Path) -> None:
    for block in re.findall(r"^```(?:sh|bash|console)?\n(.*?)^```", page.read_text(), re.S | re.M):
        for words in re.findall(r"^(?:[A-Z_]+=\S+ )*agentrig ([a-z]+)(?: |$)", block, re.M):
            assert main.get_command(None, words) is not None, f"{page} shows `agentrig {words}`"  # type: ignore[arg-type]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_pages_that_are_linked_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
