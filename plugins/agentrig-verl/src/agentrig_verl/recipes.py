"""The recipes `fast`, `qwen`, `llama` and `npu`: the reference's values under verl 0.9's keys.

The plugin's README says what differs from the reference, and why.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from agentrig import RecipeSpec
from agentrig_verl.schema import ACTOR, ROLLOUT

REFERENCE: Mapping[str, Any] = {
    "algorithm.adv_estimator": "grpo",
    "algorithm.use_kl_in_reward": False,
    "data.train_batch_size": 32,
    "data.max_prompt_length": 4096,
    "data.max_response_length": 2048,
    f"{ROLLOUT}.name": "vllm",
    f"{ROLLOUT}.n": 4,
    f"{ROLLOUT}.tensor_model_parallel_size": 1,
    f"{ROLLOUT}.engine_kwargs.vllm.enable_auto_tool_choice": True,
    f"{ROLLOUT}.engine_kwargs.vllm.tool_call_parser": "hermes",
    f"{ACTOR}.ppo_mini_batch_size": 32,
    f"{ACTOR}.optim.lr": 1e-6,
    f"{ACTOR}.use_kl_loss": False,
    f"{ACTOR}.kl_loss_coef": 0.0,
    f"{ACTOR}.entropy_coeff": 0.0,
    f"{ACTOR}.clip_ratio_low": 0.2,
    f"{ACTOR}.clip_ratio_high": 0.3,
    "actor_rollout_ref.ref.fsdp_config.param_offload": True,
    "actor_rollout_ref.model.use_remove_padding": True,
    "actor_rollout_ref.model.enable_gradient_checkpointing": True,
    "trainer.n_gpus_per_node": 1,
    "trainer.nnodes": 1,
    "trainer.critic_warmup": 0,
    "trainer.val_before_train": True,
    "trainer.test_freq": 32,
    "trainer.save_freq": 64,
    "trainer.total_epochs": 2,
    "trainer.logger": ["console", "wandb"],
}
"""The reference's verl settings, as far as verl 0.9 has the key and it has an effect here.

Those of the device's memory are left to the memory plan (planning.py): the reference sets them for 80 GB.
"""

ADDITIONS: Mapping[str, Any] = {
    f"{ROLLOUT}.val_kwargs.temperature": 0,
    "reward.num_workers": 1,
    "transfer_queue.backend.SimpleStorage.num_data_storage_units": 2,
    "data.dataloader_num_workers": 0,
    "trainer.project_name": "agentrig",
}

RUN: Mapping[str, Mapping[str, Any]] = {
    "tasks": {"use": "spider"},
    "agent": {"use": "langgraph-sql", "max_turns": 3, "sample_rows": 3},
    "reward": {"use": "spider-exec"},
    "adapter": {"use": "agent-match", "match": "write"},
    "runners": {"n": 10},
}


def recipe(name: str, summary: str, *, model: str, verl: Mapping[str, Any], hardware: str | None = None) -> RecipeSpec:
    """Return a recipe: the reference's run with some of verl's keys changed; None drops a key."""
    keys = {k: v for k, v in {**REFERENCE, **ADDITIONS, **verl}.items() if v is not None}
    settings: dict[str, Mapping[str, Any]] = {**RUN, "algorithm": {"use": "verl", "model": model, "verl": keys}}
    if hardware is not None:
        settings["hardware"] = {"use": hardware}
    return RecipeSpec(name=name, summary=summary, settings=settings)


def recipes() -> Iterable[RecipeSpec]:
    """Return the recipes of this plugin."""
    yield recipe(
        "fast",
        "A few steps of the reference run with a 0.5B model on one GPU: for CI and first looks.",
        model="Qwen/Qwen2.5-Coder-0.5B-Instruct",
        verl={
            "trainer.total_epochs": 1,
            "trainer.total_training_steps": 3,
            "trainer.test_freq": 3,
            "trainer.logger": ["console"],
        },
    )
    yield recipe(
        "qwen",
        "The reference run: Qwen2.5-Coder-1.5B on Spider, one GPU with at least 40 GB.",
        model="Qwen/Qwen2.5-Coder-1.5B-Instruct",
        verl={},
    )
    yield recipe(
        "llama",
        "The reference run with Llama-3.2-1B (gated: HF_TOKEN).",
        model="meta-llama/Llama-3.2-1B-Instruct",
        verl={f"{ROLLOUT}.engine_kwargs.vllm.tool_call_parser": "llama3_json"},
    )
    yield recipe(
        "npu",
        "The reference run on an Ascend NPU with at least 40 GB.",
        model="Qwen/Qwen2.5-Coder-1.5B-Instruct",
        hardware="ascend",
        verl={
            f"{ROLLOUT}.engine_kwargs.vllm.enable_auto_tool_choice": None,
            f"{ROLLOUT}.engine_kwargs.vllm.tool_call_parser": None,
            f"{ACTOR}.use_torch_compile": False,
            "trainer.device": "npu",
            "trainer.val_before_train": False,
            "trainer.save_freq": 256,
            "trainer.logger": ["console"],
        },
    )
