"""Rows cut into micro-batches: each row once, as many micro-batches as other ranks have."""

from __future__ import annotations

import numpy as np
import pytest
from agentrig_verl.micro_batches import cut, split
from agentrig_verl.rows import Row


def row(index: int, prompt: str, response: str) -> Row:
    ids = [[ord(letter) for letter in text] for text in (prompt, response)]
    trained = np.ones(len(response), dtype=bool)
    return Row(index=index, prompt_ids=ids[0], response_ids=ids[1], trained=trained, length=len(prompt + response) + 1)


ROWS = [row(0, "question", "yes"), row(1, "question", "no"), row(2, "other", "yes"), row(3, "x", ""), row(4, "y", "")]


def members(parts: list) -> list[list[int]]:
    return [[r.index for r in part.members] for part in parts]


def test_rows_that_share_tokens_lie_together_and_each_is_there_once() -> None:
    parts = cut(ROWS, 12)
    assert sorted(map(sorted, members(parts))) == [[0, 1], [2, 3, 4]]
    assert [part.pack.tokens for part in parts] == [5 + 2, 8 + 2 + 1]
    assert members(cut(ROWS, 1000)) == [[0, 1, 2, 3, 4]]


def test_rows_without_a_trained_token_are_one_cheap_pass() -> None:
    (part,) = cut(ROWS[3:], 1000)
    assert members([part]) == [[3, 4]]
    assert part.pack.tokens == 1


def test_more_micro_batches_have_the_same_rows_and_cost_little() -> None:
    parts = cut(ROWS, 1000)
    tokens = [sum(part.pack.tokens for part in parts)]
    while len(parts) < 5:
        parts = split(parts)
        assert sorted(i for part in members(parts) for i in part) == [0, 1, 2, 3, 4]
        tokens.append(sum(part.pack.tokens for part in parts))
    assert tokens[1] == tokens[0] + 1, "rows without a trained token are split off first"
    with pytest.raises(ValueError, match="the ranks have different numbers of rows"):
        split(parts)
