"""The cache of `make setup`: an environment comes from it whole, or is built anew."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The script with a cache of its own; what it builds is a real environment with one command instead of the lock."""
    spec = importlib.util.spec_from_file_location("environment", ROOT / "requirements" / "environment.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def build(venv: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
        (venv / "bin" / "where").write_text(f"#!{venv}/bin/python\nimport sys\nprint(sys.prefix)\n")
        (venv / "bin" / "where").chmod(0o755)
        (venv / "lib" / "built").write_text(str(venv))

    monkeypatch.setattr(module, "build", build)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return module


def made(environment: ModuleType, monkeypatch: pytest.MonkeyPatch, venv: Path) -> str:
    """Make an environment, run its command, and return for which path its packages were built."""
    monkeypatch.setattr(sys, "argv", ["environment.py", str(venv)])
    environment.main()
    done = subprocess.run([venv / "bin" / "where"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(venv)
    return (venv / "lib" / "built").read_text()


def test_a_second_clone_gets_its_environment_from_the_first(
    environment: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first, second = tmp_path / "a" / ".venv", tmp_path / "b" / ".venv"
    assert made(environment, monkeypatch, first) == str(first)
    assert made(environment, monkeypatch, second) == str(first)
    assert (second / "lib" / "built").stat().st_ino == (first / "lib" / "built").stat().st_ino
    shutil.rmtree(first)
    assert made(environment, monkeypatch, tmp_path / "c" / ".venv") == str(first)


def test_another_lock_is_another_entry(
    environment: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made(environment, monkeypatch, tmp_path / "a")
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    (tmp_path / "requirements" / "cpu.lock").write_text("attrs==1\n")
    monkeypatch.setattr(environment, "HERE", tmp_path / "requirements")
    assert made(environment, monkeypatch, tmp_path / "b") == str(tmp_path / "b")


def test_an_entry_whose_files_have_changed_is_built_again(
    environment: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made(environment, monkeypatch, tmp_path / "a")
    with (tmp_path / "a" / "bin" / "where").open("a") as script:  # an edit in place: the entry has the same file
        script.write("# a line more\n")
    assert made(environment, monkeypatch, tmp_path / "b") == str(tmp_path / "b")
    assert made(environment, monkeypatch, tmp_path / "c") == str(tmp_path / "b")


def test_an_interrupted_copy_leaves_no_entry_and_no_environment(
    environment: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(source: str, target: str) -> None:
        if Path(source).name == "built":
            raise OSError(28, "No space left on device")
        shutil.copy2(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(environment, "link", full)
        made(environment, monkeypatch, tmp_path / "a")
        assert list(environment.cache().iterdir()) == []
    made(environment, monkeypatch, tmp_path / "b")
    monkeypatch.setattr(environment, "link", full)
    assert made(environment, monkeypatch, tmp_path / "c") == str(tmp_path / "c")


def test_only_the_newest_entries_stay(environment: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    data = tmp_path / "cache" / "agentrig" / "mini-sql"  # task sets keep theirs beside the environments
    data.mkdir(parents=True)
    for number in range(5):
        monkeypatch.setattr(environment, "key", lambda number=number: f"entry{number}")
        made(environment, monkeypatch, tmp_path / str(number))
    assert sorted(entry.name for entry in environment.cache().iterdir()) == ["entry2", "entry3", "entry4"]
    assert data.is_dir()
