"""What is written is the learner as it was when it was copied, however far it has trained on meanwhile."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from agentrig_grpo.config import GrpoConfig
from agentrig_grpo.host_copy import HostCopy
from agentrig_grpo.learner import Learner, TrainSample

KINDS = {
    "all weights": ("float32", {}),
    "16-bit copies": ("bfloat16", {}),
    "adapters": ("float32", {"lora_rank": 4}),
    "16-bit adapters": ("bfloat16", {"lora_rank": 4}),
    "a reference": ("float32", {"kl_loss_coef": 0.1}),
    "adapters and a reference": ("float32", {"lora_rank": 4, "kl_loss_coef": 0.1}),
    "8-bit moments": ("float32", {"optimizer": "adamw8bit"}),
    "the best weights": ("float32", {"final": "best"}),
}


def samples_of(seed):
    tokens = torch.Generator().manual_seed(seed)
    return [
        TrainSample(
            prompt_ids=[5, 7, 9],
            response_ids=torch.randint(5, 300, (6,), generator=tokens).tolist(),
            logprobs=[-5.0] * 6,
            advantage=(-1.0) ** i,
            rollout=i,
            group=f"g{i // 4}",
        )
        for i in range(8)
    ]


@pytest.fixture
def trained(make_model, tokenizer, request):
    """A learner of each kind after two updates, and its tokenizer."""
    dtype, settings = KINDS[request.param]
    if "optimizer" in settings:
        pytest.importorskip("bitsandbytes")
    config = GrpoConfig(lr=1e-2, tokens_per_batch=64, mini_batches=2, **settings)
    learner = Learner(make_model(), config, dtype=dtype, seed=0, tokenizer=tokenizer)
    for step in range(2):
        learner.update(samples_of(step), step=step)
        if settings.get("final") == "best" and not step:
            learner.keep()
    return learner


def files_of(folder):
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


def learned(folder):
    return torch.load(folder / "trainer" / "learner.pt", weights_only=True)


def flat(value, name=""):
    """Every tensor and number of a state by its place in it."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {place: each for key, inner in items for place, each in flat(inner, f"{name}.{key}").items()}
    return {name: value}


def assert_equal(first, second):
    one, two = flat(first), flat(second)
    assert one.keys() == two.keys()
    for name, value in one.items():
        same = torch.equal(value, two[name]) if isinstance(value, torch.Tensor) else value == two[name]
        assert same, name


@pytest.mark.parametrize("trained", KINDS, indirect=True)
def test_a_copy_is_written_as_the_learner_was_although_it_trains_on(trained, tmp_path):
    size = trained.plan_saving()
    at_once, later, again = tmp_path / "at-once", tmp_path / "later", tmp_path / "again"
    for folder in (at_once, later, again):
        folder.mkdir()
    trained.save(at_once)
    before, write = trained.fingerprint(), trained.copied()
    trained.keep()
    trained.update(samples_of(2), step=2)
    assert trained.fingerprint() != before
    write(later)

    assert files_of(later) == files_of(at_once)
    assert (later / "model.safetensors").read_bytes() == (at_once / "model.safetensors").read_bytes()
    assert_equal(learned(at_once), learned(later))
    assert (later / "config.json").read_text() == (at_once / "config.json").read_text()
    written = sum(f.stat().st_size for f in later.rglob("*") if f.suffix in (".pt", ".safetensors"))
    assert size == pytest.approx(written, rel=0.25), "the estimate of what a checkpoint takes"

    trained.copied()(again)  # the next copy is the learner as it is now
    assert (again / "model.safetensors").read_bytes() != (later / "model.safetensors").read_bytes()
    trained.load(later)
    assert trained.fingerprint() == before


@pytest.mark.parametrize("trained", ["all weights", "adapters"], indirect=True)
def test_without_the_copy_the_next_update_is_in_the_file(trained, tmp_path, monkeypatch):
    """The test above can fail: it does if the state is not copied."""
    monkeypatch.setattr(HostCopy, "take", lambda self, state, *, frozen=None: (state, dict(frozen or {})))
    before, write = copy.deepcopy(trained.state()["trained"]), trained.copied()
    trained.update(samples_of(2), step=2)
    write(tmp_path)
    after = learned(tmp_path)["trained"]
    assert any(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("trained", ["all weights"], indirect=True)
def test_without_memory_for_a_copy_the_run_waits_and_says_so(trained, caplog):
    trained._host_memory = lambda: 1000
    with caplog.at_level(logging.WARNING):
        trained.plan_saving()
    assert "written while the run waits: a copy of what it holds needs" in caplog.text
    assert trained.copied() is None


def test_a_tensor_that_comes_twice_is_copied_once():
    tensor = torch.arange(6.0)
    state = {"a": tensor, "b": [tensor, 3], "none": torch.empty(0), "view": tensor[1:]}
    made, frozen = HostCopy(torch.device("cpu")).take(state, frozen={"f": tensor})
    assert made["a"] is made["b"][0]
    assert made["a"] is not tensor
    assert frozen["f"].data_ptr() == tensor.data_ptr(), "what never changes is not copied on a CPU"
    tensor.zero_()
    assert (made["a"].tolist(), made["view"].tolist()) == ([0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5])
    assert (made["b"][1], made["none"].numel()) == (3, 0)
