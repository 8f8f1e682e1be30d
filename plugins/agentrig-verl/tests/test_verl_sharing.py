"""Which engine trains a run, and which rank gets which rows."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from agentrig_verl import register_algorithms, schema
from agentrig_verl.sharing import by_rank, check_engine, choose

from agentrig.errors import ConfigError
from agentrig.findings import Situation
from agentrig.plan import resolve

pytestmark = [
    pytest.mark.usefixtures("needs_verl"),
    pytest.mark.filterwarnings("ignore"),  # raised by verl and Ray
]

ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen2"}', "utf-8")
    return folder


def composed(model: Path, **keys: Any) -> Any:
    return schema.compose(keys, trusted={f"{MODEL}.path": str(model)})


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({f"{ACTOR}.ulysses_sequence_parallel_size": 2}, "ulysses_sequence_parallel_size is 2"),
        ({f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": 2}, "ulysses_sequence_parallel_size is 2"),
        ({f"{ACTOR}.strategy": "megatron"}, "strategy is megatron"),
        ({f"{ACTOR}.fsdp_config.full_determinism": True}, "full_determinism is True"),
        ({f"{MODEL}.use_liger": True}, "use_liger is True"),
        ({f"{MODEL}.enable_activation_offload": True}, "enable_activation_offload is True"),
        ({f"{MODEL}.override_config.attn_implementation": "eager"}, "attn_implementation is eager"),
        ({f"{MODEL}.override_config.attention_dropout": 0.1}, "dropout"),
        ({f"{MODEL}.override_config": {"use_sliding_window": True, "sliding_window": 64}}, "sees 64 tokens only"),
    ],
)
def test_the_reason_why_tokens_cannot_be_shared_is_named(model: Path, keys: dict[str, Any], said: str) -> None:
    forest, why = choose("auto", composed(model, **keys), device="cuda")
    assert not forest
    assert said in why
    with pytest.raises(ConfigError, match=f"engine = forest cannot train this run: .*{said}"):
        choose("forest", composed(model, **keys), device="cuda")


def test_other_models_and_devices_are_trained_by_verls_engine(model: Path) -> None:
    assert "the device is npu" in choose("auto", composed(model), device="npu")[1]
    (model / "config.json").write_text(json.dumps({"model_type": "gemma2"}), "utf-8")
    _, why = choose("auto", composed(model), device="cuda")
    assert "models of type gemma2 are not among llama, mistral, qwen2, qwen3" in why


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_rows_of_a_group_are_adjacent_on_one_rank(ranks: int) -> None:
    rng = random.Random(ranks)
    rows = [(f"g{g}", rng.randint(50, 900)) for g in range(8) for _ in range(4)]
    rng.shuffle(rows)
    groups, lengths = [g for g, _ in rows], [n for _, n in rows]
    order = by_rank(groups, lengths, ranks)
    assert sorted(order) == list(range(32))
    size = 32 // ranks
    parts = [[groups[i] for i in order[r * size : (r + 1) * size]] for r in range(ranks)]
    for part in parts:
        assert [part[i] for i in range(0, size, 4)] == list(dict.fromkeys(part)), "side by side"
        assert all(part.count(g) == 4 for g in part), "on one rank"
    tokens = [sum(lengths[i] for i in order[r * size : (r + 1) * size]) for r in range(ranks)]
    assert max(tokens) < 1.4 * min(tokens)


def test_each_rank_gets_as_many_rows_when_groups_are_unequal() -> None:
    groups = [*"aaaaaaa", *"bbb", *"cc", *"dddd"]
    order = by_rank(groups, [10] * 16, 4)
    assert sorted(order) == list(range(16))
    parts = [{groups[i] for i in order[r * 4 : r * 4 + 4]} for r in range(4)]
    assert sum(len(part) for part in parts) <= 7, "few groups are split"


def balanced(forest: bool, keys: list[str], lengths: dict[str, int], tasks: list[str]) -> Any:
    """Return a batch as the trainer gives it to the workers of two ranks.

    Args:
        forest: Whether shared tokens are computed once.
        keys: In the order in which verl got them.
        lengths: Tokens of each.
        tasks: The keys in the order of the step's tasks.
    """
    from agentrig_verl.trainer import Trainer
    from transfer_queue import KVBatchMeta

    batch = KVBatchMeta(keys=list(keys), tags=[{"seq_len": lengths[key]} for key in keys])
    trainer: Any = Trainer.__new__(Trainer)
    trainer.forest, trainer.use_critic, trainer.global_steps = forest, False, 1
    trainer.actor_rollout_wg = SimpleNamespace(_dispatch_info={"actor": [0, 1]})
    trainer.agent_loop_manager = SimpleNamespace(trajectories=dict.fromkeys(tasks))
    trainer.tokenizer = SimpleNamespace(eos_token_id=0)
    actor = SimpleNamespace(ppo_mini_batch_size=8)
    trainer.config = SimpleNamespace(
        trainer=SimpleNamespace(critic_warmup=0),
        actor_rollout_ref=SimpleNamespace(actor=actor, rollout=SimpleNamespace(n=4)),
    )
    return trainer._balance_batch(batch, {})


GROUPS = [f"uid{g}_{session}_0" for session in range(4) for g in range(8)]


def lengths_of(keys: list[str]) -> dict[str, int]:
    rng = random.Random(3)
    return {key: rng.randint(50, 900) for key in keys}


@pytest.mark.parametrize("forest", [True, False])
def test_verls_dispatch_leaves_a_group_on_one_rank(forest: bool) -> None:
    """verl's own balancing, on which this one builds, scatters groups over the ranks."""
    lengths = lengths_of(GROUPS)
    found = balanced(forest, GROUPS, lengths, GROUPS)
    assert {key: tag["seq_len"] for key, tag in zip(found.keys, found.tags, strict=True)} == lengths
    on = [{key.partition("_")[0] for key in found.keys[r * 16 : r * 16 + 16]} for r in range(2)]
    assert (len(on[0] & on[1]) == 0) == forest


@pytest.mark.parametrize("forest", [True, False])
def test_the_workers_get_the_rows_in_one_order_whichever_group_was_complete_first(forest: bool) -> None:
    lengths, tasks = lengths_of(GROUPS), sorted(GROUPS)
    found = balanced(forest, GROUPS, lengths, tasks).keys
    for seed in range(5):
        arrived = list(GROUPS)
        random.Random(seed).shuffle(arrived)
        assert balanced(forest, arrived, lengths, tasks).keys == found


@pytest.mark.parametrize("forest", [True, False])
def test_the_trainer_starts_the_workers_of_the_chosen_engine(forest: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from agentrig_verl import trainer as ours

    monkeypatch.setattr(ours.ray, "remote", lambda cls: cls)
    base = ours.PPOTrainerSync

    def prepare(self: Any) -> None:
        from verl.workers.engine_workers import ActorRolloutRefWorker

        metadata = SimpleNamespace(modified_class=ActorRolloutRefWorker)
        self.role_worker_mapping = {"actor": SimpleNamespace(__ray_metadata__=metadata)}

    monkeypatch.setattr(base, "_init_resource_pool_mgr", prepare)
    trainer: Any = ours.Trainer.__new__(ours.Trainer)
    trainer.forest = forest
    trainer._init_resource_pool_mgr()
    assert trainer.role_worker_mapping["actor"].__name__ == ("ForestActor" if forest else "Actor")


def test_the_doctor_says_which_engine_would_train_and_why(model: Path) -> None:
    def finding(*overrides: str, at: Path | str = model) -> tuple[str, str]:
        plan = resolve(
            "fast", overrides=[f"algorithm.model={at}", *overrides], uses={"hardware": "cuda", "tasks": "mini-sql"}
        )
        (found,) = check_engine(Situation(hardware=plan.build("hardware"), plan=plan))
        return found.result, found.evidence

    (spec,) = register_algorithms()
    assert check_engine in spec.checks
    result, evidence = finding()
    assert (result, "forest would train: tokens that rows share are computed once" in evidence) == ("ok", True)
    result, evidence = finding("algorithm.engine=verl")
    assert (result, evidence.startswith("verl would train: ") and "engine is verl" in evidence) == ("ok", True)
    (model / "config.json").write_text('{"model_type": "gpt2"}', "utf-8")
    result, evidence = finding()
    assert (result, "verl would train" in evidence, "models of type gpt2" in evidence) == ("ok", True, True)
    result, evidence = finding("algorithm.engine=forest")
    assert (result, "engine = forest cannot train this run" in evidence) == ("problem", True)
    result, evidence = finding(at="somebody/not-here")
    assert (result, "somebody/not-here is not on this machine yet" in evidence) == ("skipped", True)
