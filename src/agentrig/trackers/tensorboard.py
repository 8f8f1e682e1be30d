"""TensorBoard: scalars and texts in event files, by its own package; torch is not needed."""

from __future__ import annotations

import json
import re
import shlex
import time as clock
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agentrig.trackers.config import TensorBoardConfig
from agentrig.trackers.tracking import BINS, Ended, Sample, TrackedRun, required

TEXT = (".json", ".toml")
"""Files that TensorBoard can show, as text."""


class TensorBoard:
    """Writes event files; a resumed run hides what it does again."""

    def __init__(self, config: TensorBoardConfig) -> None:
        writer = required("tensorboard.summary.writer.event_file_writer", tracker="tensorboard")
        self._config, self._writer_class = config, writer.EventFileWriter
        self._events = required("tensorboard.compat.proto.event_pb2", tracker="tensorboard")
        self._summaries = required("tensorboard.compat.proto.summary_pb2", tracker="tensorboard")
        self._tensors = required("tensorboard.compat.proto.tensor_pb2", tracker="tensorboard")
        self._shapes = required("tensorboard.compat.proto.tensor_shape_pb2", tracker="tensorboard").TensorShapeProto
        self._types = required("tensorboard.compat.proto.types_pb2", tracker="tensorboard")
        self._writer: Any = None
        self._last = 0

    def start(self, run: TrackedRun) -> Mapping[str, str]:
        """Open an event file; steps from the first one on are those that come now."""
        folder = Path(self._config.directory) / run.name if self._config.directory else run.directory / "tensorboard"
        self._writer = self._writer_class(str(folder))
        if run.resumed:
            log = self._events.SessionLog(status=self._events.SessionLog.START)
            self._add(step=run.first_step, time=clock.time(), session_log=log)
        about = {"name": run.name, "tags": list(run.tags), **run.config}
        self._text("config", json.dumps(about, indent=2), step=0)
        return {"folder": str(folder), "command": shlex.join(["tensorboard", "--logdir", str(folder)])}

    def log(self, figures: Mapping[str, float], *, step: int, time: float) -> None:
        """Write scalars."""
        values = [self._summaries.Summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
        self._add(step=step, time=time, summary=self._summaries.Summary(value=values))
        self._last = step
        self._writer.flush()

    def rollouts(self, mode: str, rewards: Sequence[float], samples: Sequence[Sample], *, step: int) -> None:
        """Write a histogram, and a table of texts."""
        values = []
        if rewards:
            counts, edges = np.histogram(rewards, bins=BINS)
            histogram = self._summaries.HistogramProto(
                min=min(rewards), max=max(rewards), num=len(rewards), sum=sum(rewards),
                sum_squares=sum(reward**2 for reward in rewards),
                bucket_limit=edges[1:].tolist(), bucket=counts.tolist(),
            )  # fmt: skip
            values.append(self._summaries.Summary.Value(tag=f"{mode}/rewards", histo=histogram))
        if samples:
            rows = [list(Sample._fields), *([_plain(cell) for cell in sample] for sample in samples)]
            values.append(self._text_value(f"{mode}/samples", rows))
        self._add(step=step, time=clock.time(), summary=self._summaries.Summary(value=values))
        self._writer.flush()

    def attach(self, files: Sequence[Path]) -> None:
        """Write configuration, manifest and summary as texts; TensorBoard shows no pages."""
        for file in files:
            if file.suffix in TEXT:
                self._text(f"files/{file.name}", file.read_text("utf-8"), step=self._last)
        self._writer.flush()

    def checkpoint(self, folder: Path) -> None:
        """Do nothing: TensorBoard has no files."""

    def end(self, ended: Ended, error: str) -> None:
        """Say how the run ended, and close the file."""
        self._text("ended", f"{ended}: {error}" if error else ended, step=self._last)
        self._writer.close()

    def _text(self, tag: str, text: str, *, step: int) -> None:
        indented = "\n".join(f"    {line}" for line in text.splitlines())  # code in Markdown: shown as it is
        value = self._text_value(tag, [[indented]])
        self._add(step=step, time=clock.time(), summary=self._summaries.Summary(value=[value]))

    def _text_value(self, tag: str, rows: Sequence[Sequence[str]]) -> Any:
        """Return one text, or a table of texts, which TensorBoard shows as a table."""
        plugin = self._summaries.SummaryMetadata.PluginData(plugin_name="text")
        sizes = [len(rows), len(rows[0])] if len(rows) > 1 else []
        tensor = self._tensors.TensorProto(
            dtype=self._types.DT_STRING,
            tensor_shape=self._shapes(dim=[self._shapes.Dim(size=size) for size in sizes]),
            string_val=[cell.encode() for row in rows for cell in row],
        )
        return self._summaries.Summary.Value(
            tag=tag, metadata=self._summaries.SummaryMetadata(plugin_data=plugin), tensor=tensor
        )

    def _add(self, *, step: int, time: float, **what: Any) -> None:
        self._writer.add_event(self._events.Event(wall_time=time, step=step, **what))


def _plain(cell: str | float | None) -> str:
    """Return a cell as Markdown that shows it as it is."""
    text = "" if cell is None else cell if isinstance(cell, str) else f"{cell:g}"
    return re.sub(r"([\\`*_{}\[\]<>()#+.!|~-])", r"\\\1", " ".join(text.split()))
