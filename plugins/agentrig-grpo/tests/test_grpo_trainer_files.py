from __future__ import annotations

import json

import pytest
import torch
from agentrig_grpo import trainer_files
from agentrig_grpo.config import GrpoConfig
from agentrig_grpo.learner import Learner
from agentrig_grpo.trainer_files import Best

from agentrig.errors import AgentrigError, CheckpointDamaged


@pytest.fixture
def saved(make_model, tmp_path):
    learner = Learner(make_model(), GrpoConfig(), dtype="float32", seed=0)
    directory = tmp_path / "step-00003"
    directory.mkdir()
    best = Best(accuracy=0.5, step=2, trained={"w": torch.ones(2)})
    trainer_files.write(directory, learner=learner.state(), best=best, step=3, seed=0)
    return directory


def test_reading_gives_what_was_written(saved):
    learner, best = trainer_files.read(saved)
    assert (learner["updates"], best.accuracy, best.step) == (0, 0.5, 2)
    assert torch.equal(best.trained["w"], torch.ones(2))
    assert json.loads((saved / "trainer" / "state.json").read_text()) == {"format": 1, "step": 3, "seed": 0}


@pytest.mark.parametrize("name", ["learner.pt", "best.pt", "state.json"])
@pytest.mark.parametrize("damage", ["missing", "empty", "cut off", "other", "a directory"])
def test_a_damaged_file_is_named(saved, name, damage):
    file = saved / "trainer" / name
    content = file.read_bytes()
    file.unlink()
    if damage == "cut off":
        file.write_bytes(content[: len(content) // 2])
    elif damage == "other":
        file.write_bytes(b"\x00\x01\xfe" * 50)
    elif damage == "empty":
        file.touch()
    elif damage == "a directory":
        file.mkdir()
    with pytest.raises(CheckpointDamaged) as found:
        trainer_files.read(saved)
    assert str(file) in str(found.value)
    assert found.value.checkpoint == saved


def test_older_files_are_read(saved):
    (saved / "trainer" / "state.json").write_text('{"step": 3, "seed": 0}')
    torch.save({"accuracy": 0.25, "step": 1}, saved / "trainer" / "best.pt")
    _, best = trainer_files.read(saved)
    assert (best.accuracy, best.step, best.trained) == (0.25, 1, {})


def test_newer_files_are_refused_with_a_message(saved):
    trainer = saved / "trainer"
    state, learner = torch.load(trainer / "learner.pt", weights_only=True), trainer / "learner.pt"
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
    torch.save({"accuracy": 0.25, "ema": {}}, trainer / "best.pt")
    torch.save({**state, "updates": 0}, learner)
    with pytest.raises(AgentrigError, match=r"best\.pt holds ema, unknown"):
        trainer_files.read(saved)
    torch.save({"accuracy": float("nan")}, trainer / "best.pt")
    with pytest.raises(CheckpointDamaged, match=r"best\.pt holds Best\(accuracy=nan"):
        trainer_files.read(saved)
    (trainer / "state.json").write_text('{"format": 2}')
    with pytest.raises(AgentrigError, match=r"has format 2, and this agentrig-grpo knows up to 1.*pip install -U"):
        trainer_files.read(saved)
