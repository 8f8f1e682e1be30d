"""The rollouts of a run directory: found by step, score, failure, node, text and length."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from agentrig.correctness import CORRECT_AT
from agentrig.view.reading import RolloutFile, first_line, rollout_files

if TYPE_CHECKING:
    import polars as pl

LIGHT = {
    "id": "String", "task_id": "String", "group": "String", "failure": "String", "status": "String",
    "value": "Float64", "correct": "Boolean", "start": "Float64", "duration_s": "Float64", "version": "Int64",
    "calls": "Int64", "triplets": "Int64", "prompt_tokens": "Int64", "response_tokens": "Int64", "nodes": "String",
}  # fmt: skip
"""The columns that are held in memory, and their types: a few hundred bytes a rollout."""

TEXTS = ("input", "answer", "message", "details", "replies")
"""The columns that are searched for a text; they are read when somebody searches."""

MOST_TEXT = 64_000_000
"""Bytes of searched texts that are kept in memory; more than that is read again for each search."""


@attrs.frozen(kw_only=True)
class Filter:
    """Which rollouts to show; what is None or empty does not count.

    Attributes:
        mode: `train`, `validation`, `report` or `dev`.
        step: Only of this step.
        score: `right`, `wrong`, `part`, `failed`, or a range of values such as `0.2..0.8`.
        failure: A failure's kind.
        node: A graph node that made a call.
        text: In the task's input, the answer, the replies, a failure's message or the reward's reasons; case counts
            not.
        shortest: Fewest sampled tokens.
        longest: Most sampled tokens.
        task: A task's id.
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

    @property
    def narrow(self) -> bool:
        """Whether it asks for more than a mode and a step."""
        return attrs.evolve(self, mode="", step=None) != Filter()


class Rollouts:
    """The rollouts of one run; files that appear are read when somebody asks.

    Args:
        directory: The run directory.
    """

    def __init__(self, directory: Path) -> None:
        self._folder = directory / "rollouts"
        self._lock = threading.Lock()
        self._frames: dict[Path, tuple[tuple[int, int], pl.DataFrame]] = {}
        self._all: pl.DataFrame | None = None
        self._texts: dict[Path, tuple[tuple[int, int], pl.DataFrame]] = {}
        self.unreadable: dict[str, str] = {}

    def files(self) -> list[RolloutFile]:
        """Return the files that are there, in the order in which they were made."""
        order = {"report": 0, "validation": 1, "train": 2, "dev": 3}
        return sorted(rollout_files(self._folder), key=lambda f: (f.step, order.get(f.mode, 4)))

    def batches(self) -> list[tuple[str, int]]:
        """Return the modes and steps that have rollouts."""
        return [(file.mode, file.step) for file in self.files()]

    def table(self) -> pl.DataFrame:
        """Return all rollouts with the columns of `LIGHT`, `mode`, `step` and `place` (their row in the file)."""
        import polars as pl

        with self._lock:
            there, changed = set(), self._all is None
            for file in self.files():
                there.add(file.path)
                try:
                    found = file.path.stat()
                except OSError:
                    continue
                stamp = (found.st_mtime_ns, found.st_size)
                if file.path in self._frames and self._frames[file.path][0] == stamp:
                    continue
                changed = True
                try:
                    self._frames[file.path] = stamp, _read(file)
                    self.unreadable.pop(file.path.name, None)
                except (OSError, pl.exceptions.PolarsError) as error:
                    self.unreadable[file.path.name] = first_line(error)
            for gone in self._frames.keys() - there:
                del self._frames[gone]
                changed = True
            if changed or self._all is None:
                frames = [frame for _, frame in sorted(self._frames.values(), key=lambda kept: _order(kept[1]))]
                self._all = pl.concat(frames) if frames else _empty()
            return self._all

    def find(self, wanted: Filter) -> pl.DataFrame:
        """Return the rollouts that a filter lets through.

        Raises:
            ValueError: The filter's score is neither a verdict nor a range.
        """
        import polars as pl

        found = self.table()
        for column, value in (("mode", wanted.mode), ("failure", wanted.failure), ("task_id", wanted.task)):
            if value:
                found = found.filter(pl.col(column) == value)
        if wanted.step is not None:
            found = found.filter(pl.col("step") == wanted.step)
        if wanted.score:
            found = found.filter(_scored(wanted.score))
        if wanted.shortest is not None:
            found = found.filter(pl.col("response_tokens") >= wanted.shortest)
        if wanted.longest is not None:
            found = found.filter(pl.col("response_tokens") <= wanted.longest)
        if wanted.node:
            known = pl.col("nodes").str.contains(json.dumps(wanted.node), literal=True)
            ids = self._with_span(found.filter(pl.col("nodes").is_null()), wanted.node)
            found = found.filter(known.fill_null(False) | pl.col("id").is_in(ids))
        if wanted.text:
            found = found.filter(pl.col("id").is_in(self._with_text(found, wanted.text)))
        return found

    def nodes(self) -> list[str]:
        """Return the names of the graph nodes that made calls; empty for runs of earlier versions."""
        texts = self.table()["nodes"].drop_nulls().unique().to_list()
        return sorted({str(name) for text in texts for name in _list(text)})

    def row(self, id: str) -> dict[str, Any] | None:
        """Return a whole rollout, its JSON columns decoded; None if there is none."""
        import polars as pl

        file = self._file_of(id)
        if file is None:
            return None
        found = pl.scan_parquet(file.path).filter(pl.col("id") == id).collect().to_dicts()
        if not found:
            return None
        columns = ("components", "details", "second_rewards", "input", "answer", "spans")
        return {**found[0], **{key: _json(found[0].get(key)) for key in columns}, "mode": file.mode, "step": file.step}

    def inputs(self, ids: Sequence[str]) -> dict[str, Any]:
        """Return the task's input of some rollouts, by id."""
        import polars as pl

        table = self.table().filter(pl.col("id").is_in(ids))
        found: dict[str, Any] = {}
        for file in self._files_of(table):
            rows = pl.scan_parquet(file.path).filter(pl.col("id").is_in(ids)).select("id", "input").collect()
            found.update({id: _json(text) for id, text in rows.iter_rows()})
        return found

    def _file_of(self, id: str) -> RolloutFile | None:
        import polars as pl

        return next(self._files_of(self.table().filter(pl.col("id") == id)), None)

    def _files_of(self, table: pl.DataFrame) -> Iterator[RolloutFile]:
        wanted = set(table.select("mode", "step").unique().iter_rows())
        return (file for file in self.files() if (file.mode, file.step) in wanted)

    def _with_text(self, table: pl.DataFrame, text: str) -> list[str]:
        import polars as pl

        pattern = f"(?i){re.escape(text)}"
        some = pl.any_horizontal([pl.col(column).str.contains(pattern) for column in TEXTS])
        found: list[str] = []
        waiting: list[pl.DataFrame] = []
        for frame in (*self._texts_of(table), None):
            if frame is not None:
                waiting.append(frame)
            if waiting and (frame is None or len(waiting) == 64):  # one search costs as much as a file's reading
                found += pl.concat(waiting).filter(some)["id"].to_list()
                waiting.clear()
        return found

    def _texts_of(self, table: pl.DataFrame) -> Iterator[pl.DataFrame]:
        """Yield the texts of each file that has these rollouts; some are kept for the next search."""
        import pyarrow

        with self._lock:
            kept = self._texts = {path: held for path, held in self._texts.items() if path in self._frames}
            size = sum(frame.estimated_size() for _, frame in kept.values())
        for file in self._files_of(table):
            known = self._frames.get(file.path)
            if known is None:  # it has gone since
                continue
            stamp = known[0]
            if file.path in kept and kept[file.path][0] == stamp:
                yield kept[file.path][1]
                continue
            try:
                frame = _read_texts(file)
            except (OSError, pyarrow.ArrowException) as error:
                self.unreadable[file.path.name] = first_line(error)
                continue
            size += frame.estimated_size()
            if size <= MOST_TEXT:
                with self._lock:
                    kept[file.path] = stamp, frame
            yield frame

    def _with_span(self, table: pl.DataFrame, node: str) -> list[str]:
        """Search the spans of rollouts of earlier versions, whose nodes are written nowhere else."""
        import polars as pl

        name = re.escape(json.dumps(node))
        pattern = rf'"(langchain\.chain\.type|agent\.name)": ?{name}'
        found: list[str] = []
        for file in self._files_of(table):
            scan = pl.scan_parquet(file.path).filter(pl.col("spans").str.contains(pattern))
            found += scan.select("id").collect()["id"].to_list()
        return found


def _read(file: RolloutFile) -> pl.DataFrame:
    import polars as pl

    scan = pl.scan_parquet(file.path)
    there = scan.collect_schema().names()
    types = {name: getattr(pl, kind) for name, kind in LIGHT.items()}
    columns = [
        (pl.col(name) if name in there else pl.lit(None)).cast(kind, strict=False).alias(name)
        for name, kind in types.items()
    ]
    frame = scan.select(columns).collect()
    return frame.with_columns(
        mode=pl.lit(file.mode), step=pl.lit(file.step, dtype=pl.Int64), place=pl.int_range(pl.len(), dtype=pl.Int64)
    )


def _read_texts(file: RolloutFile) -> pl.DataFrame:
    """Return the ids and `TEXTS` of a file, which pyarrow reads in a third of the time that a scan takes."""
    import polars as pl
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(file.path) as parquet:
        there = [column for column in ("id", *TEXTS) if column in parquet.schema_arrow.names]
        frame = pl.DataFrame(parquet.read(columns=there, use_threads=False))
    return frame.select(
        pl.col("id").cast(pl.String),
        *((pl.col(c).cast(pl.String).fill_null("") if c in there else pl.lit("")).alias(c) for c in TEXTS),
    )


def _empty() -> pl.DataFrame:
    import polars as pl

    types = {name: getattr(pl, kind) for name, kind in LIGHT.items()}
    return pl.DataFrame(schema={**types, "mode": pl.String, "step": pl.Int64, "place": pl.Int64})


def _order(frame: pl.DataFrame) -> tuple[int, str]:
    return (frame["step"][0], frame["mode"][0]) if len(frame) else (0, "")


def _scored(score: str) -> pl.Expr:
    import polars as pl

    right = pl.col("correct").fill_null(pl.col("value") >= CORRECT_AT).fill_null(False) & pl.col("failure").is_null()
    failed = pl.col("failure").is_not_null() | pl.col("value").is_null()
    verdicts = {
        "right": right,
        "failed": failed,
        "wrong": ~right & ~failed & (pl.col("value") <= 0),
        "part": ~right & ~failed & (pl.col("value") > 0),
    }
    if score in verdicts:
        return verdicts[score]
    numbers = re.fullmatch(r"\s*(-?[\d.]*)\s*\.\.\s*(-?[\d.]*)\s*", score)
    if numbers is None:
        raise ValueError(f"{score!r} is no score: write {', '.join(verdicts)}, or a range such as 0.2..0.8")
    try:
        low, high = (float(text) if text else None for text in numbers.groups())
    except ValueError:
        raise ValueError(f"{score!r} is no range of scores: write two numbers, such as 0.2..0.8") from None
    found = ~failed
    if low is not None:
        found = found & (pl.col("value") >= low)
    return found & (pl.col("value") <= high) if high is not None else found


def _json(text: Any) -> Any:
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _list(text: str) -> Sequence[Any]:
    found = _json(text)
    return found if isinstance(found, list) else []
