"""What a search has paid for: a line for each rollout under some prompts, and for each reflection.

A search is deterministic. A resumed run lets it begin again and answers from this file what was paid before: it comes
to where it was without a call, and goes on as if it had never ended.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrig.errors import RunFileError

FILE = "search.jsonl"


def digest_of(*values: Any) -> str:
    """Return a digest of JSON values."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


class Record:
    """The file, and the budget that its lines have used.

    Attributes:
        calls: Rollouts that the model answered and reflections that the search has asked for in this process.
        tokens: Their tokens.
        largest: Most tokens of one of them.
        excluded: Tasks that are left out under some prompts, because every attempt failed.
    """

    def __init__(self, directory: Path) -> None:
        self.calls = self.tokens = self.largest = self.excluded = 0
        self._lines: dict[str, list[Mapping[str, Any]]] = {}
        self._asked: set[str] = set()
        self._file = directory / FILE
        self._file.touch()
        with self._file.open("r+b") as file:
            *whole, torn = file.read().split(b"\n")
            file.truncate(file.tell() - len(torn))  # a crash may have come while a line was written
        for number, read in enumerate(whole, 1):
            try:
                line = json.loads(read)
                kept = {**line, "calls": int(line["calls"]), "tokens": int(line["tokens"]), "settled": line["settled"]}
                self._lines.setdefault(line["key"], []).append(kept)
            except (ValueError, KeyError, TypeError) as error:
                why = f"lacks {error}" if isinstance(error, KeyError) else "is no JSON that a search wrote"
                what = f"{self._file}, line {number} {why}; delete that line: what it paid is paid again"
                raise RunFileError(what) from None

    def settled(self, key: str) -> Mapping[str, Any] | None:
        """Return the line that settles a key, None if there is none yet; from here on, its cost counts."""
        if key not in self._asked:
            self._asked.add(key)
            for line in self._lines.get(key, ()):
                self._count(line)
        return next((line for line in self._lines.get(key, ()) if line["settled"]), None)

    def add(self, key: str, *, calls: int, tokens: int, settled: bool, **more: Any) -> None:
        """Write a line."""
        line = {"key": key, "calls": calls, "tokens": tokens, "settled": settled, **more}
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self._lines.setdefault(key, []).append(line)
        self._count(line)

    def _count(self, line: Mapping[str, Any]) -> None:
        self.calls += line["calls"]
        self.tokens += line["tokens"]
        self.largest = max(self.largest, line["tokens"])
        self.excluded += line["settled"] and line.get("value", 0) is None
