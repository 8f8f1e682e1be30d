"""The tokenizer: byte-level BPE behind Qwen2's own pre-tokenizer, in which a word's forms share their tokens.

transformers 5 and vLLM use that pre-tokenizer instead of any other for every model of type qwen2, so with another
one the model would be served other tokens than it was trained on.

A question says `singers`, the schema `Singer` or `stage_singer`. To BPE as usual these are unlike, and a model that is
made from nothing never learns of a rare word that they are the same. So here a word's first letter, together with the
space or underscore before it, is a token of its own, and so is a last `s`: what remains is the same in all three.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from agentrig_grpo.checkpoint import TOKENIZER_CLASS, load_tokenizer
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SPECIAL = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


_SPACE = "Ġ"  # how byte-level BPE writes a space
_SQL = """SELECT FROM WHERE JOIN ON GROUP BY ORDER HAVING COUNT AVG MAX MIN SUM DISTINCT DESC LIMIT AND OR NOT IN LIKE
    BETWEEN INTERSECT UNION EXCEPT AS"""
_PLAIN = """the of and what are is all for each with in that show find list give how many number which have has from to
    by their its do does than more most a an at least or not whose who return count me there different distinct name id
    names order any where no between above greater less over highest lowest average total maximum minimum also both
    descending ascending was were on as it one two three table select correct incorrect check"""
_SIGNS = "( ) * , . = < > <= >= <> ' - + / % ? ! : ; & $ #"


def build(texts: Iterable[str], size: int) -> Tokenizer:
    """Return a tokenizer of at most `size` tokens, learned from texts; words that most questions have are whole."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = [chr(c) for c in (*range(ord("a"), ord("z") + 1), *range(ord("A"), ord("Z") + 1))]
    merges = [(before, letter) for before in (_SPACE, "_") for letter in letters]
    merges += _learned(texts, alphabet, size - len(alphabet) - len(SPECIAL) - 800)
    words = f"{_SQL} {_PLAIN} {_PLAIN.title()} {_SIGNS}".split()
    whole = [*(_SPACE + word for word in words), *words, "...", "_id", "_ID", "ID", "Id"]
    learned = _tokenizer(merges, alphabet)
    for word in dict.fromkeys(whole):
        left, *rest = learned.encode(word.replace(_SPACE, " ")).tokens
        for right in rest:
            merges.append((left, right))
            left += right
    return _tokenizer(list(dict.fromkeys(merges)), alphabet)


def _tokenizer(merges: Sequence[tuple[str, str]], alphabet: Sequence[str]) -> Tokenizer:
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
    for left, right in merges:
        vocabulary.setdefault(left + right, len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
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


def _learned(texts: Iterable[str], alphabet: list[str], size: int) -> list[tuple[str, str]]:
    """Return the merges of what remains of words without first letters and last `s`."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", text))
    rests: Counter[str] = Counter()
    for word, count in counts.items():
        rest = word[1:]
        if rest.endswith("s") and not rest.endswith("ss"):
            rest = rest[:-1]
        if len(rest) > 1:
            rests[rest] += count
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, min_frequency=2, show_progress=False)
    tokenizer = Tokenizer(models.BPE())
    # Of a word that is everywhere fifty are enough.
    tokenizer.train_from_iterator((r for rest, n in sorted(rests.items()) for r in [rest] * min(n, 50)), trainer)
    known = set(alphabet)
    kept = []
    for left, right in map(tuple, json.loads(tokenizer.to_str())["model"]["merges"]):
        # One that ends in an s would swallow the plural's.
        if left in known and right in known and not (right.endswith("s") and len(left + right) > 2):
            known.add(left + right)
            kept.append((left, right))
    return kept


def save(tokenizer: Tokenizer, directory: Path, *, length: int) -> Any:
    """Write the tokenizer's files, as any version of transformers reads them, and return it as loaded from there."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": TOKENIZER_CLASS,
        "eos_token": "<|end|>",
        "pad_token": "<|pad|>",
        # Without one, transformers' class for Qwen2 adds <|endoftext|>, an id beyond the vocabulary.
        "unk_token": "<|pad|>",
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": length,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", "utf-8")
    return load_tokenizer(directory)


def served_alike(model: Path, tokenizer: Any, texts: Sequence[str]) -> bool:
    """Return whether a model's loader, which knows the type qwen2, cuts texts into the same tokens.

    Args:
        model: Directory with the tokenizer and a `config.json`.
        tokenizer: As loaded from its `tokenizer.json` alone.
        texts: To cut.
    """
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(str(model), local_files_only=True)
    ids = [t(list(texts), add_special_tokens=False)["input_ids"] for t in (loaded, tokenizer)]
    return ids[0] == ids[1] and len(loaded) == len(tokenizer)
