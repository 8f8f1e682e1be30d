"""AdamW's moments in host memory: the same weights, bit for bit, and the same state."""

from __future__ import annotations

import copy

import attrs
import pytest
import torch
from agentrig_grpo import host_moments
from agentrig_grpo.config import GrpoConfig
from agentrig_grpo.host_moments import HostAdamW
from agentrig_grpo.learner import Learner
from agentrig_grpo.optimizers import optimizer_bytes
from samples import samples_of

from agentrig.audit.sketch import Sketch
from agentrig.errors import ConfigError
from agentrig.plan import resolve


def learner_of(model, moments, dtype="float32", **settings):
    config = GrpoConfig(**{"lr": 1e-3, "weight_decay": 0.1, "warmup_steps": 3, "moments": moments, **settings})
    return Learner(model, config, dtype=dtype, seed=0)


WAYS = {
    "all weights": {},
    "clipped": {"max_grad_norm": 0.01},
    "several updates": {"mini_batches": 2, "ppo_epochs": 2},
    "bf16": {"dtype": "bfloat16"},
    "adapters": {"lora_rank": 4},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("part", [1 << 24, 1024])
def test_moments_in_host_memory_give_the_same_weights_bit_for_bit(make_model, monkeypatch, way, part) -> None:
    monkeypatch.setattr(host_moments, "PART", part)
    device, host = (learner_of(make_model(), where, **WAYS[way]) for where in ("device", "host"))
    assert isinstance(host.optimizer, HostAdamW)
    assert type(device.optimizer) is torch.optim.AdamW
    start = host.fingerprint()
    for step in range(1, 6):
        ours, theirs = (learner.update(samples_of(step), step=step) for learner in (host, device))
        assert ours["weight_change"] == pytest.approx(theirs["weight_change"], rel=1e-6)
        assert ours["weight_change"] > 0
        assert host.fingerprint() == device.fingerprint() != start
    assert len(list(host_moments._parts(list(host.trained.values())))) > (1 if part == 1024 else 0)
    for a, b in zip(host.trained.values(), device.trained.values(), strict=True):
        for name in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(host.optimizer.state[a][name], device.optimizer.state[b][name])
    if way == "clipped":
        assert theirs["grad_norm"] > 0.01


def test_parameters_without_a_gradient_are_left_alone(monkeypatch) -> None:
    monkeypatch.setattr(host_moments, "PART", 8)
    torch.manual_seed(0)
    start = [torch.randn(3, 5), torch.randn(7), torch.randn(2, 11)]
    optimizers = []
    for kind, more in ((torch.optim.AdamW, {"fused": True}), (HostAdamW, {})):
        parameters = [torch.nn.Parameter(t.clone()) for t in start]
        made = kind(parameters, lr=0.1, betas=(0.9, 0.95), weight_decay=0.0, **more)
        for number in range(4):
            for i, p in enumerate(parameters):
                p.grad = None if i == 1 or (i == 2 and number % 2) else torch.full_like(p, 0.3 * number + i)
            parameters[0].grad = parameters[0].grad.t().contiguous().t()  # other strides than the weight
            made.step()
        optimizers.append((parameters, made))
    for a, b in zip(optimizers[0][0], optimizers[1][0], strict=True):
        assert torch.equal(a, b)
    assert torch.equal(optimizers[1][0][1], start[1])


@pytest.mark.parametrize(("first", "second"), [("host", "host"), ("device", "host"), ("host", "device")])
def test_a_run_is_resumed_with_its_moments_wherever_they_were(make_model, tmp_path, first, second) -> None:
    whole, begun = learner_of(make_model(), "device"), learner_of(make_model(), first)
    for step in (1, 2):
        whole.update(samples_of(step), step=step)
        begun.update(samples_of(step), step=step)
    torch.save(begun.state(), tmp_path / "state.pt")
    resumed = learner_of(make_model(seed=4), second)
    resumed.load_state(torch.load(tmp_path / "state.pt", weights_only=True))
    for step in (3, 4):
        whole.update(samples_of(step), step=step)
        resumed.update(samples_of(step), step=step)
    assert resumed.fingerprint() == whole.fingerprint()


def test_a_state_of_other_shapes_is_no_state_of_this_model(make_model) -> None:
    learner = learner_of(make_model(), "host")
    learner.update(samples_of(1), step=1)
    state = copy.deepcopy(learner.optimizer.state_dict())
    state["state"][0]["exp_avg"] = torch.zeros(3)
    with pytest.raises(RuntimeError, match="size"):
        learner.optimizer.load_state_dict(state)


def test_the_audit_reads_the_moments(make_model) -> None:
    taken = []
    for where in ("device", "host"):
        learner = learner_of(make_model(), where)
        learner.update(samples_of(1), step=1)
        sketch = Sketch(2)
        learner.update(samples_of(2), step=2, sketch=sketch)
        taken.append(sketch.updates)
    assert taken[0] == taken[1]
    assert all(any(seen["squares"]) for seen in taken[1][0]["tensors"].values() if seen["means"] is not None)


def test_the_device_holds_places_for_parts_only(make_model) -> None:
    tensors = [torch.empty(1 << 20, device="meta")] * 64
    assert optimizer_bytes(tensors, "adamw") == 8 << 26
    learner = learner_of(make_model(), "host")
    learner.update(samples_of(1), step=1)
    held = sum(t.numel() * t.element_size() for place in learner.optimizer._places for t in place)
    assert held == 3 * 2 * 4 * min(host_moments.PART, sum(t.numel() for t in learner.trained.values()))


def test_moments_in_8_bits_stay_on_the_device() -> None:
    with pytest.raises(ValueError, match='moments = "host" is for optimizer = "adamw"'):
        attrs.evolve(GrpoConfig(moments="host"), optimizer="adamw8bit")
    with pytest.raises(ConfigError, match="Leave one of them out"):
        resolve("mini", overrides=["algorithm.moments=host", "algorithm.optimizer=adamw8bit"])
