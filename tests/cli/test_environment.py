"""A machine that lacks memory, files, disk space, network or output: one message with the cure, never status 0."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from quick import quick_first

from agentrig.testing.tiny_model import make_tiny_model

PLUGIN = Path(__file__).resolve().parents[1] / "support" / "letters_plugin.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "model"
    make_tiny_model(folder)
    return folder


def training(model: Path, place: Path, *more: str) -> list[str]:
    return [
        "train", "letters", f"--plugin={PLUGIN}", f"algorithm.model={model}", f"run.directory={place}",
        "run.name=run", 'run.block=["report"]', "algorithm.steps=1", "algorithm.tasks_per_step=4",
        "algorithm.validate_every=0", "run.report_tasks=2", "hardware.threads=1", *more,
    ]  # fmt: skip


def agentrig(
    *words: str, limits: Callable[[], None] = lambda: None, stdout: int = subprocess.PIPE, within: Sequence[str] = ()
) -> tuple[int, str]:
    """Run a command in a process of its own with these limits; return its exit status and what stderr got."""
    done = subprocess.run(
        [*within, sys.executable, "-m", "agentrig", *words],
        stdout=stdout,
        stderr=subprocess.PIPE,
        preexec_fn=limits,
        timeout=280,
        check=False,
    )
    return done.returncode, done.stderr.decode()


def limited(kind: int, size: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(kind, (size, size))


@pytest.mark.slow
def test_too_little_address_space(model: Path, tmp_path: Path) -> None:
    """A machine that needs less trains. At lower limits the loader or OpenMP may end the process in their own words."""
    status, said = agentrig(
        *training(model, tmp_path, "algorithm.model=mini"), limits=limited(resource.RLIMIT_AS, 1500 << 20)
    )
    if status == 0:
        return
    assert status == 1 or (status == 127 and said.endswith("thread-local data: ABORT\n")), (
        said
    )  # the loader, at the end
    assert "Traceback" not in said, said
    limit = r"may use 1\.5 GiB of memory \(ulimit -v\)[^\n]*ulimit -v unlimited"
    assert re.search(limit, said), said
    assert "there is no memory" not in said


@pytest.mark.parametrize("command", ["train", pytest.param("eval", marks=pytest.mark.slow)])
@pytest.mark.parametrize("lacks", quick_first(["files", "sizes", "network"], ["files"]))
def test_a_machine_on_which_no_run_can_work(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, lacks: str
) -> None:
    """The run ends before it has a directory; what needs no runners still works."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    words = training(model, tmp_path)
    if command == "eval":
        words = ["eval", "letters", f"--plugin={PLUGIN}", "--limit=1", f"--checkpoint={model}"]
    if lacks == "files":
        limits, within = limited(resource.RLIMIT_NOFILE, 20), []
        said = r"this process may open 20 files at once \(ulimit -n\), and a run needs 256\.\n  .*: ulimit -n 4096 "
    elif lacks == "sizes":
        limits, within = limited(resource.RLIMIT_FSIZE, 0), []
        said = r"no file may be larger than 0 KiB here \(ulimit -f\)\. Allow larger ones: ulimit -f unlimited"
    else:
        limits, within = (lambda: None), ["unshare", "--map-root-user", "--net"]
        if subprocess.run([*within, "true"], capture_output=True, check=False).returncode:
            pytest.skip("no network namespace can be made here")
        said = r"cannot connect to 127\.0\.0\.1 \(Network is unreachable\).*\n  .*: ip link set lo up\n"
    status, told = agentrig(*words, limits=limits, within=within)
    assert status == 1
    assert re.fullmatch(rf"(1 task of split .*\n)?agentrig: [^\n]*{said}[^\n]*\n?", told), told
    assert not (tmp_path / "run").exists()
    assert list(temporary.iterdir()) == []
    assert agentrig("--help", limits=limits, within=within) == (0, "")


def test_a_full_output() -> None:
    with open("/dev/full", "wb") as full:
        status, said = agentrig("plugins", "--json", stdout=full.fileno())
    assert status == 1
    assert (
        said
        == "agentrig: the output cannot be written: No space left on device. Send it elsewhere: agentrig … > FILE\n"
    )


@pytest.mark.parametrize("words", [["plugins"], ["--help"], ["why", "/nowhere"]], ids=" ".join)
def test_a_closed_output(words: list[str]) -> None:
    status, said = agentrig(*words, limits=lambda: os.close(1))
    assert status == 1
    assert said == "agentrig: standard output is closed. Send it to a file, or away: agentrig … > /dev/null\n"


@pytest.mark.slow
def test_a_closed_error_output_ends_no_command(ended_run: Callable[..., Path]) -> None:
    run = ended_run("algorithm.steps=1", "run.validation_tasks=1")
    for words in (["plugins"], ["train", "--resume", str(run), "algorithm.steps=2"]):
        status, said = agentrig(*words, limits=lambda: os.close(2))
        assert (status, said) == (0, "")
    assert json.loads((run / "summary.json").read_text())["steps"] == 2


@pytest.mark.slow
def test_an_unknown_type_of_model(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(model, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "model_type": "qwen99"}))
    for words in (
        training(other, tmp_path),
        ["eval", "letters", f"--plugin={PLUGIN}", "--limit=1", f"--checkpoint={other}"],
    ):
        status, said = agentrig(*words)
        assert status == 1
        assert "Traceback" not in said, said
        assert "config.json has the model_type qwen99, which transformers" in said
        assert "pip install -U transformers" in said
        assert "--resume" not in said


def test_a_current_directory_that_was_deleted(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()

    def limits() -> None:
        os.chdir(gone)
        gone.rmdir()

    status, said = agentrig("plugins", limits=limits)
    assert (status, said) == (1, "agentrig: the current directory was deleted. Change to another one: cd DIR\n")
