"""`mini`'s tokenizer: byte-level BPE in which every word of the task set is one token.

A model of a million parameters does not learn to copy a name that falls into pieces, so all words
are merged whole, first without and then with a space before them. Any other text falls into
smaller pieces, down to bytes; numbers into their digits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentrig_grpo.own_tokenizer import CHAT_TEMPLATE, SPECIAL, prepared, save_files
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from words import names, others, values

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
    tokenizer = prepared(Tokenizer(models.BPE(vocab=vocabulary, merges=merges)))
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
    """Write the tokenizer's files and return it as loaded from there."""
    return save_files(build(), directory, template=CHAT_TEMPLATE, context=512)
