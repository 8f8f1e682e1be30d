"""What `agentrig new` refuses: each message names something that works; nothing is overwritten or left half made."""

from __future__ import annotations

import os
import resource
from contextlib import chdir
from pathlib import Path

import pytest
from click.testing import CliRunner
from scaffolds import new

from agentrig.cli.entry import main


def refused(*words: str) -> str:
    """Run a command that must fail; return its message."""
    done = CliRunner().invoke(main, ["new", *words])
    assert done.exit_code == 1, done.output
    assert "Traceback" not in done.output
    return done.stderr


@pytest.fixture(autouse=True)
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, in which commands run."""
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize(
    ("kind", "name", "said"),
    [
        ("reward", "MyReward", "Write my-reward"),
        ("reward", "HTTPJudge2", "Write http-judge2"),
        ("reward", "my_reward", "Write my-reward"),
        ("reward", "my--reward-", "Write my-reward"),
        ("reward", "9-lives", "Write lives"),
        ("reward", "récompense", "Write recompense"),
        ("reward", "奖励", "with a letter first.\n"),
        ("reward", "../escape", "Write escape"),
        ("reward", "a" * 41, f"Write {'a' * 40}"),
        ("reward", "class", "`class` is a keyword of Python. Write another name, for example my-class"),
        ("reward", "match", "`match` is a keyword of Python"),
        ("reward", "json", "`json` is a module of Python's standard library"),
        ("reward", "numpy", "the distribution numpy 2"),
        ("reward", "spider", "a plugin of agentrig-spider 0.2.0.dev0 has that name"),
        ("reward", "spider-exec", "agentrig-spider 0.2.0.dev0 has a reward of that name"),
        ("tasks", "mini-sql", "agentrig-spider 0.2.0.dev0 has a task set of that name"),
        ("agent", "agentrig-mine", 'the package is called "agentrig-NAME" anyway: write mine'),
        ("agent", "agentrig", "write my-agent"),
        ("rewards", "mine", 'there is no kind "rewards". Did you mean "reward"? The kinds are: tasks, agent'),
    ],
)
def test_a_name_that_cannot_be_is_refused_with_one_that_can(kind: str, name: str, said: str, empty: Path) -> None:
    assert said in refused(kind, name)
    assert list(empty.iterdir()) == []


def test_the_suggested_name_is_free(empty: Path) -> None:
    suggested = refused("reward", "spider-exec").split()[-1]
    assert f"agentrig-{suggested} is a package with the reward {suggested}" in new("reward", suggested)


@pytest.mark.parametrize("made", ["folder", "file", "broken link"])
def test_nothing_is_overwritten(made: str, empty: Path) -> None:
    for path in (empty / "agentrig-mine", empty / "mine.py"):
        if made == "folder":
            path.mkdir()
        elif made == "file":
            path.write_text("kept")
        else:
            path.symlink_to("nowhere")
    before = {p.name: os.lstat(p).st_mtime_ns for p in empty.iterdir()}
    assert "agentrig-mine exists already: use another name, or delete it" in refused("reward", "mine")
    assert "mine.py exists already" in refused("reward", "mine", "--here", "mine.py")
    assert {p.name: os.lstat(p).st_mtime_ns for p in empty.iterdir()} == before


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("json.py", "`json` is a module of Python's standard library. Write for example --here my_json.py"),
        ("numpy.py", "the module numpy is installed"),
        ("report.py", "a plugin of agentrig 0.2.0.dev0 has that name"),
        ("mine.txt", "can't be a module of Python. Write for example --here my_mine.py"),
        (".", ". can't be a module of Python. Write for example --here my_plugin.py"),
        ("", "can't be a module of Python. Write for example --here my_plugin.py"),
        ("my-file.py", "Write for example --here my_my_file.py"),
        ("no/mine.py", "there is no folder no"),
    ],
)
def test_a_file_that_cannot_be_is_refused(file: str, said: str, empty: Path) -> None:
    assert said in refused("reward", "mine", "--here", file)
    assert list(empty.iterdir()) == []


@pytest.mark.parametrize("more", [(), ("--here", "mine.py")], ids=["package", "file"])
def test_a_disk_that_is_full_leaves_nothing(more: tuple[str, ...], empty: Path) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8000, limit[1]))  # the licence is longer
    try:
        text = refused("reward", "mine", *more)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert "can't be written: File too large" in text
    assert list(empty.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(empty: Path) -> None:
    with chdir("/proc"):
        assert "can't be written" in refused("reward", "mine")


def test_ctrl_c_leaves_nothing(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, copied = Path.write_text, []

    def interrupted(file: Path, text: str, encoding: str) -> None:
        write(file, text, encoding)
        copied.append([p.name for p in empty.iterdir()])
        if len(copied) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", interrupted)
    assert CliRunner().invoke(main, ["new", "reward", "mine"]).exit_code == 130
    assert len(copied[-1]) == 1, "it was in the middle"
    assert list(empty.iterdir()) == []
