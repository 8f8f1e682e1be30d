"""TensorBoard: scalars and texts in event files, by its own package; torch is not needed."""

from __future__ import annotations

import json
import shlex
import time as clock
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrig.trackers.config import TensorBoardConfig
from agentrig.trackers.tracking import Ended, TrackedRun, required

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
        metadata = self._summaries.SummaryMetadata(
            plugin_data=self._summaries.SummaryMetadata.PluginData(plugin_name="text")
        )
        indented = "\n".join(f"    {line}" for line in text.splitlines())  # code in Markdown: shown as it is
        tensor = self._tensors.TensorProto(dtype=self._types.DT_STRING, string_val=[indented.encode()])
        value = self._summaries.Summary.Value(tag=tag, metadata=metadata, tensor=tensor)
        self._add(step=step, time=clock.time(), summary=self._summaries.Summary(value=[value]))

    def _add(self, *, step: int, time: float, **what: Any) -> None:
        self._writer.add_event(self._events.Event(wall_time=time, step=step, **what))
