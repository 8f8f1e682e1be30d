"""`agl.VERL(config)` becomes the algorithm `verl` of agentrig-verl."""

from __future__ import annotations

import logging
import sys
from typing import Any

import pytest

from agentrig import lightning
from agentrig.errors import AgentrigError, ConfigError
from agentrig.lightning_import import import_lightning, replace_verl
from agentrig.settings import structure

agl = import_lightning()

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
        "mine leaves out data.train_files = 'train.parquet': tasks come from agentrig; set [tasks]",
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
