"""The starter's tokenizer: byte-level BPE with short pieces of words, for any text.

A word has the same tokens wherever it stands: no piece joins letters with a space, a quote or a bracket before them. So
copying a name is repeating tokens. Digits are single tokens, and so are the runs of punctuation that JSON is written
with.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from agentrig_grpo.own_tokenizer import CHAT_TEMPLATE, MARKS, SPECIAL, TOOLS, prepared, save_files
from starter_words import COMMON, KEYWORDS, SMALL, VERBS
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers

SPACE = "Ġ"
"""How byte-level BPE writes a space."""

PIECES = 586
"""Pieces of words that are learned from the common words."""

JSON_RUNS = (
    '{"', '":', '",', '"}', '":{"', '"},', '"}}', '"}}}', '"}}}}', '"]', '["', '[{"', '},', '}}', '}}}', '"}]', "}]",
    "[]", "{}", "()", "->", "=>", "==", "::", "...", "--", "||", '"],', "],", '."', '?"', '".', "),", ").", '")', '("',
)  # fmt: skip
"""Runs of punctuation with one token each, and each of them with a space before it too."""


def build() -> Tokenizer:
    """Return the tokenizer. It is made from word lists alone, so it is the same each time."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = _learned([*COMMON, *VERBS, *KEYWORDS], alphabet)
    for whole in [*KEYWORDS, *SMALL, *JSON_RUNS]:
        merges += _joined(whole, merges)
    for run in [*JSON_RUNS, *'"{[(:,=-+/*|<>#$']:
        merges.append((SPACE, run))
    merges = list(dict.fromkeys(merges))
    special = [*SPECIAL, *TOOLS]
    tokens = [*special, *alphabet, *(left + right for left, right in merges)]
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = prepared(Tokenizer(models.BPE(vocab=vocabulary, merges=merges)))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    return tokenizer


def _learned(words: Sequence[str], alphabet: Sequence[str]) -> list[tuple[str, str]]:
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + PIECES,
        min_frequency=1,
        initial_alphabet=list(alphabet),
        max_token_length=5,
        show_progress=False,
    )
    tokenizer = Tokenizer(models.BPE())
    # Each word apart, so that no piece spans two.
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(words, trainer)
    return [tuple(merge) for merge in json.loads(tokenizer.to_str())["model"]["merges"]]


def _joined(whole: str, merges: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the merges that are missing to make a string one token."""
    order = {merge: i for i, merge in reversed(list(enumerate(merges)))}
    parts, added = list(whole), []
    while len(parts) > 1:
        pairs = list(pairwise(parts))
        best = min(range(len(pairs)), key=lambda i: order.get(pairs[i], len(order) + i))
        if pairs[best] not in order:
            added.append(pairs[best])
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return added


def save(directory: Path, context: int) -> Any:
    """Write the tokenizer's files and return it as loaded from there."""
    return save_files(build(), directory, template=CHAT_TEMPLATE, context=context)
