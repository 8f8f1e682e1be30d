"""The rollouts of a run directory: found by step, score, failure, node, text and length."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from agentrig.run.rows import rollout_schema
from agentrig.view.reading import RolloutFile, Seen, columns_of, one_of, rollout_files, rollout_rows
from agentrig.view.rollout import COLUMNS

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow.compute import Expression

FIGURES = ("id", "task_id", "group", "failure", "value", "correct", "calls", "response_tokens", "nodes", "mode", "step")
"""The columns that are held in memory: a few hundred bytes a rollout."""

TEXTS = ("input", "answer", "message", "details", "replies")
"""The columns that are searched for a text; they are read when somebody searches."""


@attrs.frozen(kw_only=True)
class Filter:
    """Which rollouts to show; what is None or empty does not count.

    Attributes:
        mode: `train`, `validation`, `report` or `dev`.
        step: Only of this step, or with `last` only from this one on.
        score: `right`, `wrong`, `part`, `failed`, a range of values such as `0.2..0.8`, or one of each: `part 1..1`.
        node: A graph node that made a call.
        text: In the task's input, the answer, the replies, a failure's message or the reward's reasons; case counts
            not.
        shortest: Fewest sampled tokens.
        longest: Most sampled tokens.
        last: Only up to this step.
    """

    mode: str = ""
    step: int | None = None
    score: str = ""
    failure: str = ""
    node: str = ""
    text: str = ""
    shortest: int | None = None
    longest: int | None = None
    task: str = ""
    last: int | None = None

    def holds(self, file: RolloutFile) -> bool:
        """Whether it lets rollouts of a file's mode and step through."""
        if self.mode not in ("", file.mode):
            return False
        return self.step in (None, file.step) if self.last is None else (self.step or 0) <= file.step <= self.last

    @property
    def narrow(self) -> bool:
        """Whether it asks for more than a mode and a step."""
        return attrs.evolve(self, mode="", step=None) != Filter()

    def conditions(self) -> Iterator[Expression]:
        """Yield what it asks of the columns in memory, beside the mode and the step.

        Raises:
            ValueError: The score is neither a verdict nor a range.
        """
        import pyarrow.compute as pc

        for column, value in (("failure", self.failure), ("task_id", self.task)):
            if value:
                yield pc.field(column) == value
        if self.score:
            yield _scored(self.score)
        if self.shortest is not None:
            yield pc.field("response_tokens") >= self.shortest
        if self.longest is not None:
            yield pc.field("response_tokens") <= self.longest
        if self.node:
            yield pc.match_substring(pc.field("nodes"), json.dumps(self.node, ensure_ascii=False))


class Rollouts:
    """The rollouts of one run; a file is read when somebody asks for what is in it, or in the background."""

    def __init__(self, directory: Path) -> None:
        self._folder = directory / "rollouts"
        self._lock = threading.Lock()
        self._reader: threading.Thread | None = None
        self._files: dict[tuple[Path, tuple[int, int]], RolloutFile] = {}  # with the version of its content
        self._read: set[Path] = set()
        self._seen = Seen()

    def files(self) -> list[RolloutFile]:
        """Return the files that are there, in the order in which they were made."""
        order = {"report": 0, "validation": 1, "train": 2, "dev": 3}
        there = [self._files.setdefault((file.path, file.version), file) for file in rollout_files(self._folder)]
        return sorted(there, key=lambda f: (f.step, order.get(f.mode, 4)))

    def table(self, files: Sequence[RolloutFile] | None = None) -> pa.Table:
        """Return the rollouts of these files, of all by default, with the columns of `FIGURES`."""
        import pyarrow as pa

        tables = []
        for file in self.files() if files is None else files:
            with self._lock:  # for each file: a page waits for one, not for all that are read in the background
                tables.append(self._seen.of(file, _figures))
                self._read.add(file.path)
        none = pa.schema([rollout_schema(pa).field(name) for name in FIGURES]).empty_table()
        return pa.concat_tables([none, *filter(None, tables)])

    def read_all(self) -> None:
        """Begin to read all files in a thread, unless they are read or one is at it."""
        read, files = self.progress()
        if read < files and (self._reader is None or not self._reader.is_alive()):
            self._reader = threading.Thread(target=self.table, name="read the rollouts", daemon=True)
            self._reader.start()

    def progress(self) -> tuple[int, int]:
        """Return how many files are read, and how many there are."""
        paths = {file.path for file in self.files()}
        return len(paths & self._read), len(paths)

    def unreadable(self) -> list[str]:
        """Return which of the files that are read so far cannot be read, one sentence each."""
        return list(dict.fromkeys(text for file in self.files() for text in file.damage))

    def find(self, wanted: Filter) -> pa.Table:
        """Return the rollouts that a filter lets through; only the files of its mode and steps are read.

        Raises:
            ValueError: The filter's score is neither a verdict nor a range.
        """
        found = self.table([file for file in self.files() if wanted.holds(file)])
        for condition in wanted.conditions():
            found = found.filter(condition)
        return found.filter(one_of("id", self._with_text(found, wanted.text))) if wanted.text else found

    def values(self, column: str) -> list[str]:
        """Return the different values of a column, in order, in the files that are read so far."""
        return sorted(value for value in self.known()[column].unique().to_pylist() if value)

    def nodes(self) -> list[str]:
        """Return the names of the graph nodes that made calls, in the files that are read so far."""
        return sorted({name for text in self.values("nodes") for name in json.loads(text)})

    def row(self, id: str) -> dict[str, Any]:
        """Return a whole rollout.

        Raises:
            KeyError: There is none, or its file cannot be read.
        """
        files = self._files_of(self.known(), [id]) or self._files_of(self.table(), [id])
        for row in rollout_rows(files, COLUMNS, ids=[id]):
            return row
        raise KeyError(id)

    def inputs(self, ids: Sequence[str]) -> dict[str, Any]:
        """Return the task's input of some rollouts, by id."""
        files = self._files_of(self.known(), ids)
        return {row["id"]: row["input"] for row in rollout_rows(files, ("id", "input"), ids=ids)}

    def known(self) -> pa.Table:
        """Return `table` of the files that are read so far."""
        return self.table([file for file in self.files() if file.path in self._read])

    def _files_of(self, table: pa.Table, ids: Sequence[str] | None = None) -> list[RolloutFile]:
        some = table if ids is None else table.filter(one_of("id", ids))
        there = {(row["mode"], row["step"]) for row in some.group_by(["mode", "step"]).aggregate([]).to_pylist()}
        return [file for file in self.files() if (file.mode, file.step) in there]

    def _with_text(self, table: pa.Table, text: str) -> list[str]:
        """Return the ids of rollouts with a text, of the files of a table."""
        import pyarrow.compute as pc

        found: list[str] = []
        for texts in filter(None, (columns_of(file, ("id", *TEXTS)) for file in self._files_of(table))):
            for column in TEXTS:
                found += texts["id"].filter(pc.match_substring(texts[column], text, ignore_case=True)).to_pylist()
        return found


def _figures(file: RolloutFile) -> pa.Table | None:
    return columns_of(file, FIGURES)


def _scored(score: str) -> Expression:
    """Return what a verdict or a range asks of a rollout; `agentrig.view.reading.verdict` has the same rules."""
    import pyarrow.compute as pc

    value = pc.field("value")
    scored = pc.field("failure").is_null() & value.is_valid()
    right = pc.coalesce(pc.field("correct"), False)
    verdicts = {
        "right": scored & right,
        "failed": ~scored,
        "wrong": scored & ~right & (value <= 0),
        "part": scored & ~right & (value > 0),
    }
    word, _, rest = score.strip().partition(" ")
    if word in verdicts:
        if not rest:
            return verdicts[word]
        scored, score = verdicts[word], rest
    numbers = re.fullmatch(r"\s*(-?[\d.]*)\s*\.\.\s*(-?[\d.]*)\s*", score)
    if numbers is None:
        raise ValueError(f"{score!r} is no score: write {', '.join(verdicts)}, or a range such as 0.2..0.8")
    try:
        low, high = (float(text) if text else None for text in numbers.groups())
    except ValueError:
        raise ValueError(f"{score!r} is no range of scores: write two numbers, such as 0.2..0.8") from None
    if low is not None:
        scored = scored & (value >= low)
    return scored & (value <= high) if high is not None else scored
