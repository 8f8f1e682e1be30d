"""A tokenizer that transformers would replace is detected; the family's own tokenizer is accepted."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from agentrig_grpo.naming import model_directory
from agentrig_verl.algorithm import warn_of_tokenizer as warn
from tokenizers import Regex, Tokenizer, pre_tokenizers

from agentrig.tokenizers import disagreement


def test_a_custom_pre_tokenizer_is_detected(tmp_path: Path, caplog):
    mini = model_directory("mini")
    assert disagreement(str(mini)) is None
    assert disagreement("Qwen/Qwen2.5-Coder-0.5B-Instruct") is None, "names on the hub are not checked"
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
    assert "Qwen2Tokenizer" in (disagreement(str(tmp_path)) or "")
    with caplog.at_level(logging.WARNING):
        warn(str(tmp_path))
    assert str(tmp_path) in caplog.text
