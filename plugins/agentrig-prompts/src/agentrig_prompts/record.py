"""What a run of `gepa` has paid for: a line for each attempt at a task under some prompts, and for each reflection.

gepa is deterministic. So a resumed run lets it begin again, and answers from this file what was paid before: it comes to
where it was without a call, and goes on as if it had never ended.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrig.errors import RunFileError

FILE = "gepa.jsonl"


def digest_of(*values: Any) -> str:
    """Return a digest of JSON values."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


class Record:
    """The file, and the budget that its lines have used.

    Args:
        directory: The run directory.

    Attributes:
        calls: Rollouts that the model answered and reflections, as far as gepa has asked for them in this process.
        tokens: Their tokens.
        largest: Most tokens of one of them.
        excluded: Pairs of prompts and task that are left out: each attempt failed.

    Raises:
        RunFileError: The file is damaged.
    """

    def __init__(self, directory: Path) -> None:
        self.calls = self.tokens = self.largest = self.excluded = 0
        self._lines: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
        self._used: set[str] = set()
        self._file = directory / FILE
        text = self._file.read_bytes() if self._file.exists() else b""
        whole = text[: text.rfind(b"\n") + 1]
        if len(whole) < len(text):  # a crash came while a line was written
            with self._file.open("r+b") as file:
                file.truncate(len(whole))
        for line in whole.splitlines():
            try:
                found = json.loads(line)
                self._lines[found["key"]].append(found)
                int(found["calls"]), int(found["tokens"])
            except (ValueError, KeyError, TypeError) as error:
                raise RunFileError(f"{self._file} is damaged: {error!r}. Restore it, or start a new run") from None

    def of(self, key: str) -> Sequence[Mapping[str, Any]]:
        """Return the lines of a key; what they have cost counts from here on."""
        if key not in self._used:
            self._used.add(key)
            for line in self._lines[key]:
                self._count(line)
        return self._lines[key]

    def last(self, key: str) -> Mapping[str, Any] | None:
        """Return the line that settles a key, None if there is none yet."""
        lines = self.of(key)
        return lines[-1] if lines and lines[-1]["settled"] else None

    def add(self, key: str, *, calls: int, tokens: int, settled: bool, **more: Any) -> None:
        """Write a line."""
        self.of(key)
        line = {"key": key, "calls": calls, "tokens": tokens, "settled": settled, **more}
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self._lines[key].append(line)
        self._count(line)

    def _count(self, line: Mapping[str, Any]) -> None:
        self.calls += line["calls"]
        self.tokens += line["tokens"]
        self.largest = max(self.largest, line["tokens"])
        self.excluded += bool(line["settled"] and line.get("value", 0) is None)
