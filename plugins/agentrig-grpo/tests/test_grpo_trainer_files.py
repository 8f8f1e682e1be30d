from __future__ import annotations

import pytest
import torch
from agentrig_grpo import trainer_files
from agentrig_grpo.config import GrpoConfig
from agentrig_grpo.learner import Learner

from agentrig.errors import AgentrigError, CheckpointDamaged


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
