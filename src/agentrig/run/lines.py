"""The lines of metrics of a run, held in memory as compressed text: as Python objects they take eight times as much."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, overload

Line = Mapping[str, Any]


class Lines(Sequence[Line]):
    """The steps' lines; each one is made again when it is asked for, so changes to it are not kept.

    Args:
        lines: The first ones.
    """

    def __init__(self, lines: Iterable[Line] = ()) -> None:
        self._packed = [_packed(line) for line in lines]

    def append(self, line: Line) -> None:
        """Add a step's line."""
        self._packed.append(_packed(line))

    def __len__(self) -> int:
        return len(self._packed)

    @overload
    def __getitem__(self, place: int) -> Line: ...

    @overload
    def __getitem__(self, place: slice) -> list[Line]: ...

    def __getitem__(self, place: int | slice) -> Line | list[Line]:
        if isinstance(place, slice):
            return [_line(each) for each in self._packed[place]]
        return _line(self._packed[place])


def _packed(line: Line) -> bytes:
    return zlib.compress(json.dumps(line, default=float).encode(), 1)


def _line(packed: bytes) -> Line:
    found: Line = json.loads(zlib.decompress(packed))
    return found
