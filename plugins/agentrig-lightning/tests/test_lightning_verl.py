"""`agl.VERL(config)` becomes the algorithm `verl` of agentrig-verl."""

from __future__ import annotations

import logging
import sys
from typing import Any

import agentlightning as agl
import agentrig_lightning as lightning
import attrs
import pytest
from agentrig_lightning.imports import replace_verl
from agentrig_lightning.verl import KEYS, credit_for, keys_for

from agentrig.errors import AgentrigError, ConfigError
from agentrig.settings import structure

CONFIG = {
    "algorithm": {"adv_estimator": "grpo"},
    "data": {"train_files": "train.parquet", "train_batch_size": 32, "truncation": "error"},
    "actor_rollout_ref": {
        "rollout": {
            "n": 4,
            "multi_turn": {"format": "hermes"},
            "engine_kwargs": {"vllm": {"tool_call_parser": "hermes"}},
        },
        "actor": {"optim": {"lr": 1e-6}},
        "model": {"path": "Qwen/Qwen2.5-Coder-1.5B-Instruct"},
    },
    "agentlightning": {"trace_aggregator": {"level": "trajectory"}},
    "trainer": {"total_epochs": 2},
}
"""A part of what upstream's `train_sql_agent.py` gives."""


def test_a_configuration_is_mapped(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("agentrig_verl")
    with caplog.at_level(logging.INFO):
        spec = lightning.algorithm(agl.VERL(CONFIG), name="mine", summary="Mine.")
    assert (spec.name, spec.hardware) == ("mine", ("cuda", "ascend"))
    config: Any = structure(spec.config, {"verl": {"trainer.total_epochs": 1}}, owner="mine", section="algorithm")
    assert config.model == "Qwen/Qwen2.5-Coder-1.5B-Instruct"
    assert config.verl == {
        "algorithm.adv_estimator": "grpo",
        "data.train_batch_size": 32,
        "actor_rollout_ref.rollout.n": 4,
        "actor_rollout_ref.rollout.engine_kwargs.vllm.tool_call_parser": "hermes",
        "actor_rollout_ref.actor.optim.lr": 1e-6,
        "trainer.total_epochs": 1,  # the run's own
    }
    for left_out in (
        "mine leaves out data.train_files = 'train.parquet': the run's tasks are used: trainer.fit's, or [tasks]",
        "mine leaves out data.truncation = 'error': a prompt that is too long is a typed failure",
        "mine leaves out actor_rollout_ref.rollout.multi_turn.format = 'hermes': turns and tools are the agent's",
        "mine leaves out agentlightning.trace_aggregator.level = 'trajectory': it belongs to Agent Lightning's own",
    ):
        assert left_out in caplog.text


def test_a_key_that_verl_does_not_have_is_an_error() -> None:
    pytest.importorskip("agentrig_verl")
    wrong = agl.VERL({"trainer": {"total_epoch": 2}})
    spec = lightning.algorithm(wrong, name="mine", summary="Mine.")
    with pytest.raises(ConfigError, match="total_epoch"):
        structure(spec.config, {}, owner="mine", section="algorithm")


def test_what_cannot_be_mapped_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AgentrigError, match="trainer_cls and daemon_cls are parts of Agent Lightning's trainer"):
        lightning.algorithm(agl.VERL({}, trainer_cls=object), name="mine", summary="Mine.")
    with pytest.raises(
        AgentrigError, match=r"register lightning\.algorithm.* or take a recipe .* algorithm\.verl\.KEY"
    ):
        agl.VERL(CONFIG).run()
    monkeypatch.setitem(sys.modules, "agentrig_verl", None)
    with pytest.raises(AgentrigError, match="agentrig-verl, which is not installed: pip install agentrig-verl"):
        lightning.algorithm(agl.VERL(CONFIG), name="mine", summary="Mine.")


def test_it_is_replaced_wherever_it_is_imported_from() -> None:
    from agentlightning.algorithm.verl import VERL

    assert VERL is agl.VERL
    assert issubclass(VERL, agl.Algorithm)
    replace_verl()  # a second time it changes nothing
    assert VERL is agl.VERL


SETTINGS = (
    *("model", "steps", "tasks_per_step", "group_size", "lr", "clip_low", "clip_high", "max_tokens", "max_length"),
    *("mini_batches", "kl_loss_coef", "weight_decay", "validate_every", "save_every"),
)
GRPO = attrs.make_class("Grpo", {name: attrs.field(default=None) for name in SETTINGS})
REFERENCE: dict[str, Any] = {
    "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False},
    "data": {"train_batch_size": 32, "max_prompt_length": 4096, "max_response_length": 2048, "truncation": "error"},
    "actor_rollout_ref": {
        "rollout": {"n": 4, "gpu_memory_utilization": 0.8},
        "actor": {
            "ppo_mini_batch_size": 16,
            "optim": {"lr": 1e-6},
            "use_kl_loss": False,
            "kl_loss_coef": 0.1,
            "entropy_coeff": 0,
            "clip_ratio_low": 0.2,
            "clip_ratio_high": 0.3,
        },
        "model": {"path": "some/model"},
    },
    "trainer": {"total_epochs": 2, "test_freq": 32, "save_freq": -1, "critic_warmup": 0, "val_before_train": True},
}


def test_another_algorithm_gets_the_same_settings_and_the_rest_is_named() -> None:
    keys, absent = keys_for(GRPO, REFERENCE, rows=7000)
    assert keys == {
        "model": "some/model",
        "steps": 2 * (7000 // 32),
        "tasks_per_step": 32,
        "group_size": 4,
        "lr": 1e-6,
        "clip_low": 0.2,
        "clip_high": 0.3,
        "max_tokens": 2048,
        "max_length": 6144,
        "mini_batches": 2,
        "weight_decay": 0.01,
        "validate_every": 32,
        "save_every": 436,
    }
    assert credit_for(REFERENCE) == "grpo"  # verl's own default
    assert credit_for({"algorithm": {"norm_adv_by_std_in_grpo": False}}) == "dr-grpo"
    assert absent == ["data.truncation = 'error'", "actor_rollout_ref.rollout.gpu_memory_utilization = 0.8"]


def test_what_changes_the_training_is_never_left_out_in_silence() -> None:
    more: dict[str, Any] = {"algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": True}}
    more["actor_rollout_ref"] = {"actor": {"entropy_coeff": 0.1, "use_kl_loss": True, "kl_loss_coef": 0.2}}
    more["data"] = {"train_files": "train.parquet", "val_files": "val.parquet"}  # the script gives their rows to `fit`
    more["trainer"] = {"total_training_steps": 3, "total_epochs": 9, "test_freq": -1}
    keys, absent = keys_for(GRPO, more, rows=8)
    assert (keys["kl_loss_coef"], keys["steps"], keys["validate_every"]) == (0.2, 3, 0)
    assert absent == ["algorithm.use_kl_in_reward = True", "actor_rollout_ref.actor.entropy_coeff = 0.1"]
    with pytest.raises(ConfigError, match="adv_estimator = 'gae'"):
        keys_for(GRPO, {}, rows=8)


def test_every_key_that_is_mapped_is_one_of_grpo() -> None:
    agentrig_grpo = pytest.importorskip("agentrig_grpo.config")
    names = set(attrs.fields_dict(agentrig_grpo.GrpoConfig))
    assert {*KEYS.values(), "mini_batches", "max_length"} <= names
