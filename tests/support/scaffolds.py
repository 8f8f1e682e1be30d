"""Components made by `agentrig new`, as wheels in a virtual environment of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterable
from pathlib import Path

import attrs
from click.testing import CliRunner

from agentrig.cli.entry import main


@attrs.frozen
class Environment:
    """A virtual environment, and the folder in which commands run."""

    home: Path
    folder: Path

    @property
    def python(self) -> str:
        return str(self.home / "bin" / "python")

    def run(self, *words: str, cwd: Path | None = None, **variables: str) -> str:
        """Run a module of Python's to its end; return what it printed."""
        done = subprocess.run(
            [self.python, "-m", *words],
            cwd=cwd or self.folder,
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "AGENTRIG_CACHE": str(self.folder / "cache"), **variables},
            timeout=280,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def install(self, wheels: Iterable[Path]) -> None:
        """Install wheels, without what they require."""
        command = [sys.executable, "-m", "uv", "pip", "install", "-q", "--offline", "--no-deps"]
        subprocess.run([*command, "--python", self.python, *map(str, wheels)], check=True)


def new(kind: str, name: str, *more: str) -> str:
    """Run `agentrig new` in the current folder; return what it printed."""
    done = CliRunner().invoke(main, ["new", kind, name, *more])
    assert done.exit_code == 0, done.output
    return done.output


def environment(folder: Path) -> Environment:
    """Make a virtual environment in a folder, which also finds what is installed here."""
    home = folder / "venv"
    venv.create(home, with_pip=False)
    site = next((home / "lib").glob("python*/site-packages"))
    # A .pth line runs the .pth files there too, which is how the editable installs are found.
    (site / "agentrig-here.pth").write_text(f"import site; site.addsitedir({sysconfig.get_paths()['purelib']!r})\n")
    return Environment(home, folder)


def build(source: Path, target: Path) -> None:
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", str(target), str(source)]
    subprocess.run(command, check=True, capture_output=True)
