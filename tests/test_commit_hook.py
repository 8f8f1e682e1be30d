"""The hook that `make dev` installs: a commit that ruff refuses is stopped with the reason."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with the project's settings, an environment and the hook."""
    for name in ("pyproject.toml", ".pre-commit-config.yaml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    run(tmp_path, "git", "init", "-q")
    run(tmp_path, sys.executable, "-m", "pre_commit", "install")
    return tmp_path


def run(folder: Path, *command: str, fails: bool = False) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    environment |= {
        f"GIT_{who}_{what}": "toy@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
    }
    environment |= {"PRE_COMMIT_HOME": str(folder / ".git" / "pre-commit"), "GIT_CONFIG_GLOBAL": os.devnull}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode != 0) is fails, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_what_ruff_refuses_is_not_committed(repository: Path) -> None:
    file = repository / "thing.py"
    for source, said in (
        ('"""A thing."""\n\nimport os\n', "F401"),
        ('"""A thing."""\n\nNAME = \'thing\'\n', "1 file would be reformatted"),
    ):
        file.write_text(source)
        run(repository, "git", "add", "thing.py")
        assert said in run(repository, "git", "commit", "-m", "A thing", fails=True)
    file.write_text('"""A thing."""\n\nNAME = "thing"\n')
    run(repository, "git", "add", "thing.py")
    run(repository, "git", "commit", "-m", "A thing")
    assert run(repository, "git", "log", "--format=%s").strip() == "A thing"


def test_make_dev_installs_it() -> None:
    commands = subprocess.run(["make", "-n", "dev"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert ".venv/bin/pre-commit install" in commands
