"""A run in a notebook: its figures, rollouts and traces as pandas frames, its plots and its diagnosis inline."""

from __future__ import annotations

import base64
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs
from markupsafe import Markup

from agentrig.errors import AgentrigError, extra, nearest
from agentrig.figures import amount, number, percent
from agentrig.run.damage import writing
from agentrig.text import flat
from agentrig.traces import LLM_CALL, Trace, items, reply_of
from agentrig.view import figures
from agentrig.view.diagnosis import Diagnosis, diagnose
from agentrig.view.html import templates
from agentrig.view.page import of_diagnosis
from agentrig.view.png import FILES, draw
from agentrig.view.reading import SECOND, RolloutFile, RunData, mapping, read_run, rollout_rows, spans_of

COLUMNS = (
    "id", "task_id", "group", "failure", "message", "status", "value", "correct", "components", "details",
    "call_values", SECOND, "input", "answer", "own_reward", "start", "duration_s", "reward_s", "version", "calls",
    "truncated", "triplets", "prompt_tokens", "response_tokens",
)  # fmt: skip
"""The columns of a frame of rollouts, after `mode` and `step`; those that a run has not recorded are empty."""


@attrs.frozen
class Plot:
    """A plot of the report; a notebook shows it."""

    name: str
    png: bytes = attrs.field(repr=False)

    def _repr_png_(self) -> bytes:
        return self.png

    def save(self, path: Path | str) -> Path:
        """Write the picture as PNG; return where.

        Raises:
            RunFileError: It cannot be written.
        """
        target = Path(path)
        with writing(target):
            target.write_bytes(self.png)
        return target


class LoadedRun:
    """A run directory, read when it is asked for; `load_run` makes it.

    It reads only. What is missing or damaged is left out, and `missing` lists it. Frames are pandas DataFrames.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data: RunData = read_run(path)
        self._spanless: list[str] = []

    def __repr__(self) -> str:
        return f"<run {self.data.name}: {figures.status(self.data)}, {amount(self.data.done, 'step')}>"

    def reload(self) -> LoadedRun:
        """Read the directory again, for a run that goes on; return the run."""
        self.data = read_run(self.path, self.data.seen)
        self.__dict__.pop("diagnosis", None)
        return self

    @property
    def config(self) -> Mapping[str, Any]:
        """The configuration: section to keys."""
        return self.data.config

    @property
    def manifest(self) -> Mapping[str, Any]:
        """Versions, data, hardware."""
        return self.data.manifest

    @property
    def summary(self) -> Mapping[str, Any]:
        """The content of `summary.json`; empty until the run has ended."""
        return self.data.summary

    @property
    def missing(self) -> list[str]:
        """What is missing or cannot be read, one sentence each; it grows as more is read."""
        return list(dict.fromkeys([*self.data.missing, *self.data.damage, *self._spanless]))

    @cached_property
    def diagnosis(self) -> Diagnosis:
        """What held learning back; `agentrig why` prints the same."""
        return diagnose(self.data)

    @property
    def steps(self) -> Any:
        """A frame with one row for each step, by its number: the lines of `metrics.jsonl`, inner keys with dots.

        Raises:
            AgentrigError: pandas is not installed.
        """
        lines = ({key: value for key, value in line.items() if key != "digests"} for line in self.data.steps)
        rows = [dict(flat(line)) for line in lines]
        frame = _pandas().DataFrame(rows)
        return frame.set_index("step") if rows else frame

    def rollouts(self, mode: str | None = None, step: int | None = None) -> Any:
        """Return a frame with one row for each rollout; `COLUMNS` names its columns.

        Args:
            mode: `train`, `validation` or `report`; None for all.
            step: The step; None for all.

        Raises:
            AgentrigError: pandas is not installed, or the run has no such mode.
        """
        columns = ("mode", "step", *COLUMNS)
        return self._frame(rollout_rows(self._files(mode, step), COLUMNS), columns)

    def traces(self, mode: str | None = None, step: int | None = None, ids: Sequence[str] | None = None) -> Any:
        """Return a frame with one row for each span; `SPAN_COLUMNS` names its columns.

        Args:
            mode: `train`, `validation` or `report`; None for all.
            step: The step; None for all. All traces of a long run do not fit into memory.
            ids: Only the rollouts with these ids.

        Raises:
            AgentrigError: pandas is not installed, or the run has no such mode.
        """
        rows = rollout_rows(self._files(mode, step), ("id", "task_id", "spans"), ids=ids)
        return self._frame((span for row in rows for span in self._spans(row)), SPAN_COLUMNS)

    def plot(self, name: str) -> Plot:
        """Return a plot of the report.

        Args:
            name: `accuracy`, `reward`, `time` or `lengths`.

        Raises:
            AgentrigError: There is no plot of that name, or nothing to draw yet.
        """
        if name not in FILES:
            raise AgentrigError(f'there is no plot "{name}".{nearest(name, FILES)} Plots: {", ".join(FILES)}')
        drawn = draw([self.data], name)
        if drawn is None:
            raise AgentrigError(f'there is nothing to draw yet for the plot "{name}" of {self.path}')
        return Plot(name, drawn)

    def plots(self) -> list[Plot]:
        """Return all plots of the report that have something to draw."""
        drawn = {name: draw([self.data], name) for name in FILES}
        return [Plot(name, found) for name, found in drawn.items() if found is not None]

    def _repr_html_(self) -> str:
        """Show the run: accuracy, what held learning back, plots."""
        data, accuracy = self.data, figures.held_out(self.data)["accuracy"]
        parts = [
            Markup("<h3>{}</h3><p>{}, {}; held-out accuracy {} → {} %</p>").format(
                data.name,
                figures.status(data),
                amount(data.done, "step"),
                percent(accuracy["before"]),
                percent(accuracy["after"]),
            )
        ]
        told = of_diagnosis(self.diagnosis) | {"missing": self.missing}
        page: Any = templates().get_template("parts.html.j2").module
        parts.append(page.why(told))
        for plot in self.plots():
            source = f"data:image/png;base64,{base64.b64encode(plot.png).decode()}"
            parts.append(Markup('<img alt="{} plot" width="620" src="{}">').format(plot.name, source))
        return str(Markup("\n").join(parts))

    def _files(self, mode: str | None, step: int | None) -> list[RolloutFile]:
        modes = dict.fromkeys(file.mode for file in self.data.files)
        if mode is not None and mode not in modes:
            there = ", ".join(modes) or "none"
            raise AgentrigError(f'{self.path} has no rollouts of the mode "{mode}"; modes with rollouts: {there}')
        files = sorted(self.data.files, key=lambda file: (file.mode, file.step))
        return [f for f in files if mode in (None, f.mode) and step in (None, f.step)]

    def _spans(self, row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        if not isinstance(row["spans"], list):
            self._spanless.append(f"the spans of rollout {row['id']} cannot be read")
            return
        trace = Trace(rollout_id=str(row["id"]), spans=spans_of(row["spans"]))
        recorded = [span for span in row["spans"] if isinstance(span, Mapping)]
        for given, span in zip(recorded, trace.spans, strict=True):
            yield _span_row(row, given, span.node or next(iter(trace.nodes(span)), None))

    def _frame(self, rows: Iterator[dict[str, Any]], columns: Sequence[str]) -> Any:
        pandas = _pandas()
        before = set(self.missing)
        frame = pandas.DataFrame(list(rows), columns=list(columns))
        for text in self.missing:
            if text not in before:
                warnings.warn(text, stacklevel=3)
        return frame


SPAN_COLUMNS = (
    "rollout", "task_id", "mode", "step", "id", "parent", "name", "node", "start", "seconds", "error", "finish_reason",
    "prompt_tokens", "response_tokens", "reply", "attributes",
)  # fmt: skip
"""The columns of a frame of spans; the last ones are of calls to the model, and `attributes` has everything."""


def _span_row(row: Mapping[str, Any], span: Mapping[str, Any], node: str | None) -> dict[str, Any]:
    attributes = mapping(span.get("attributes"))
    start, end = number(span.get("start")), number(span.get("end"))
    call = span.get("name") == LLM_CALL
    return {
        "rollout": row["id"],
        "task_id": row["task_id"],
        "mode": row["mode"],
        "step": row["step"],
        **{key: span.get(key) for key in ("id", "parent", "name", "start", "error")},
        "node": node,
        "seconds": None if start is None or end is None else end - start,
        "finish_reason": attributes.get("finish_reason"),
        "prompt_tokens": len(items(attributes.get("prompt_token_ids"))) if call else None,
        "response_tokens": len(items(attributes.get("response_token_ids"))) if call else None,
        "reply": reply_of(attributes) if call else None,
        "attributes": dict(attributes),
    }


def _pandas() -> Any:
    with extra("notebook", "frames need pandas"):
        import pandas
    return pandas


def load_run(path: Path | str) -> LoadedRun:
    """Return a run directory for a notebook: see `agentrig.load_run`."""
    return LoadedRun(Path(path))
