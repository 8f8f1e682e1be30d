"""A mapping of which some values are made only when somebody asks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any


class Deferred(Mapping[str, Any]):
    """A read-only mapping; each of its later values is made once, by the first who asks.

    Args:
        known: The values that are there already.
        later: Key to a function without arguments that makes its value. What it raises goes to who asked, and
            the next who asks calls it again.
    """

    def __init__(self, known: Mapping[str, Any], later: Mapping[str, Callable[[], Any]]) -> None:
        self._known, self._later = dict(known), dict(later)

    def __getitem__(self, key: str) -> Any:
        if key in self._later:
            self._known[key] = self._later[key]()
            del self._later[key]
        return self._known[key]

    def __iter__(self) -> Iterator[str]:
        return iter([*self._known, *self._later])

    def __len__(self) -> int:
        return len(self._known) + len(self._later)
