"""The tutorial docs/tutorials/publish-it.md, executed from an empty folder with wheels built from this repository."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import attrs
import pytest
from pages import ROOT, Block, blocks
from scaffolds import Environment, build, environment, new

PAGE = ROOT / "docs" / "tutorials" / "publish-it.md"
WHEELS = ("agentrig-agent-match", "agentrig-grpo", "agentrig-langgraph-sql", "agentrig-spider")
"""The plugins of `mini`."""

NUMBERS = re.compile(r"\d+\.\d+ ?m?s\b|\+\d+\.\d+|\bro-[0-9a-f]+|\d+(?=%)|\[ *\d+%\]")
"""What differs from run to run."""


def shown() -> list[Block]:
    return [b for b in blocks() if b.page == PAGE]


def test_the_page_shows_what_agentrig_new_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, text, *_ = shown()
    assert first.text == "agentrig new reward brief-sql\n"
    assert new("reward", "brief-sql") == text.text


@attrs.define
class Shell:
    """A shell whose folder stays from block to block."""

    made: Environment
    folder: Path

    def run(self, script: str) -> str:
        """Run a block; return what it printed to stdout."""
        variables = {
            "PATH": f"{self.made.folder / 'tools'}{os.pathsep}{self.made.home / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "AGENTRIG_CACHE": str(self.made.folder / "cache"),
            "OMP_NUM_THREADS": "1",
            "PYTEST_ADDOPTS": "-p no:cacheprovider",
        }
        place = self.made.folder / "place"
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", f"{script}\npwd > {place}"],
            cwd=self.folder, env={**os.environ, **variables}, capture_output=True, text=True, timeout=280, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{script}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        self.folder = Path(place.read_text().strip())
        return done.stdout


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    """A new environment with the wheels, and `pip` that uses no network."""
    for source in (ROOT, *(ROOT / "plugins" / name for name in WHEELS)):
        build(source, tmp_path / "wheels")
    made = environment(tmp_path)
    made.install(sorted((tmp_path / "wheels").glob("*.whl")))
    tools = tmp_path / "tools"
    tools.mkdir()
    offline = "--quiet --offline --no-deps --no-build-isolation"
    scripts = {
        "pip": f'shift\nexec {made.python} -m uv pip install --python {made.python} {offline} "$@"',
        "pytest": f'exec {made.python} -m pytest "$@"',
        "python": f'if [ "$2" = build ]; then set -- "$@" --no-isolation; fi\nexec {made.python} "$@"',
    }
    for name, text in scripts.items():
        (tools / name).write_text(f"#!/bin/sh\n{text}\n")
        (tools / name).chmod(0o755)
    (tmp_path / "empty").mkdir()
    return Shell(made, tmp_path / "empty")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_tutorial_works(shell: Shell) -> None:
    where = shell.run("python -c 'import agentrig, agentrig_grpo; print(agentrig.__file__, agentrig_grpo.__file__)'")
    assert all(path.startswith(str(shell.made.home)) for path in where.split()), "the wheels are used"
    printed = ""
    for block in shown():
        if block.language == "bash":
            printed = shell.run(block.text)
        elif block.language == "python":
            first, _, content = block.text.partition("\n")
            (shell.folder / first.removeprefix("# ")).write_text(content)
        else:
            for line in block.text.splitlines():  # a page may leave lines out
                assert NUMBERS.sub("…", line) in NUMBERS.sub("…", printed), (block.id, line, printed)
    assert [p.suffix for p in sorted((shell.folder / "dist").iterdir())] == [".gz", ".whl"]
