"""The memory that the doctor expects for a recipe."""

from __future__ import annotations

from agentrig_verl.recipes import recipes
from agentrig_verl.settings import VerlConfig, workload

from agentrig.hardware.memory import GB, KNOWN, estimate

RECIPES = {r.name: r.settings["algorithm"] for r in recipes()}


def test_the_reference_recipe_is_read() -> None:
    settings = RECIPES["qwen"]
    load = workload(VerlConfig(model=settings["model"], verl=dict(settings["verl"])))
    assert load is not None
    assert (load.micro_batch, load.context, load.shards, load.nodes) == (1, 6144, 1, 1)
    need = estimate(KNOWN[load.model.lower()], load)
    assert 24 * GB < need.floor < 40 * GB


def test_every_recipe_names_a_model_whose_shape_is_known() -> None:
    assert {str(settings["model"]).lower() for settings in RECIPES.values()} <= KNOWN.keys()


def test_lora_shards_and_token_budgets_count() -> None:
    verl = {
        "actor_rollout_ref.model.lora_rank": 32,
        "trainer": {"nnodes": 2, "n_gpus_per_node": 4},
        "data": {"max_prompt_length": 900, "max_response_length": 100},
        "actor_rollout_ref.actor.use_dynamic_bsz": True,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 5000,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": None,
    }
    load = workload(VerlConfig(model="m", verl=verl))
    assert load is not None
    assert load.trained < 0.05
    assert (load.shards, load.nodes, load.micro_batch) == (8, 2, 5)


def test_without_a_model_nothing_is_reported() -> None:
    assert workload(VerlConfig()) is None
