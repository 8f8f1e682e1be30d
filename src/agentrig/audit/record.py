"""What a run has written, read as it is: settings, metrics, rollouts with every call, and where each call went."""

from __future__ import annotations

import importlib.util
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs

from agentrig.audit.verdicts import CannotLook
from agentrig.errors import ConfigError, RunFileError
from agentrig.traces import LLM_CALL, SERVER, items, mapping

OTHERWISE = (
    "seed", "top_k", "min_p", "logit_bias", "frequency_penalty", "presence_penalty", "repetition_penalty", "min_tokens",
    "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "allowed_token_ids",
    "bad_words",
)  # fmt: skip
"""Fields of a request with which tokens are not samples of the stated distribution."""


NUMBERS = ("value", "advantage")
"""Columns with numbers; those that are read beside them hold text."""


@attrs.frozen(kw_only=True, eq=False)
class Call:
    """One answered call to the run's model, as its client sent it and got it.

    Attributes:
        rollout: The rollout's id.
        span: The id of its span.
        request: The JSON body that the client sent.
        response: The JSON body that it got.
        prompt: The prompt's token ids, from the server.
        reply: The sampled token ids, from the server.
        logprobs: Of each sampled token, from the server; None if it gave none.
        version: Of the weights, from the server; None if it gave none.
    """

    rollout: str
    span: str
    request: Mapping[str, Any]
    response: Mapping[str, Any]
    prompt: Sequence[int]
    reply: Sequence[int]
    logprobs: Sequence[float] | None
    version: int | None

    @property
    def name(self) -> str:
        """How a message names it."""
        return f"call {self.span} of rollout {self.rollout}"

    @property
    def choice(self) -> Mapping[str, Any]:
        """The first choice of the response."""
        choices = items(self.response.get("choices"))
        return mapping(choices[0]) if choices else {}

    @property
    def plain(self) -> bool:
        """Whether it was sampled from the whole distribution, with random numbers of its own."""
        form = self.request.get("response_format") or {"type": "text"}
        return mapping(form).get("type") == "text" and not any(self.request.get(key) for key in OTHERWISE)


@attrs.frozen(kw_only=True, eq=False)
class Row:
    """One rollout of a file: its columns, with JSON read, and its calls."""

    id: str
    task_id: str
    group: str
    failure: str | None
    status: str | None
    value: float | None
    correct: bool | None
    input: Any
    answer: Any
    own_reward: float | None
    version: int | None
    spans: Sequence[Mapping[str, Any]]
    calls: Sequence[Call]


@attrs.frozen(kw_only=True)
class Sources:
    """What the recipe names, built afresh.

    Attributes:
        splits: Role to the tasks of its split.
        score: Scores an outcome: from a task and a row to the status and the value.
        seconds: After which no further answer of a step is scored again.
    """

    splits: Mapping[str, Sequence[Any]]
    score: Any
    seconds: float = 5.0


def read_lines(path: Path) -> dict[int, Mapping[str, Any]]:
    """Return the lines of a run's `metrics.jsonl` by step; one that a crash has cut short is left out."""
    file = path / "metrics.jsonl"
    found: dict[int, Mapping[str, Any]] = {}
    for text in file.read_text("utf-8", "replace").splitlines() if file.is_file() else ():
        with suppress(ValueError, RecursionError):
            line = json.loads(text)
            if isinstance(line, dict) and isinstance(line.get("step"), int):
                found[line["step"]] = line
    return found


class Record:
    """A run directory.

    Args:
        path: The directory.
        lines: Its lines of metrics by step; None for those of its file.

    Raises:
        ConfigError: It has no `config.toml`.
    """

    def __init__(self, path: Path, lines: Mapping[int, Mapping[str, Any]] | None = None) -> None:
        self.path = path
        self._rows: dict[tuple[str, int], list[Row]] = {}
        try:
            self.config = tomllib.loads((path / "config.toml").read_text("utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"{path} is not a run directory: it has no config.toml") from None
        self.lines = read_lines(path) if lines is None else lines

    @property
    def settings(self) -> Mapping[str, Any]:
        """Section `[algorithm]`."""
        found: Mapping[str, Any] = self.config["algorithm"]
        return found

    @cached_property
    def knows_update(self) -> bool:
        """Whether the formulas of advantages, loss and update are known: those of `grpo`."""
        file = self.path / "manifest.json"
        told = json.loads(file.read_text("utf-8")) if file.is_file() else {}
        return "grpo" in (self.settings["use"], told.get("formulas"))

    def made(self, step: int) -> int:
        """Return how many updates the run had made before a step.

        Raises:
            CannotLook: It is not known, or what an update is.
        """
        if not self.knows_update:
            raise CannotLook(f"the formulas of {self.settings['use']} are not known here")
        if any(earlier not in self.lines for earlier in range(1, step)):
            raise CannotLook("the metrics of an earlier step are missing, so the number of updates is not known")
        return int(sum(line["algorithm"].get("updates", 0) for at, line in self.lines.items() if at < step))

    @cached_property
    def model(self) -> Path:
        """The directory of the starting model that the settings name.

        Raises:
            CannotLook: It is not on this machine.
        """
        name = str(self.settings.get("model", ""))
        given = Path(name).expanduser()
        if name and (given / "config.json").is_file():
            return given
        plugin = importlib.util.find_spec("agentrig_grpo")  # for the models that it ships; nothing of it is imported
        for folder in (plugin and plugin.submodule_search_locations) or ():
            if name and (Path(folder) / "models" / name / "config.json").is_file():
                return Path(folder) / "models" / name
        raise CannotLook(f"the starting model {name!r} is not on this machine")

    def checkpoint(self, step: int) -> Path | None:
        """Return the directory of the checkpoint of a step; None if it was not kept."""
        found = self.path / "checkpoints" / f"step-{step:05d}"
        return found if (found / "config.json").is_file() else None

    def dtype(self, step: int) -> str:
        """Return what the learner computes in; the coarser one if it does not say."""
        return str(self.lines[step].get("digests", {}).get("dtype", "bfloat16"))

    def files(self, mode: str) -> list[int]:
        """Return the steps that have a file of rollouts of a mode."""
        return sorted(int(f.stem.rpartition("-")[2]) for f in (self.path / "rollouts").glob(f"{mode}-*.parquet"))

    def rows(self, mode: str, step: int) -> list[Row]:
        """Return the rollouts of a mode and step; none without a file."""
        if (mode, step) not in self._rows:
            file = self.path / "rollouts" / f"{mode}-{step:05d}.parquet"
            with readable(file):
                self._rows[mode, step] = [_row(row) for row in _table(file)]
        return self._rows[mode, step]

    def calls(self, step: int) -> dict[tuple[str, str], Call]:
        """Return the calls of a step's rollouts, by rollout and span."""
        return {(call.rollout, call.span): call for row in self.rows("train", step) for call in row.calls}

    def columns(self, folder: str, step: int, *names: str) -> list[dict[str, Any]]:
        """Return columns of a step's file in `rollouts` or `calls` (where each call went, as the ledger says)."""
        file = self.path / folder / f"train-{step:05d}.parquet"
        with readable(file):
            return _table(file, list(names))

    def trained(self, step: int) -> dict[tuple[str, str], float]:
        """Return the advantage of each call that the algorithm took, by rollout and span."""
        rows = self.columns("calls", step, "rollout", "span", "advantage")
        return {(row["rollout"], row["span"]): row["advantage"] for row in rows if row["advantage"] is not None}


@contextmanager
def readable(file: Path) -> Iterator[None]:
    """Turn any error while a file of the record is read into one that names the file.

    Raises:
        RunFileError: Replaces the block's exception.
    """
    try:
        yield
    except Exception as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise RunFileError(f"{file} cannot be read: {why}") from error


def _table(file: Path, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Return the rows of a Parquet file; none without a file.

    Raises:
        OSError: It is no regular file.
        ValueError: It is damaged, it lacks one of the columns, or one has another type.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not file.exists():
        return []
    if not file.is_file():  # to read a pipe would wait for ever
        raise OSError("it is no regular file")
    there = pq.read_schema(file).names
    lacking = [name for name in columns or () if name not in there]
    if lacking:
        raise ValueError(f"it has no column {lacking[0]}")
    table = pq.read_table(file, columns=columns)
    if columns is not None:
        types = [(name, pa.float64() if name in NUMBERS else pa.string()) for name in columns]
        table = table.select(columns).cast(pa.schema(types))
    found: list[dict[str, Any]] = table.to_pylist()
    return found


def _row(row: Mapping[str, Any]) -> Row:
    spans = json.loads(row["spans"])
    calls = []
    for span in spans if isinstance(spans, list) else ():
        said = span["attributes"]
        answered = span["name"] == LLM_CALL and span["error"] is None and SERVER not in said
        if answered and said.get("prompt_token_ids") and said.get("response_token_ids"):
            response = mapping(said.get("response"))
            version = str(response.get("system_fingerprint", ""))
            calls.append(
                Call(
                    rollout=row["id"],
                    span=span["id"],
                    request=mapping(said.get("request")),
                    response=response,
                    prompt=said["prompt_token_ids"],
                    reply=said["response_token_ids"],
                    logprobs=said.get("response_logprobs"),
                    version=int(version[1:]) if version[:1] == "v" and version[1:].isdecimal() else None,
                )
            )
    plain = ("id", "task_id", "group", "failure", "status", "value", "correct", "own_reward", "version")
    read = {name: row[name] for name in plain}
    return Row(**read, input=json.loads(row["input"]), answer=json.loads(row["answer"]), spans=spans, calls=calls)
