"""Small tokenizers: byte-level BPE with special tokens for chats, in files that any version of transformers reads.

Text is cut by Qwen2's own pattern: for every model of type `qwen2` transformers 5, and with it vLLM, replaces the
pattern in `tokenizer.json` with it, so any other would hold in agentrig alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX  # noqa: TID253  (a starting model only)

from agentrig_grpo.checkpoint import TOKENIZER_CLASS, load_tokenizer

SPECIAL = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
TOOLS = ("<|tool|>", "<|tools|>")
"""Special tokens of chats with tools."""

MARKS = ("<tool_call>", "</tool_call>")
"""Around a call of a tool; part of the text that a server returns, so not special."""

CHAT_TEMPLATE = (
    "{% if tools %}<|tools|>{% for tool in tools %}{{ tool['function'] | tojson }}\n{% endfor %}{% endif %}"
    "{% for message in messages %}"
    "<|{{ 'system' if message['role'] == 'developer' else message['role'] }}|>{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}<tool_call>\n"
    "{\"name\": {{ call['function']['name'] | tojson }}, \"arguments\": "
    "{{ call['function']['arguments'] if call['function']['arguments'] is string else "
    "call['function']['arguments'] | tojson }}}\n</tool_call>{% endfor %}"
    "{% if message['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Calls of tools are written as Qwen's and Hermes' models write them."""

RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": "<|end|>", "content": "text"},
    },
}
"""How `transformers serve` reads a reply; without it, it takes Qwen2's marks, and returns the prompt with the reply."""


def prepared(tokenizer: Tokenizer) -> Tokenizer:
    """Give a BPE tokenizer the normalizer, the pattern and the decoder that all of these share."""
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def save_trained(directory: Path, *, texts: Sequence[str], vocabulary: int, context: int) -> Any:
    """Write a tokenizer learned from texts, and return it as loaded from there.

    Args:
        directory: Is made if it does not exist.
        texts: What its tokens are learned from. Other text falls into smaller pieces, down to bytes.
        vocabulary: Most tokens; 0 for one token a byte.
        context: `model_max_length`, in tokens.
    """
    special = [*SPECIAL, *TOOLS]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocabulary:
        tokenizer = prepared(Tokenizer(models.BPE()))
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary - len(MARKS),
            min_frequency=2,
            initial_alphabet=alphabet,
            special_tokens=special,
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
    else:
        known = {token: i for i, token in enumerate([*special, *alphabet])}
        tokenizer = prepared(Tokenizer(models.BPE(vocab=known, merges=[])))
        tokenizer.add_special_tokens(special)
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    return save_files(tokenizer, directory, template=CHAT_TEMPLATE, context=context)


def save_files(tokenizer: Tokenizer, directory: Path, *, template: str, context: int) -> Any:
    """Write a tokenizer's files, as any version of transformers reads them, and return it as loaded from there."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": TOKENIZER_CLASS,
        "eos_token": "<|end|>",
        "pad_token": "<|pad|>",
        # Without one, transformers' class for Qwen2 adds <|endoftext|>, an id beyond the vocabulary.
        "unk_token": "<|pad|>",
        "chat_template": template,
        "response_template": RESPONSE_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", "utf-8")
    return load_tokenizer(directory)
