"""A tokenizer that transformers would replace is detected; the family's own tokenizer is accepted."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

from agentrig_grpo.naming import model_directory
from agentrig_verl.algorithm import warn_of_tokenizer as warn
from tokenizers import Regex, Tokenizer, pre_tokenizers

from agentrig.tokenizers import disagreement


def test_the_shipped_model_is_tokenized_the_same_everywhere():
    assert disagreement(str(model_directory("mini"))) is None


def test_a_custom_pre_tokenizer_is_detected(tmp_path: Path, caplog):
    mini = model_directory("mini")
    for name in ("config.json", "tokenizer_config.json", "tokenizer.json"):
        shutil.copy(mini / name, tmp_path / name)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?[A-Za-z]+?|\s|."), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "qwen2"
    found = disagreement(str(tmp_path))
    assert found is not None
    assert "Qwen2Tokenizer" in found
    with caplog.at_level(logging.WARNING):
        warn(str(tmp_path))
    assert str(tmp_path) in caplog.text


def test_names_on_the_hub_are_not_checked():
    assert disagreement("Qwen/Qwen2.5-Coder-0.5B-Instruct") is None
