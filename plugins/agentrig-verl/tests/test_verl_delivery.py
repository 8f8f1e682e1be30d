"""verl's proof of delivery without a GPU: digests of joined layers, the actor's scores, the sent tensors."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import deque
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.usefixtures("needs_verl"),
    pytest.mark.filterwarnings("ignore"),  # warnings of verl
]


def model(**more):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 60, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, **more)).eval()


def as_vllm(state):
    """Return weights in vLLM's form: joined layers, and a vocabulary that is padded to 64."""
    from agentrig.delivery.digests import FUSED

    found = dict(state)
    for fused, parts in FUSED.items():
        for name in [name for name in state if f".{parts[0]}." in name]:
            found[name.replace(parts[0], fused)] = torch.cat([found.pop(name.replace(parts[0], p)) for p in parts])
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        found[name] = torch.cat([state[name], torch.zeros(4, 16, dtype=state[name].dtype)])
    return found


def test_joined_layers_have_the_digests_of_their_parts():
    from agentrig_verl.actor import digested

    from agentrig.delivery.digests import Digests, held

    state = model(tie_word_embeddings=False).state_dict()
    noted, shapes = Digests(torch.bfloat16), {}
    passed = dict(digested(iter(state.items()), noted, shapes))
    assert all(passed[name] is tensor for name, tensor in state.items())
    sent = noted.result()
    server = as_vllm({name: tensor.to(torch.bfloat16) for name, tensor in state.items()})
    assert held(server, shapes) == sent

    server["model.layers.1.self_attn.qkv_proj.weight"][16, 3] += 1  # the first row of the keys
    wrong = [name for name, value in held(server, shapes).items() if value != sent[name]]
    assert wrong == ["model.layers.1.self_attn.k_proj.weight"]


def test_a_tensor_that_the_server_has_in_parts_is_left_out():
    from agentrig.delivery.digests import held

    state = model().state_dict()
    shapes = {name: list(tensor.shape) for name, tensor in state.items()}
    server = as_vllm(state)
    half = server["model.layers.0.mlp.down_proj.weight"]
    server["model.layers.0.mlp.down_proj.weight"] = half[:, :12]
    server["model.layers.0.mlp.gate_up_proj.weight"] = server["model.layers.0.mlp.gate_up_proj.weight"][:24]
    left = shapes.keys() - held(server, shapes).keys()
    assert left == {f"model.layers.0.mlp.{name}_proj.weight" for name in ("down", "gate", "up")}


def test_the_actor_scores_tokens_and_the_noise_is_that_of_the_dtype():
    from agentrig_forest.noise import decoder_blocks, with_noise
    from agentrig_verl.actor import scored

    whole, ids = model(), [3, 9, 27, 1, 3, 9]
    found = scored(whole, ids, torch.device("cpu"))
    with torch.no_grad():
        expected = whole(input_ids=torch.tensor([ids])).logits.log_softmax(-1)[0, range(5), ids[1:]]
    assert found == pytest.approx(expected.tolist(), abs=1e-5)
    assert len(decoder_blocks(whole)) == 2

    def noisy(dtype):
        (changed,) = with_noise(whole, lambda: scored(whole, ids, torch.device("cpu")), dtype, seeds=(5,))
        return max(abs(a - b) for a, b in zip(found, changed, strict=True))

    assert noisy("float32") < 1e-5 < noisy("bfloat16") < 0.1


def test_the_workers_methods_reach_every_rank():
    from agentrig_verl.actor import Actor
    from verl.single_controller.base.decorator import MAGIC_ATTR, Dispatch
    from verl.workers.engine_workers import ActorRolloutRefWorker

    for name in ("update_weights", "set_probe", "told", "spent"):
        assert getattr(getattr(Actor, name), MAGIC_ATTR)["dispatch_mode"] == Dispatch.ONE_TO_ALL
    ours, theirs = (getattr(cls.update_weights, MAGIC_ATTR) for cls in (Actor, ActorRolloutRefWorker))
    assert ours == theirs


@pytest.fixture
def worker(monkeypatch):
    """An actor of one rank with a tiny model, without a process group; its rollout keeps what arrives."""
    from contextlib import nullcontext
    from types import SimpleNamespace

    from agentrig_verl import actor
    from verl.workers.engine_workers import ActorRolloutRefWorker

    class Rollout:
        async def update_weights(self, weights, **more):
            self.arrived = {}
            for name, tensor in weights:
                self.arrived[name] = tensor.clone()
                tensor.zero_()  # verl sends through buffers that it uses again

        async def resume(self, tags):
            await asyncio.sleep(0.05 if tags == ["weights"] else 0)
            self.awake = [*getattr(self, "awake", []), *tags]

    async def sync(self, global_steps=None, mode="auto"):
        if self.config.rollout.free_cache_engine:
            await self.rollout.resume(tags=["weights"])
        sent = {name: tensor.clone() for name, tensor in self.actor.engine.module.state_dict().items()}
        await self.rollout.update_weights(iter(sent.items()), global_steps=global_steps)
        if self.config.rollout.free_cache_engine:
            await self.rollout.resume(tags=["kv_cache"])

    made = actor.Actor.__new__(actor.Actor)
    made.rollout, made._rank, made._told, made._probe = Rollout(), 0, {}, None
    made._noises, made._seeds = deque(maxlen=actor.RECENT), itertools.count()
    engine = SimpleNamespace(backend="naive")
    made.config = SimpleNamespace(
        rollout=SimpleNamespace(dtype="bfloat16", free_cache_engine=True, checkpoint_engine=engine)
    )
    made.actor = SimpleNamespace(engine=SimpleNamespace(module=model(), eval_mode=nullcontext))
    monkeypatch.setattr(actor, "get_device_name", lambda: "cpu")
    monkeypatch.setattr(actor, "get_device_id", lambda: 0)
    monkeypatch.setattr(ActorRolloutRefWorker, "update_weights", sync)
    return made


def transfer(worker):
    from agentrig_verl.actor import Actor

    asyncio.run(Actor.update_weights.__wrapped__(worker, 4))
    return Actor.told.__wrapped__(worker)


@pytest.mark.parametrize("sleeps", [True, False])
def test_a_transfer_notes_what_passes_and_scores_the_probe(worker, sleeps):
    """The probe is scored while a server wakes, and before the transfer where servers never sleep."""
    from agentrig_verl.actor import Actor, scored

    from agentrig.delivery.digests import digests

    assert transfer(worker) == {}, "nothing is asked for: run.delivery is false"
    ids = [3, 9, 27, 1, 3, 9]
    Actor.set_probe.__wrapped__(worker, ids, "bfloat16")
    worker.config.rollout.free_cache_engine = sleeps
    real, real_resume = worker.rollout.update_weights, worker.rollout.resume
    worker.rollout.awake = []
    told = transfer(worker)
    assert worker.rollout.awake == (["weights", "kv_cache"] if sleeps else [])
    state = worker.actor.engine.module.state_dict()
    assert worker.rollout.arrived.keys() == state.keys()
    assert told["sent"] == {n: (digests([(n, t)], torch.bfloat16)[n], list(t.shape)) for n, t in state.items()}
    assert told["logprobs"] == scored(worker.actor.engine.module, ids, torch.device("cpu"))
    assert 1e-5 < told["noise"] < 0.1
    assert told["layers"] == 2
    assert told["seconds"] > 0
    spent = Actor.spent.__wrapped__(worker)
    assert spent.keys() == {"probe", "gather", "digests", "send", "all"} | (
        {"free", "wake_weights", "wake_kv_cache"} if sleeps else set()
    )
    assert 0 < spent["gather"] < spent["digests"] < spent["send"] < spent["all"]
    assert (worker.rollout.update_weights, worker.rollout.resume) == (real, real_resume)


def test_the_bound_follows_a_model_that_becomes_more_sensitive_to_rounding(worker):
    """A run whose bound was measured once, with the starting weights, was stopped at step 36 although all was right."""
    from agentrig_forest.noise import with_noise
    from agentrig_verl.actor import RECENT, Actor, scored

    ids, model = [3, 9, 27, 1, 3, 9], worker.actor.engine.module
    Actor.set_probe.__wrapped__(worker, ids, "bfloat16")
    first = transfer(worker)["noise"]
    assert transfer(worker)["noise"] >= first, "the latest measurements count, not the last one alone"
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "norm" not in name:
                tensor *= 4
    told = transfer(worker)
    (other,) = with_noise(model, lambda: scored(model, ids, torch.device("cpu")), "bfloat16", seeds=(77,))
    sharp = told["noise"]
    assert sharp > 2 * first
    assert max(abs(a - b) for a, b in zip(told["logprobs"], other, strict=True)) < 2 * sharp
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "norm" not in name:
                tensor /= 4
    for _ in range(RECENT):
        told = transfer(worker)
    assert told["noise"] < sharp / 2, "earlier weights no longer count"


class Server:
    """A replica that says what it holds, as vLLM's workers write it."""

    def __init__(self, parameters):
        self.parameters = parameters

        class Call:
            @staticmethod
            def remote(method, args):
                from agentrig_verl.extension import held

                assert method == "write_digests"
                Path(args[0]).write_text(json.dumps(held(self.parameters, args[1])))

        self.collective_rpc, self.servers = Call, [self]


@pytest.fixture
def proven(worker, tmp_path, monkeypatch):
    """The proofs of a run with this worker and a real server of the same model, through the embedded server."""
    from types import SimpleNamespace

    from agentrig_grpo import checkpoint
    from agentrig_verl import delivery as ours
    from agentrig_verl.actor import Actor
    from embedded_servers import embedded

    from agentrig import Endpoint
    from agentrig.delivery import Delivery
    from agentrig.testing.tiny_model import make_model, make_tokenizer

    worker.actor.engine.module = make_model()
    worker.config.rollout.dtype = "float32"
    checkpoint.save(worker.actor.engine.module, make_tokenizer(), tmp_path / "model")
    monkeypatch.setattr(ours.ray, "get", lambda found: found)
    workers = SimpleNamespace(
        set_probe=lambda *given: Actor.set_probe.__wrapped__(worker, *given),
        told=lambda: [Actor.told.__wrapped__(worker)],
    )
    rollout = SimpleNamespace(name="vllm", dtype="float32", max_model_len=128)
    tokenizer = SimpleNamespace(encode=lambda text: [5 + ord(letter) % 200 for letter in text])
    record = Delivery(tmp_path)
    proofs = ours.Transfers(record, tmp_path, rollout, workers, tokenizer, {"question": "how many singers are there?"})
    with embedded(tmp_path / "model", name="policy", slots=4) as server:
        endpoint = Endpoint(base_url=server.base_url, model="policy", api_key=server.api_key, sampling={})

        def step(version, held=None):
            proofs.before()
            transfer(worker)
            server.take(checkpoint.weights(worker.actor.engine.module), version)
            state = dict(worker.actor.engine.module.state_dict()) if held is None else held
            proofs.after(version, [endpoint], [Server(state)])
            record.settle()

        yield SimpleNamespace(step=step, record=record, worker=worker)


@pytest.mark.slow
def test_the_servers_are_proven_to_have_what_the_actor_sent(proven):
    for version in (0, 1, 2):
        proven.step(version)
        with torch.no_grad():
            for parameter in proven.worker.actor.engine.module.parameters():
                parameter.mul_(1.01)
    found = proven.record.summary()
    assert (found["proofs"], found["arrived"]) == (3, 3)
    assert found["tensors"] > 20
    assert found["difference"] < found["bound"] / 2
    assert found["notes"] == []


@pytest.mark.slow
def test_a_server_that_keeps_a_tensor_is_named(proven):
    from agentrig.errors import RunStopped

    proven.step(0)
    state = {name: tensor.clone() for name, tensor in proven.worker.actor.engine.module.state_dict().items()}
    with torch.no_grad():
        proven.worker.actor.engine.module.model.layers[1].mlp.up_proj.weight.mul_(1.0001)
    with pytest.raises(RunStopped, match=r"step 1: .*did not arrive at http") as stopped:
        proven.step(1, held=state)
    assert "1 of 27 tensors differ from the learner's: model.layers.1.mlp.up_proj.weight" in str(stopped.value)
    assert "these are still the weights of version 0" in str(stopped.value)
