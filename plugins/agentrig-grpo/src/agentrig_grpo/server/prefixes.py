"""Which kept prompt begins with the same tokens as a new one, so that only the rest goes through the model."""

from __future__ import annotations

from collections.abc import Iterator

Tokens = tuple[int, ...]

BLOCK = 8
"""Tokens of a block: prompts that agree in fewer share nothing."""


class Prefixes:
    """An index of prompts by their beginnings, in blocks of `BLOCK` tokens."""

    def __init__(self) -> None:
        self._ends: dict[int, Tokens] = {}

    def add(self, prompt: Tokens) -> None:
        """Take a prompt in; where another one has the same beginning, this one is found from now on."""
        for mark, _ in _marks(prompt):
            self._ends[mark] = prompt

    def remove(self, prompt: Tokens) -> None:
        """Forget a prompt."""
        for mark, _ in _marks(prompt):
            if self._ends.get(mark) is prompt:
                del self._ends[mark]

    def clear(self) -> None:
        """Forget all prompts."""
        self._ends.clear()

    def longest(self, prompt: Tokens) -> tuple[Tokens, int] | None:
        """Return a prompt that has many first tokens of this one, and how many; None without any.

        It is never all of them: the last token must go through the model, which then says what comes next.
        """
        found = None
        for mark, end in _marks(prompt):
            other = self._ends.get(mark)
            if other is None:
                break
            if other[:end] == prompt[:end]:  # two blocks can have the same hash
                found = other, end
        if found is None:
            return None
        other, same = found
        most = min(len(other), len(prompt) - 1)
        while same < most and other[same] == prompt[same]:
            same += 1
        return other, min(same, most)


def _marks(prompt: Tokens) -> Iterator[tuple[int, int]]:
    """Yield a number for the tokens up to the end of each whole block, and that end."""
    mark = 0
    for end in range(BLOCK, len(prompt) + 1, BLOCK):
        mark = hash((mark, prompt[end - BLOCK : end]))
        yield mark, end
