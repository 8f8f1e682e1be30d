"""The memory plan in verl's keys: what is chosen for a device, what a run sets is kept, and what would fit."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import pytest
from agentrig_ascend import Ascend, AscendConfig
from agentrig_cuda import Cuda, CudaConfig
from agentrig_verl import schema
from agentrig_verl.algorithm import Verl
from agentrig_verl.checks import check, check_memory_plan
from agentrig_verl.keys import keys_of, memory_plan
from agentrig_verl.planning import (
    DYNAMIC,
    MOMENTS,
    RANK,
    ROWS,
    SHARE,
    SLEEPS,
    TOKENS,
    TWICE,
    WEIGHTS,
    Choice,
    VerlPlan,
    plan_of,
    shape_of,
)
from agentrig_verl.schema import ACTOR, ROLLOUT
from agentrig_verl.settings import VerlConfig

from agentrig.doctor.examination import look
from agentrig.errors import ConfigError
from agentrig.hardware import Device, Probe
from agentrig.hardware.memory import GIB, KNOWN, DeviceMemory
from agentrig.plan import resolve

QWEN = KNOWN["qwen/qwen2.5-coder-1.5b-instruct"]


def plan(total: float = 79.2, limit: float = 0, calls: int = 160, recipe: str = "qwen", **keys: object) -> VerlPlan:
    """Return the plan of a recipe with some of verl's keys, on a card of so many GiB."""
    config = resolve(recipe, uses={"hardware": "cuda"}).configs["algorithm"]
    config = attrs.evolve(config, verl={**config.verl, **keys})
    found = memory_plan(config, Cuda(config=CudaConfig(memory_gib=limit)), calls=calls, memory=int(total * GIB))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("total", "limit", "tokens"), [(79.2, 0, 24576), (139.8, 0, 49152), (39.4, 0, 6144), (79.2, 40, 6144)]
)
def test_the_reference_run_starts_on_80_gb_and_on_40(total: float, limit: float, tokens: int) -> None:
    found = plan(total, limit)
    choice = found.choose()
    assert choice.tokens == tokens
    assert max(found.update(choice), found.rollouts(choice)) <= (limit or total) * GIB
    keys = found.keys(choice)
    assert keys[DYNAMIC] is True
    assert keys[TOKENS] == tokens
    assert keys[SHARE] * total * GIB == pytest.approx(found.server.memory(choice.cache), rel=0.02)


@pytest.mark.filterwarnings("ignore")  # warnings of verl
def test_verl_accepts_the_keys_of_a_plan() -> None:
    config = resolve("qwen", uses={"hardware": "cuda"}).configs["algorithm"]
    composed = schema.compose(keys_of(config, Cuda(), plan=plan(39.4)))
    check(composed)
    assert composed.actor_rollout_ref.actor.ppo_max_token_len_per_gpu == 6144
    assert composed.actor_rollout_ref.rollout.log_prob_use_dynamic_bsz is True
    check(schema.compose(keys_of(config, Cuda(), plan=None)))


def test_the_server_gets_the_cache_of_the_calls_that_run() -> None:
    few, many = plan(calls=8).server, plan().server
    assert (few.calls, many.calls) == (8, 128)  # 32 tasks x 4
    assert many.cache == 16 * few.cache
    assert plan(**{f"{ROLLOUT}.n": 64}).server.calls == 160


def test_a_smaller_cache_comes_before_offload_and_offload_before_a_smaller_pass() -> None:
    choices = [plan(total).choose() for total in (79.2, 46, 39.4)]
    assert [choice.cache for choice in choices] == [1.0, 0.75, 0.5]
    tight = VerlPlan(
        flat={"data.train_batch_size": 256, f"{ROLLOUT}.n": 8, "data.max_prompt_length": 100},
        shape=attrs.evolve(QWEN, kv_heads=12),
        device=DeviceMemory(name="cuda", total=48 * GIB),
    )
    found = [
        attrs.evolve(tight, device=DeviceMemory(name="cuda", total=total * GIB)).first() for total in range(34, 64)
    ]
    assert any(choice.moments for choice in found if choice)


def test_shards_and_tensor_parallel_servers_count() -> None:
    four = plan(24, **{"trainer.n_gpus_per_node": 4})
    assert four.need(6144).floor < plan(79.2).need(6144).floor / 3
    assert four.server.calls == 32  # 128 calls on 4 servers
    split = plan(24, **{"trainer.n_gpus_per_node": 4, f"{ROLLOUT}.tensor_model_parallel_size": 2})
    assert split.server.weights == four.server.weights // 2
    assert split.server.calls == 64


@pytest.mark.parametrize(
    ("keys", "kept"),
    [
        ({SHARE: 0.5}, {SHARE}),
        ({MOMENTS: True, WEIGHTS: True}, {MOMENTS, WEIGHTS}),
        ({DYNAMIC: True, TOKENS: 8192}, {DYNAMIC, TOKENS}),
        ({TOKENS: 8192}, {TOKENS}),
    ],
)
def test_what_a_run_sets_is_kept(keys: dict[str, object], kept: set[str]) -> None:
    found = plan(**keys)
    chosen = found.keys(found.choose())
    assert not kept & set(chosen)
    assert set(chosen) == {SHARE, MOMENTS, WEIGHTS, DYNAMIC, TOKENS} - kept


def test_micro_batches_of_rows_are_kept_and_used_for_log_probabilities() -> None:
    found = plan(**{ROWS: 2})
    chosen = found.keys(found.choose())
    assert DYNAMIC not in chosen
    assert chosen[f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu"] == 2
    assert found.choose().tokens == 2 * 6144


@pytest.mark.parametrize(
    ("limit", "keys", "cure"),
    [
        (40, {SHARE: 0.8}, rf"Set {SHARE} = 0\.227$"),
        (40, {SHARE: 0.05}, rf"Set {SHARE} = 0\.227$"),
        (40, {ROWS: 4}, rf"Set {ROWS} = 1$"),
        (0, {ROWS: 16}, rf"Set {ROWS} = 4$"),
        (40, {DYNAMIC: True, TOKENS: 49152}, rf"Set {TOKENS} = 6144"),
        (40, {ROWS: 4, SHARE: 0.8}, rf"Set .*{TOKENS} = 6144, .*{SHARE} = 0\.227$"),
        (44, {SLEEPS: False}, rf"Set {SLEEPS} = true$"),
        (44, {TWICE: False}, rf"Set {TWICE} = true$"),
        (24, {}, rf"Set {RANK} = 16, which trains adapters only$"),
        (24, {SHARE: 0.1}, rf"Set {RANK} = 16, which trains adapters only, and leave out {SHARE}$"),
        (8, {}, "Take a smaller model"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_nearest_that_does(
    limit: float, keys: dict[str, object], cure: str
) -> None:
    found = plan(79.2, limit, **keys)
    with pytest.raises(ConfigError, match=cure.replace("$", r"(, or hardware\.memory_gib = \d+ or more)?$")) as error:
        found.choose()
    assert "\n\n" not in str(error.value)
    if limit:
        assert f"memory_gib = {limit:g}" in str(error.value)


def test_the_cure_of_a_refusal_fits() -> None:
    assert plan(79.2, 40, **{ROWS: 1}).first()
    assert plan(79.2, 0, **{ROWS: 4}).first()
    assert not plan(79.2, 0, **{ROWS: 5}).first()
    assert plan(79.2, 24, **{RANK: 16}).first()


def test_a_reference_model_counts_unless_it_is_offloaded() -> None:
    ref = "actor_rollout_ref.ref.fsdp_config.param_offload"
    assert plan(**{f"{ACTOR}.use_kl_loss": True}).reference == 0  # the recipe offloads it
    here = plan(**{f"{ACTOR}.use_kl_loss": True, ref: False})
    assert here.reference == 2 * QWEN.parameters
    choice = Choice(tokens=8192, cache=1.0, moments=False, weights=False)
    assert here.update(choice) > plan().update(choice) + 2 * QWEN.parameters


def test_an_update_is_near_what_was_measured() -> None:
    """The peaks of one H200 in tests/benchmarks/verl_engine.md, GiB: 16 rows of 944 tokens; shared tokens."""
    own = plan().need(16 * 944)
    assert (own.floor + own.activations) / GIB == pytest.approx(53.0, rel=0.05)
    shared = attrs.evolve(plan(), forest=True).need(16384)
    assert (shared.floor + shared.activations) / GIB == pytest.approx(28.8, rel=0.05)


def test_shared_tokens_leave_room_for_larger_passes() -> None:
    assert [attrs.evolve(plan(total), forest=True).choose().tokens for total in (39.4, 79.2)] == [32768, 49152]


def test_a_model_that_is_not_known_is_not_planned(tmp_path: Path) -> None:
    assert plan_of({}, "", Cuda(), memory=GIB) is None
    assert plan_of({}, str(tmp_path / "none"), Cuda(), memory=GIB) is None
    assert plan_of({f"{ACTOR}.strategy": "megatron"}, "Qwen/Qwen2.5-Coder-1.5B-Instruct", Cuda(), memory=GIB) is None
    config = attrs.evolve(resolve("qwen", uses={"hardware": "cuda"}).configs["algorithm"], model="nobody/nothing")
    with pytest.raises(ConfigError, match="the sizes of nobody/nothing are not known"):
        memory_plan(config, Cuda(config=CudaConfig(memory_gib=40)), memory=80 * GIB)
    keys = keys_of(config, Cuda(), plan=memory_plan(config, Cuda(), memory=80 * GIB))
    assert (keys[TOKENS], keys[MOMENTS], keys[SHARE]) == (6144, True, 0.5)


def test_a_local_model_is_read_from_its_own_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2,
                    "vocab_size": 100})
    )  # fmt: skip
    shape = shape_of(str(tmp_path))
    assert shape is not None
    assert (shape.layers, shape.hidden) == (2, 64)


def test_a_device_that_does_not_say_its_memory_is_planned_for_40_gib(caplog: pytest.LogCaptureFixture) -> None:
    class Silent(Cuda):
        def probe(self) -> Probe:
            return Probe(available=True, devices=(Device(name="GPU"),))

    found = plan_of({}, "Qwen/Qwen2.5-Coder-1.5B-Instruct", Silent())
    assert found is not None
    assert found.device.total == 40 * GIB
    assert "cuda does not say its memory: verl's keys are planned for 40.0 GiB" in caplog.text


@pytest.mark.parametrize("limit", [0, 40])
def test_the_plan_of_an_npu_is_that_of_a_gpu_with_as_much_memory(limit: float) -> None:
    config = resolve("qwen", uses={"hardware": "ascend"}).configs["algorithm"]
    hardware = Ascend(config=AscendConfig(memory_gib=limit))
    found = memory_plan(config, hardware, calls=160, memory=64 * GIB)
    assert found is not None
    choice = found.choose()
    assert (found.device.name, choice) == ("npu", plan(64, limit).choose())
    assert max(found.update(choice), found.rollouts(choice)) <= (limit or 64) * GIB
    keys = keys_of(config, hardware, plan=found)
    assert keys[SHARE] * 64 * GIB == pytest.approx(found.server.memory(choice.cache), rel=0.02)
    assert f"GiB of npu{' of memory_gib = 40' * bool(limit)}: update" in found.describe(choice)


@pytest.mark.parametrize(
    ("overrides", "memory", "result", "words"),
    [
        ((), 79.2, "ok", "ppo_max_token_len_per_gpu = 24576"),
        (("hardware.memory_gib=40",), 0, "ok", "39.2 GiB of cuda of memory_gib = 40: update 38.1"),
        (("hardware.memory_gib=24",), 79.2, "problem", "memory_gib = 24"),
        (("hardware.memory_gib=24",), 79.2, "problem", ", or hardware.memory_gib = "),
        ((), 0, "skipped", "hardware.memory_gib=24 computes"),
    ],
)
def test_doctor_says_the_plan(overrides: tuple[str, ...], memory: float, result: str, words: str) -> None:
    situation, _ = look("qwen", uses={"hardware": "cuda"}, overrides=overrides)
    devices = (Device(name="GPU", memory=int(memory * GIB)),) if memory else ()
    probes = {**situation.probes, "cuda": Probe(available=bool(devices), devices=devices)}
    (found,) = check_memory_plan(attrs.evolve(situation, probes=probes))
    assert found.result == result
    assert words in f"{found.evidence}\n{found.cure}"


def test_a_server_alone_gets_its_share_of_the_limit() -> None:
    class Card(Cuda):
        def probe(self) -> Probe:
            return Probe(available=True, devices=(Device(name="GPU", memory=80 * GIB),))

    verl = Verl(VerlConfig(model="m"))
    assert verl._share({}, Card()) == 0.6
    assert verl._share({}, Card(config=CudaConfig(memory_gib=40))) == pytest.approx(0.3)
    assert verl._share({SHARE: 0.5}, Card(config=CudaConfig(memory_gib=40))) == 0.5
