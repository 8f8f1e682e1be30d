"""The sampled tokens of a call as text, with the probability of each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from agentrig.text import cut
from agentrig.view.reading import RunData

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MOST_TOKENS = 4000
"""Tokens of a call that a page shows one by one."""


@attrs.frozen
class Token:
    """One sampled token.

    Attributes:
        text: What it adds to the text; its id in brackets where no tokenizer is known.
        probability: Under the model that sampled it; None if the server gave none.
    """

    text: str
    probability: float | None

    @property
    def level(self) -> int:
        """0 for a probability below 10%, up to 9; 9 if it is not known."""
        return 9 if self.probability is None else min(9, int(10 * self.probability))


def tokenizer_of(run: RunData) -> tuple[Tokenizer | None, str]:
    """Return a run's tokenizer, and '' or what is known of why there is none.

    It is that of a checkpoint, else that of the run's model; None if neither is here or can be read.
    """
    damaged = []
    for file in _places(run):
        try:
            found = _read(file, file.stat().st_mtime_ns)
        except OSError:
            continue
        if not isinstance(found, str):
            return found, ""
        damaged.append(found)
    return None, "; ".join(damaged) or "the run's tokenizer is not here"


@cache
def _read(file: Path, changed: int) -> Tokenizer | str:
    """Return the tokenizer of a file, or what is wrong with it; it is read again if the time of its change differs."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare exceptions for files that it can't read
        return f"the run's tokenizer {file} is damaged: {cut(str(error), 200)}"


def tokens_of(attributes: Mapping[str, Any], tokenizer: Tokenizer | None, most: int = MOST_TOKENS) -> list[Token]:
    """Return the sampled tokens of a call, the first `most` of them."""
    ids = attributes.get("response_token_ids")
    ids = [i for i in ids if isinstance(i, int) and 0 <= i < 1 << 32] if isinstance(ids, list) else []
    given = attributes.get("response_logprobs")
    logprobs: Sequence[Any] = given if isinstance(given, list) and len(given) == len(ids) else [None] * len(ids)
    ids = ids[:most]
    return [
        Token(text, _probability(logprob))
        for text, logprob in zip(_texts(ids, tokenizer), logprobs[: len(ids)], strict=True)
    ]


def _texts(ids: Sequence[int], tokenizer: Tokenizer | None) -> list[str]:
    """Return what each token adds to the text; a character of several tokens comes with the last of them."""
    if tokenizer is None:
        return [f"[{i}]" for i in ids]
    found: list[str] = []
    open_ids, before = [], ""
    for place, i in enumerate(ids, 1):
        open_ids.append(i)
        text = tokenizer.decode(open_ids, skip_special_tokens=False)
        if text.endswith("\ufffd") and len(open_ids) < 8 and place < len(ids):
            found.append("")
            continue
        found.append(text[len(before) :])
        # Decode from a few tokens back: some tokenizers drop a space at the start.
        open_ids = open_ids[-4:]
        before = tokenizer.decode(open_ids, skip_special_tokens=False)
    return found


def _probability(logprob: Any) -> float | None:
    if isinstance(logprob, bool) or not isinstance(logprob, (int, float)) or math.isnan(logprob):
        return None
    return math.exp(min(0.0, logprob))


def _places(run: RunData) -> list[Path]:
    checkpoints = run.directory / "checkpoints"
    found = sorted(checkpoints.glob("*/tokenizer.json")) + sorted(checkpoints.glob("*/*/tokenizer.json"))
    stated = (run.setting("algorithm", "model"), run.manifest.get("model"))
    return found + [Path(model) / "tokenizer.json" for model in stated if isinstance(model, str) and model]
