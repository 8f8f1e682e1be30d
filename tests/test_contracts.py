"""The layers of the code are kept: `lint-imports` reads them from pyproject.toml."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def lint(root: Path) -> subprocess.CompletedProcess[str]:
    """Check the contracts over the sources below a copy of the repository."""
    sources = [root / "src", *sorted((root / "plugins").glob("*/src"))]
    return subprocess.run(
        [sys.executable, "-P", "-c", "from importlinter.cli import lint_imports_command as main; main()", "--no-cache"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sources)), "NO_COLOR": "1"},
        capture_output=True,
        text=True,
    )


def test_the_contracts_hold() -> None:
    done = lint(ROOT)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("file", "line", "said"),
    [
        ("tasks.py", "from agentrig.run import session", "agentrig.tasks is not allowed to import agentrig.run"),
        (
            "errors.py",
            "def late() -> None:\n    from agentrig.plan import resolve",
            "agentrig.errors is not allowed to import agentrig.plan",
        ),
        (
            "rollouts.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from agentrig.observers import RunEnd",
            "agentrig.rollouts is not allowed to import agentrig.observers",
        ),
        ("hardware/versions.py", "from agentrig.hardware import cpu", "No cycles are allowed in agentrig.hardware"),
        ("runners/jobs.py", "import ray", "agentrig is not allowed to import ray"),
    ],
    ids=["up", "inside a function", "for types only", "circle in a folder", "ray"],
)
def test_a_wrong_import_is_seen(tmp_path: Path, file: str, line: str, said: str) -> None:
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for plugin in (ROOT / "plugins").iterdir():
        if (plugin / "src").is_dir():
            shutil.copytree(
                plugin / "src",
                tmp_path / "plugins" / plugin.name / "src",
                ignore=shutil.ignore_patterns("__pycache__", "*.safetensors", "*.json"),
            )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / "src" / "agentrig" / file).open("a", encoding="utf-8") as source:
        source.write(f"\n{line}\n")
    done = lint(tmp_path)
    assert done.returncode != 0
    assert said in " ".join(done.stdout.split())
