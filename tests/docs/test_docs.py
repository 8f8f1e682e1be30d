"""Every hook has a page and a contract, every linked page exists, and what `.ci/run` runs."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from agentrig.plugins import hookspecs

ROOT = Path(__file__).resolve().parents[2]


PAGES = sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("README*.md"), *ROOT.glob("plugins/*/README.md")])
HOOKS = [name for name in dir(hookspecs) if name.startswith(("register_", "on_"))]


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_has_a_page_that_shows_it(hook: str) -> None:
    pages = [p for p in ROOT.glob("docs/*.md") if f"def {hook}(" in p.read_text() or f"`{hook}(" in p.read_text()]
    assert pages, f"no page under docs/ shows {hook}"


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_states_its_contract(hook: str) -> None:
    """What it returns; when, and in which process and thread, it is called; what happens when it raises."""
    sections = dict(re.findall(r"^    (\w[\w ]+):\n((?:        .+\n)+)", getattr(hookspecs, hook).__doc__, re.M))
    assert list(sections) == ["Returns", "Called", "If it raises", "Example"]
    assert f"def {hook}(" in getattr(hookspecs, hook).__doc__
    assert re.search(r"iterable|Nothing", sections["Returns"])
    assert "process" in sections["Called"]
    assert "thread" in sections["Called"]
    assert re.search(r"fails to load|The run goes on", sections["If it raises"])


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_pages_that_are_linked_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_python_versions_are_stated_once_and_are_those_of_the_distribution() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        supported = SpecifierSet(tomllib.load(file)["project"]["requires-python"])
    wanted = " or ".join(v for v in (f"3.{minor}" for minor in range(30)) if v in supported)
    stated = {
        str(page.relative_to(ROOT)): found
        for page in (*PAGES, ROOT / "CONTRIBUTING.md")
        if (found := re.findall(r"Python (3\.\d+ or 3\.\d+)", page.read_text("utf-8")))
    }
    assert stated == {"docs/install.md": [wanted]}


@pytest.mark.parametrize("page", ["README.md", "README.zh.md", "docs/index.md"])
def test_the_first_screen_has_what_a_newcomer_looks_for(page: str) -> None:
    """One sentence, the picture of the page, one question before and after, and the commands train, watch and why."""
    screen = "\n".join((ROOT / page).read_text("utf-8").splitlines()[:24])
    assert re.search(r"^\*\*.*agentrig", screen.split("\n\n")[1]), "what you get, in bold"
    assert re.search(r"^!\[.+\]\((docs/)?images/watch-run\.png\)$", screen, re.M)
    assert len(re.findall(r"^\| [^|]+ \| `SELECT .+` \|$", screen, re.M)) == 2
    assert re.findall(r"^agentrig (\w+)", screen, re.M) == ["train", "watch", "why"]
    assert not re.search(r"make test|src/|tests/|triplet|adapter", screen)


@pytest.mark.parametrize(("page", "terms"), [("README.md", ["adapter"]), ("docs/index.md", ["adapter", "triplet"])])
def test_a_term_is_explained_where_it_is_first_used(page: str, terms: list[str]) -> None:
    text = (ROOT / page).read_text("utf-8")
    assert [term for term in terms if not text[: text.index(term)].endswith("**")] == []


def test_ci_runs_lint_and_the_readmes_test_command() -> None:
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    made = {word for line in lines if line.startswith("make ") for word in re.findall(r"(?<= )[a-z]+(?= |$)", line)}
    makefile = (ROOT / "Makefile").read_text()
    assert made == {"setup", "lint", "test"}  # tests/docs/test_site.py builds the site
    assert made <= set(re.findall(r"^([a-z]+):", makefile, re.M))
    assert "\nmake test " in (ROOT / "README.md").read_text()


def test_the_benchmarks_page_names_every_record() -> None:
    folder = ROOT / "tests" / "benchmarks"
    named = set(re.findall(r"`([\w/]+\.md)`", (ROOT / "docs" / "benchmarks.md").read_text()))
    assert named == {str(f.relative_to(folder)) for f in folder.rglob("*.md") if f.name != "README.md"}


def test_every_page_that_a_file_names_exists() -> None:
    folders = ("src", "plugins", "examples", "tests", "docs")
    files = [*ROOT.glob("*.*"), *(file for folder in folders for file in (ROOT / folder).rglob("*.*"))]
    named = {
        (file, page)
        for file in files
        if file.suffix in (".py", ".toml", ".md", ".sh") and "node_modules" not in file.parts
        for page in re.findall(r"(?<![\w/.])docs/[\w/.-]+\.md\b", file.read_text("utf-8"))
    }
    assert len(named) > 50
    assert sorted(f"{file.relative_to(ROOT)} names {page}" for file, page in named if not (ROOT / page).exists()) == []
