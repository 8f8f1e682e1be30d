"""`mini`'s tokenizer: byte-level BPE in which every word of the task set is one token.

A model of a million parameters does not learn to copy a name that falls into pieces, so all words
are merged whole, first without and then with a space before them. Any other text falls into
smaller pieces, down to bytes; numbers into their digits.

Text is cut by Qwen2's own pattern: for every model of type `qwen2` transformers 5, and with it vLLM,
replaces the pattern in `tokenizer.json` with it, so any other would hold in agentrig alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentrig_grpo.checkpoint import TOKENIZER_CLASS, load_tokenizer
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX  # noqa: TID253  (a script)
from words import names, others, values

SPECIAL = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_SPACE = "Ġ"  # how byte-level BPE writes a space
_PLURAL = re.compile(r"(?<=[A-Za-z]{2}[a-hj-rtv-z])s$")
"""A plural's s stays a token of its own, so that `singers` begins with the token of the table `singer`."""
_PARTS = re.compile(r"s?[^s]+|s")


def build() -> Tokenizer:
    """Return the tokenizer. It is made from word lists alone, so it is the same each time."""
    words = list(dict.fromkeys(_singular(word) for word in [*others(), *names(), *values()]))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = _merges(["_id", *words])
    merges += [(_SPACE, piece) for piece in dict.fromkeys([*words, *"*(),=><'"])]
    tokens = [*SPECIAL, *alphabet, *(left + right for left, right in merges)]
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def _singular(word: str) -> str:
    return _PLURAL.sub("", word)


def _merges(words: Sequence[str]) -> list[tuple[str, str]]:
    """Return merges that make each word one token, and leave the s of its plural alone.

    Parts are merged first, and an s only ever begins one. So nothing joins the s at the end of a
    plural to the letters before it (as `ers`, which `person` would bring, does to `singers`) before
    those are the whole singular.
    """
    merges = _learned([part for word in words for part in _PARTS.findall(word)])
    for word in words:
        whole, *others = _PARTS.findall(word)
        for part in others:
            merges.append((whole, part))
            whole += part
    return list(dict.fromkeys(merges))


def _learned(parts: Sequence[str]) -> list[tuple[str, str]]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=100_000, min_frequency=1, initial_alphabet=alphabet, show_progress=False)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.train_from_iterator(parts, trainer)
    return [tuple(merge) for merge in json.loads(tokenizer.to_str())["model"]["merges"]]


def save(directory: Path) -> Any:
    """Write the tokenizer's files, as any version of transformers reads them, and return it as loaded from there."""
    directory.mkdir(parents=True, exist_ok=True)
    build().save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": TOKENIZER_CLASS,
        "eos_token": "<|end|>",
        "pad_token": "<|pad|>",
        # Without one, transformers' class for Qwen2 adds <|endoftext|>, an id beyond the vocabulary.
        "unk_token": "<|pad|>",
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", "utf-8")
    return load_tokenizer(directory)
