"""Tutorials that start from an empty folder, and the page of the laptop: executed, with wheels of this repository."""

from __future__ import annotations

from pathlib import Path

import pytest
from pages import ROOT, Block, blocks
from scaffolds import Environment, new
from shells import shell, wheels

PUBLISH, AGENT, REWARD, DOMAIN = (
    ROOT / "docs" / "tutorials" / f"{name}.md"
    for name in ("publish-it", "your-own-agent", "your-own-reward", "your-own-domain")
)
LAPTOP = ROOT / "docs" / "how-to" / "laptop.md"

FEW = (
    *("algorithm.steps=2", "algorithm.tasks_per_step=8", "algorithm.group_size=4"),
    *("run.validation_tasks=8", "run.report_tasks=16"),
)
"""After every `agentrig train` that is executed here: the page's command takes minutes."""

SHORT = ("--no-measure",)
"""After every `agentrig warmup`."""


def shown(page: Path) -> list[Block]:
    return [b for b in blocks() if b.page == page]


@pytest.mark.parametrize("page", [PUBLISH, AGENT, REWARD, DOMAIN], ids=lambda p: p.stem)
def test_a_page_shows_what_agentrig_new_prints(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, text, *_ = shown(page)
    program, command, *words = first.text.split()
    assert (program, command) == ("agentrig", "new")
    assert new(words[0], words[1], *words[2:]) == text.text


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return wheels(tmp_path_factory.mktemp("reader"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", [PUBLISH, AGENT, REWARD, DOMAIN], ids=lambda p: p.stem)
def test_a_tutorial_works(page: Path, installed: Environment) -> None:
    reader = shell(installed, page.stem, train=() if page == PUBLISH else FEW)
    where = reader.run("python -c 'import agentrig, agentrig_grpo; print(agentrig.__file__, agentrig_grpo.__file__)'")
    assert all(path.startswith(str(installed.home)) for path in where.split()), "the wheels are used"
    reader.follow(shown(page))
    if page == PUBLISH:
        assert sorted(p.suffix for p in (reader.folder / "dist").iterdir()) == [".gz", ".whl"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_laptop_page_works(installed: Environment) -> None:
    """From labels to training by reward, in few steps; the two example domains too. A shorter warm-up earns nothing."""
    reader = shell(installed, LAPTOP.stem, train=FEW, warmup=SHORT)
    (reader.folder / "examples").symlink_to(ROOT / "examples")
    page = [b for b in shown(LAPTOP) if b.is_shell or "@hookimpl" in b.text]
    reader.follow(page)
    assert len(list((reader.folder / "runs").glob("*/summary.json"))) == sum(
        b.text.count("agentrig train") for b in page
    )
