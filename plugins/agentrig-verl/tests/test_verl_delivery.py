"""verl's proof of delivery, as far as it needs no GPU: digests of joined layers, the actor's scores, what was sent."""

from __future__ import annotations

import importlib.util

import pytest
import torch

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="verl is not installed; see docs/gpu.md"),
    pytest.mark.filterwarnings("ignore"),  # of verl's own making
]


def model(**more):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 60, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, **more)).eval()


def as_vllm(state):
    """Return weights as vLLM holds them: joined layers, and a vocabulary that is padded to 64."""
    from agentrig_verl.extension import FUSED

    found = dict(state)
    for fused, parts in FUSED.items():
        for name in [name for name in state if f".{parts[0]}." in name]:
            found[name.replace(parts[0], fused)] = torch.cat([found.pop(name.replace(parts[0], p)) for p in parts])
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        found[name] = torch.cat([state[name], torch.zeros(4, 16, dtype=state[name].dtype)])
    return found


def test_joined_layers_have_the_digests_of_their_parts():
    from agentrig_verl.actor import digested
    from agentrig_verl.extension import held

    state = model(tie_word_embeddings=False).state_dict()
    sent = {}
    passed = dict(digested(iter(state.items()), torch.bfloat16, sent))
    assert all(passed[name] is tensor for name, tensor in state.items())
    shapes = {name: shape for name, (_, shape) in sent.items()}
    server = as_vllm({name: tensor.to(torch.bfloat16) for name, tensor in state.items()})
    assert held(server, shapes) == {name: value for name, (value, _) in sent.items()}

    server["model.layers.1.self_attn.qkv_proj.weight"][16, 3] += 1  # the first row of the keys
    wrong = [name for name, value in held(server, shapes).items() if value != sent[name][0]]
    assert wrong == ["model.layers.1.self_attn.k_proj.weight"]


def test_a_tensor_that_the_server_has_in_parts_is_left_out():
    from agentrig_verl.extension import held

    state = model().state_dict()
    shapes = {name: list(tensor.shape) for name, tensor in state.items()}
    server = as_vllm(state)
    half = server["model.layers.0.mlp.down_proj.weight"]
    server["model.layers.0.mlp.down_proj.weight"] = half[:, :12]
    server["model.layers.0.mlp.gate_up_proj.weight"] = server["model.layers.0.mlp.gate_up_proj.weight"][:24]
    left = shapes.keys() - held(server, shapes).keys()
    assert left == {f"model.layers.0.mlp.{name}_proj.weight" for name in ("down", "gate", "up")}


def test_the_actor_scores_tokens_and_the_noise_is_that_of_the_dtype():
    from agentrig_verl.actor import decoder_blocks, rounding_noise, scored

    whole, ids = model(), [3, 9, 27, 1, 3, 9]
    found = scored(whole, ids, torch.device("cpu"))
    with torch.no_grad():
        expected = whole(input_ids=torch.tensor([ids])).logits.log_softmax(-1)[0, range(5), ids[1:]]
    assert found == pytest.approx(expected.tolist(), abs=1e-5)
    assert len(decoder_blocks(whole)) == 2

    def noisy(dtype):
        hooks = [b.register_forward_hook(rounding_noise(5 + i, dtype)) for i, b in enumerate(decoder_blocks(whole))]
        changed = scored(whole, ids, torch.device("cpu"))
        for hook in hooks:
            hook.remove()
        return max(abs(a - b) for a, b in zip(found, changed, strict=True))

    assert noisy("float32") < 1e-5 < noisy("bfloat16") < 0.1


def test_the_workers_methods_reach_every_rank():
    from agentrig_verl.actor import Actor
    from verl.single_controller.base.decorator import MAGIC_ATTR, Dispatch
    from verl.workers.engine_workers import ActorRolloutRefWorker

    for name in ("update_weights", "sent_digests", "probe"):
        assert getattr(getattr(Actor, name), MAGIC_ATTR)["dispatch_mode"] == Dispatch.ONE_TO_ALL
    ours, theirs = (getattr(cls.update_weights, MAGIC_ATTR) for cls in (Actor, ActorRolloutRefWorker))
    assert ours == theirs


def test_the_tensors_that_are_sent_to_the_servers_are_recorded():
    import asyncio
    from types import SimpleNamespace

    from agentrig_verl.actor import Actor
    from verl.workers.engine_workers import ActorRolloutRefWorker

    from agentrig.delivery.digests import digest

    arrived = {}

    class Rollout:
        async def update_weights(self, weights, **more):
            arrived.update(weights)

    async def sync(self, global_steps=None, mode="auto"):
        await self.rollout.update_weights(
            iter([("a", torch.ones(3)), ("b", torch.arange(4))]), global_steps=global_steps
        )

    worker = Actor.__new__(Actor)
    worker.rollout, worker._sent, worker._rank = Rollout(), {}, 0
    worker.config = SimpleNamespace(rollout=SimpleNamespace(dtype="bfloat16"))
    real = worker.rollout.update_weights
    before, ActorRolloutRefWorker.update_weights = ActorRolloutRefWorker.update_weights, sync
    try:
        asyncio.run(Actor.update_weights.__wrapped__(worker, 4))
    finally:
        ActorRolloutRefWorker.update_weights = before
    assert arrived.keys() == {"a", "b"}
    assert worker._sent == {
        "a": (digest(torch.ones(3, dtype=torch.bfloat16)), [3]),
        "b": (digest(torch.arange(4)), [4]),
    }
    assert worker.rollout.update_weights == real
