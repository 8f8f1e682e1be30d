"""A shell in an empty folder and a new environment with wheels of this repository: what a reader of a page has."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import attrs
from pages import ROOT, Block
from scaffolds import Environment, build, environment

WHEELS = ("agentrig-agent-match", "agentrig-forest", "agentrig-grpo", "agentrig-langgraph-sql", "agentrig-spider")
"""The plugins of `mini`, and what they require."""

NUMBERS = re.compile(r" *\d+\.\d+ ?m?s\b|\+\d+\.\d+|\bro-[0-9a-f]+|\d+(?=%)|\[ *\d+%\]")
"""What differs from run to run."""


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
            cwd=self.folder, env={**os.environ, **variables}, capture_output=True, text=True, timeout=800, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{script}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        self.folder = Path(place.read_text().strip())
        return done.stdout

    def follow(self, page: Sequence[Block]) -> None:
        """Do what a page says: run its commands, save its files, run its scripts, and compare what it shows."""
        printed = ""
        for block in page:
            first, _, content = block.text.partition("\n")
            if block.is_shell:
                printed = self.run(block.text)
            elif block.language == "python" and (named := re.fullmatch(r"# ([\w/]+\.py)", first)):
                (self.folder / named[1]).write_text(content)
            elif block.language == "python":
                (self.folder / "script.py").write_text(block.text)
                self.run("python script.py")
            elif block.language == "text":
                for line in block.text.splitlines():  # a page may leave lines out
                    assert NUMBERS.sub("…", line) in NUMBERS.sub("…", printed), (block.id, line, printed)


def wheels(folder: Path) -> Environment:
    for source in (ROOT, *(ROOT / "plugins" / name for name in WHEELS)):
        build(source, folder / "wheels")
    made = environment(folder)
    made.install(sorted((folder / "wheels").glob("*.whl")))
    return made


def shell(made: Environment, name: str, *, train: Sequence[str] = (), warmup: Sequence[str] = ()) -> Shell:
    """Return a shell in an empty folder of that name.

    Args:
        made: Its environment; `pip` there uses no network.
        name: The folder's.
        train: Words after every `agentrig train`, to make it short.
        warmup: Words after every `agentrig warmup`.
    """
    tools = made.folder / "tools"
    tools.mkdir(exist_ok=True)
    offline = "--quiet --offline --no-deps --no-build-isolation"
    more = "".join(
        f'if [ "$1" = {command} ]; then set -- "$@" {" ".join(words)}; fi\n'
        for command, words in (("train", train), ("warmup", warmup))
    )
    scripts = {
        "agentrig": f'{more}exec {made.python} -m agentrig "$@"',
        "pip": f'shift\nexec {made.python} -m uv pip install --python {made.python} {offline} "$@"',
        "pytest": f'exec {made.python} -m pytest "$@"',
        "python": f'if [ "$2" = build ]; then set -- "$@" --no-isolation; fi\nexec {made.python} "$@"',
    }
    for program, text in scripts.items():
        (tools / program).write_text(f"#!/bin/sh\n{text}\n")
        (tools / program).chmod(0o755)
    folder = made.folder / name
    folder.mkdir()
    return Shell(made, folder)
