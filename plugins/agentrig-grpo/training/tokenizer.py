"""`mini`'s tokenizer: byte-level BPE in which every word of the task set is one token.

A model of a million parameters does not learn to copy a name that falls into pieces, so all words
are merged whole, first without and then with a space before them. Any other text falls into
smaller pieces, down to bytes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from agentrig_grpo.checkpoint import TOKENIZER_CLASS, load_tokenizer
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from words import names, others, values

SPECIAL = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_SPACE = "Ġ"  # how byte-level BPE writes a space
# Words, numbers and signs, each with the space before it; the plural's s is a piece of its own.
_PLURAL = r"(?<=[A-Za-z]{2}[a-hj-rtv-z])s\b"
_PIECES = rf"_id\b|{_PLURAL}| ?[A-Za-z]+?(?={_PLURAL})| ?[A-Za-z]+| ?[0-9]+|\n| ?[^ A-Za-z0-9\n]| +"


def build() -> Tokenizer:
    """Return the tokenizer. It is made from word lists alone, so it is the same each time."""
    numbers = [str(i) for i in range(100)]
    bare = list(dict.fromkeys(["_id", *others(), *names(), *values(), *numbers]))
    merges, vocabulary = _merges([piece for word in bare for piece in _split(word)])
    after_space = [*others(), *names(), *values(), *numbers, *"*(),=><'"]
    for piece in dict.fromkeys(piece for word in after_space for piece in _split(word)):
        if _SPACE + piece not in vocabulary:
            merges.append((_SPACE, piece))
            vocabulary[_SPACE + piece] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def _split(word: str) -> list[str]:
    splitter = pre_tokenizers.Split(Regex(_PIECES), "isolated")
    return [piece for piece, _ in splitter.pre_tokenize_str(word)]


def _merges(words: list[str]) -> tuple[list[tuple[str, str]], dict[str, int]]:
    """Return merges that make each word one token, and the vocabulary, special tokens and bytes first."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
    trainer = trainers.BpeTrainer(vocab_size=100_000, min_frequency=1, initial_alphabet=alphabet, show_progress=False)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.train_from_iterator(words, trainer)
    learned = [tuple(merge) for merge in _model_of(tokenizer)["merges"]]
    for left, right in learned:
        vocabulary.setdefault(left + right, len(vocabulary))
    return learned, vocabulary


def _model_of(tokenizer: Tokenizer) -> Any:
    return json.loads(tokenizer.to_str())["model"]


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
