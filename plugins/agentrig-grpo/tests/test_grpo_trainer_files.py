from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from agentrig_grpo import trainer_files
from agentrig_grpo.config import GrpoConfig
from agentrig_grpo.learner import Learner

from agentrig.errors import AgentrigError, CheckpointDamaged, RunFileError
from agentrig.run.damage import writing


@pytest.fixture
def saved(make_model, tmp_path):
    learner = Learner(make_model(), GrpoConfig(), dtype="float32", seed=0)
    learner.keep()
    directory = tmp_path / "step-00003"
    directory.mkdir()
    trainer_files.write(directory, learner.state())
    return directory


def test_reading_gives_what_was_written(saved):
    state = trainer_files.read(saved)
    assert state["updates"] == 0
    assert state["kept"].keys() == state["trained"].keys()
    assert all(torch.equal(state["kept"][name], tensor) for name, tensor in state["trained"].items())


def test_newer_files_are_refused_with_a_message(saved):
    learner = saved / "trainer" / "learner.pt"
    state = torch.load(learner, weights_only=True)
    torch.save({**state, "momentum_queue": []}, learner)
    with pytest.raises(AgentrigError, match=r"learner\.pt holds momentum_queue, unknown .* a newer version wrote the"):
        trainer_files.read(saved)
    del state["updates"]
    torch.save(state, learner)
    with pytest.raises(CheckpointDamaged, match=r"learner\.pt lacks updates"):
        trainer_files.read(saved)
    torch.save([1, 2], learner)
    with pytest.raises(CheckpointDamaged, match=r"learner\.pt is cut off .*it holds a list"):
        trainer_files.read(saved)


def test_a_file_that_cannot_be_written_whole_says_why(tmp_path: Path) -> None:
    code = (
        "import resource, sys, torch\nfrom pathlib import Path\nfrom agentrig.errors import exhausted\n"
        "from agentrig_grpo import trainer_files\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "try:\n    trainer_files.write(Path(sys.argv[1]), {'trained': torch.zeros(1 << 20)})\n"
        "except Exception as error:\n    print(repr(error.__context__), exhausted(error))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert "OSError(27, 'File too large') no file may be larger than 1024 KiB here (ulimit -f)" in done.stdout


def test_a_disk_that_fills_up_is_named(small_disk: Path) -> None:
    file = small_disk / trainer_files.FILE
    with pytest.raises(RunFileError, match=r"learner\.pt cannot be written: the disk is full"), writing(file):
        trainer_files.write(small_disk, {"trained": torch.zeros(1 << 21)})
