from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentrig.run.checkpoints import copy_tokenizer

FILES = {
    "a fast one": ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"],
    "a BPE in two files": ["vocab.json", "merges.txt", "added_tokens.json", "tokenizer_config.json"],
    "SentencePiece": ["tokenizer.model", "tokenizer_config.json"],
    "SentencePiece of another name": ["spiece.model", "sentencepiece.bpe.model", "tokenizer_config.json"],
    "tiktoken": ["qwen.tiktoken", "tokenizer_config.json"],
    "several templates": ["tokenizer.json", "additional_chat_templates/tool_use.jinja"],
}
OTHERS = ["config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json", "README.md"]


@pytest.mark.parametrize("kind", FILES)
def test_only_the_tokenizers_files_are_copied_unchanged(tmp_path, kind):
    source, target = tmp_path / "model", tmp_path / "checkpoint"
    target.mkdir()
    for name in (*FILES[kind], *OTHERS):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(f"{name} as it was")
    (target / FILES[kind][0]).write_text("written by a trainer")
    copy_tokenizer(source, target)
    found = {str(file.relative_to(target)) for file in target.rglob("*") if file.is_file()}
    assert found == set(FILES[kind])
    assert all((target / name).read_text() == f"{name} as it was" for name in found)
    copy_tokenizer(target, target)
    assert (target / FILES[kind][0]).read_text() == f"{FILES[kind][0]} as it was"


@pytest.mark.parametrize("kind", ["Qwen2Tokenizer", "LlamaTokenizer", "T5Tokenizer", "GPT2Tokenizer", "BertTokenizer"])
def test_what_transformers_calls_a_vocabulary_is_copied(tmp_path, kind):
    """The list is checked against the file names that transformers' own classes declare."""
    import transformers

    names = {*getattr(transformers, kind).vocab_files_names.values(), "tokenizer_config.json"}
    source, target = tmp_path / "model", tmp_path / "checkpoint"
    for folder in (source, target):
        folder.mkdir()
    for name in names:
        (source / Path(name)).write_text(json.dumps(name))
    copy_tokenizer(source, target)
    assert {file.name for file in target.iterdir()} == names
