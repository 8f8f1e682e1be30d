"""What a run has written, read as it is: settings, metrics, rollouts with every call, and where each call went."""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import json
import math
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import attrs

from agentrig.audit.verdicts import CannotLook
from agentrig.endpoints import LIMIT
from agentrig.errors import ConfigError, RunFileError
from agentrig.text import check_regular, read_fault, read_text
from agentrig.traces import GIVEN, HANDED, LLM_CALL, RETURNED, SENT, SERVER, items, mapping, weights_version

OTHERWISE = (
    "seed", "top_k", "min_p", "logit_bias", "frequency_penalty", "presence_penalty", "repetition_penalty", "min_tokens",
    "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "allowed_token_ids",
    "bad_words",
)  # fmt: skip
"""Fields of a request with which tokens are not samples of the stated distribution."""

CONTENT = ("messages", "model", "user", "metadata", "stream", "stream_options")
"""Fields of a request that change no sampling, or are compared by themselves."""

COLUMNS = (
    "id", "task_id", "group", "failure", "status", "value", "correct", "own_reward", "root", "input", "answer", "spans",
    "call_values",
)  # fmt: skip
"""Columns of a file of rollouts; the last four hold JSON."""


@attrs.frozen(kw_only=True, eq=False)
class Call:
    """One answered call to the run's model: the rollout's id, its span's id, and the JSON that its client sent and got.

    Prompt and reply are token ids as the server stated them, `logprobs` those of the reply and `version` that of the
    weights; None if it stated none. `sent` and `handed` are digests of the messages that the client sent and of the one
    that it got (`agentrig.traces.message_digest`), taken beside the record; None where none was, as for a call through
    the gateway, or for the reply of a stream.
    """

    rollout: str
    span: str
    request: Mapping[str, Any]
    response: Mapping[str, Any]
    prompt: Sequence[int]
    reply: Sequence[int]
    logprobs: Sequence[float] | None
    version: int | None
    sent: str | None = None
    handed: str | None = None

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
    def asked(self) -> str:
        """The text of its messages."""
        parts = [mapping(message).get("content") for message in items(self.request.get("messages"))]
        return "\n".join(part if isinstance(part, str) else json.dumps(part, ensure_ascii=False) for part in parts)

    @property
    def answered(self) -> str:
        """The text of its reply, and the arguments of its tool calls."""
        message = mapping(self.choice.get("message"))
        tools = [mapping(mapping(one).get("function")).get("arguments") for one in items(message.get("tool_calls"))]
        return "\n".join(str(part or "") for part in (message.get("content"), *tools))

    @property
    def asks(self) -> Mapping[str, Any]:
        """The fields of its request besides messages and model; of a seed only that there is one."""
        return {k: v if k != "seed" else "set" for k, v in self.request.items() if k not in CONTENT and v is not None}

    @property
    def limit(self) -> int | None:
        """The most tokens that its reply may have, as the request says."""
        return min((n for key in LIMIT if isinstance(n := self.request.get(key), int)), default=None)

    @property
    def otherwise(self) -> Sequence[str]:
        """The fields of its request with which it has not the whole distribution, or no random numbers of its own."""
        form = self.request.get("response_format") or {"type": "text"}
        free = mapping(form).get("type") == "text"
        found = [key for key in OTHERWISE if (value := self.request.get(key)) or (key == "seed" and value is not None)]
        return found if free else [*found, "response_format"]

    @property
    def plain(self) -> bool:
        """Whether it was sampled from the whole distribution, with random numbers of its own."""
        return not self.otherwise


@attrs.frozen(kw_only=True, eq=False)
class Row:
    """One rollout of a file: its columns, with JSON read, and its calls.

    `call_values` are the rewards of `Trace.llm_calls()`, if the reward gives any. `given` and `returned` are the
    runner's digests of the agent's input and of what it returned (`agentrig.traces.value_digest`); None where it took
    none. `root` is that of its task.
    """

    id: str
    task_id: str
    group: str
    failure: str | None
    status: str | None
    value: float | None
    correct: bool | None
    own_reward: float | None
    input: Any
    answer: Any
    spans: Sequence[Mapping[str, Any]]
    calls: Sequence[Call]
    given: str | None = None
    returned: str | None = None
    call_values: Sequence[float | None] = ()
    root: str | None = None

    @cached_property
    def said(self) -> str:
        """The text of all its replies."""
        return "\n".join(call.answered for call in self.calls)

    @property
    def first_call(self) -> Call | None:
        """Its first call; None if another model, or the run's without its token ids, replied before."""
        answered = (span["id"] for span in self.spans if span["name"] == LLM_CALL and span["error"] is None)
        first = next(answered, None)
        return next((call for call in self.calls if call.span == first), None)


class Group(NamedTuple):
    """The rollouts of one task in a step: their rewards, None of what was not scored, and whether all are correct."""

    task: str
    rewards: Sequence[float | None]
    correct: bool


@attrs.frozen(kw_only=True)
class Sources:
    """What the recipe names, built afresh.

    Attributes:
        splits: Role to the tasks of its split; of a held-out one all of them, whatever `run.report_tasks` says.
        score: Scores an outcome: from a task and a row to the status and the value.
        seconds: After which no further answer of a step is scored again.
        used: Role to the private parts, as `value_digest` has them, of the tasks that the run began with, by task id;
            empty if they are not known.
        again: Loads the tasks of all roles once more.
        under: Returns the sources that other settings name, those of before a resume.
        digest: Returns the digest of named tensors that metrics.jsonl has of each step's weights.
        weights: Whether the run trains weights.
        whole_rows: Whether the agent gets whole rows, with their gold.
    """

    splits: Mapping[str, Sequence[Any]]
    score: Any
    seconds: float = 5.0
    used: Mapping[str, Mapping[str, str | None]] = {}
    again: Callable[[], Mapping[str, Sequence[Any]]] | None = None
    under: Callable[[Mapping[str, Any]], Sources] | None = None
    digest: Callable[[Mapping[str, Any]], str] | None = None
    weights: bool = True
    whole_rows: bool = False


TASKS = "tasks"
"""`algorithm.demonstrations` of a run that learns its training tasks; any other is a run or a file."""

IMITATED: Mapping[str, Any] = {
    **{"group_size": 1, "temperature": 1.0, "top_p": 1.0, "max_staleness": 0, "loss": "cross-entropy"},
    **{"clip_low": 0.2, "clip_high": 0.28, "rollout_is_threshold": 2.0},  # without effect: there is no ratio
}
"""What no setting says where demonstrations are learned: one rollout a task, and plain cross-entropy."""


class Record:
    """A run directory, with the settings that it has now; see `at`.

    Attributes:
        lines: Its lines of metrics by step; one that a crash has cut short is left out.
        config: All settings.
        settings: Those of `[algorithm]`.

    Raises:
        ConfigError: It has no `config.toml`.
        RunFileError: That file is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        file = path / "config.toml"
        if not file.exists():
            raise ConfigError(f"{path} is not a run directory: it has no config.toml")
        with readable(file, "Restore it from a copy, for example from the section config of manifest.json"):
            text = read_text(file).removeprefix("\N{BYTE ORDER MARK}")
            if not text.strip():
                raise ValueError("it is empty")
            self.config: Mapping[str, Any] = tomllib.loads(text)
            self.settings = _settings(self.config)
        self._now = self
        self.lines: dict[int, Mapping[str, Any]] = {}
        self._groups: dict[int, Sequence[Group]] = {}
        file = path / "metrics.jsonl"
        for text in file.read_text("utf-8", "replace").splitlines() if file.is_file() else ():
            with suppress(ValueError, RecursionError):
                line = json.loads(text)
                if isinstance(line, dict) and isinstance(line.get("step"), int):
                    self.lines[line["step"]] = line

    @cached_property
    def _manifest(self) -> Mapping[str, Any]:
        file = self.path / "manifest.json"
        return mapping(json.loads(file.read_text("utf-8"))) if file.is_file() else {}

    def at(self, step: int, *, ended: bool = False) -> Record:
        """Return the record with the settings that a step was made with, 0 for what was measured before training.

        A resume may change settings: the manifest has those of before (`changes`).

        Args:
            ended: With the settings of the measurement after training that followed on the step.
        """
        changes = [mapping(each) for each in items(self._now._manifest.get("changes"))]
        kept = (step, False) if ended else (step - 1, True)  # the last that holds already
        later = [c for c in changes if isinstance(c.get("after"), int) and (c["after"], bool(c.get("ended"))) > kept]
        if not later:
            return self._now
        found = copy.copy(self._now)  # with the same lines and groups
        found.__dict__.pop("model", None)
        manifest, config = dict(found._manifest), dict(found.config)
        for change in reversed(later):
            config = _over(config, change.get("config"))
            manifest["components"] = _over(mapping(manifest.get("components")), change.get("components"))
            manifest["formulas"] = change.get("formulas", manifest.get("formulas"))
        found.config, found.settings, found.__dict__["_manifest"] = config, _settings(config), manifest
        return found

    @property
    def began(self) -> float:
        """When the run began, or was resumed, in Unix time: the end of that second; infinite if it is not known."""
        try:
            return datetime.fromisoformat(str(self._manifest.get("created"))).timestamp() + 1
        except ValueError:
            return math.inf

    def data(self, role: str) -> Mapping[str, Any]:
        """Return what the manifest has of the tasks of a role: how many there were, and their fingerprint."""
        return mapping(mapping(self._manifest.get("data")).get(role))

    @property
    def on_cpu(self) -> bool:
        """Whether it trained on the CPU."""
        return bool(mapping(self.config.get("hardware")).get("use") == "cpu")

    @property
    def demonstrations(self) -> str:
        """Where it learns demonstrations from; '' if it samples its rollouts."""
        return str(mapping(self.config.get("algorithm")).get("demonstrations", ""))

    @property
    def knows_update(self) -> bool:
        """Whether sampling of tasks, loss and update are those of `grpo`."""
        return "update" in (self._manifest.get("formulas") or ("update",) * (self.settings["use"] == "grpo"))

    @property
    def resumed(self) -> bool:
        """Whether the run was continued after an end."""
        return bool(self._manifest.get("resumed"))

    @property
    def credit(self) -> tuple[str, Mapping[str, Any]]:
        """The name of the credit and its settings; '' instead of the name if it is none of agentrig's own."""
        if self.demonstrations:
            return "demonstrations", {}
        keys = self.config["credit"]
        told = mapping(mapping(self._manifest.get("components")).get("credit")).get("distribution", "agentrig")
        return str(keys["use"]).rpartition(":")[2] if told == "agentrig" else "", keys

    @cached_property
    def model(self) -> Path:
        """The directory of the starting model that the settings name.

        Of another run's checkpoint that holds adapters it is `.model`, what that run's trainer has merged.
        """
        name = str(self.settings.get("model", ""))
        plugin = importlib.util.find_spec("agentrig_grpo")  # for the models that it ships; nothing of it is imported
        shipped = [Path(folder) / "models" / name for folder in (plugin and plugin.submodule_search_locations) or ()]
        for folder in (Path(name).expanduser(), *shipped):
            folder = folder / ".model" if (folder / "starting_model.json").is_file() else folder
            if name and (folder / "config.json").is_file():
                return folder
        raise CannotLook(f"the starting model {name!r} is not on this machine")

    @property
    def progress(self) -> Mapping[str, Any]:
        """What `progress.json` holds now, of a run at work too; nothing if it is not there."""
        file = self.path / "progress.json"
        with readable(file):
            return mapping(json.loads(file.read_text("utf-8"))) if file.is_file() else {}

    def digests(self, version: int) -> Mapping[str, Any]:
        """Return what the run recorded of a version's weights: `weights`, their digest, and the `dtype` of its step."""
        if not version:
            return {"weights": self.progress.get("start_weights", "")}
        return mapping(self.lines.get(version, {}).get("digests"))

    def stated(self, folder: str, mode: str, step: int) -> str | None:
        """Return the SHA-256 of a file as the run wrote it; None if it is not known.

        A resumed run measures the validation of its checkpoint again, and states that only with its next checkpoint.
        """
        stated = mapping(self.lines.get(step, {}).get("files")).get("calls" if folder == "calls" else mode)
        if mode == "report":
            stated = mapping(self.progress.get("files")).get(f"{folder}/{mode}-{step:05d}.parquet")
        return stated if isinstance(stated, str) and not (mode == "validation" and self.resumed) else None

    def steps(self, mode: str) -> list[int]:
        """Return the steps that have a file of rollouts of a mode."""
        return sorted(int(f.stem.rpartition("-")[2]) for f in (self.path / "rollouts").glob(f"{mode}-*.parquet"))

    def groups(self, step: int) -> Sequence[Group]:
        """Return the groups of a training step; none without a file. It is read once: every later step looks again."""
        if not self._groups.get(step):
            rows = defaultdict[str, list[dict[str, Any]]](list)
            for row in self.table("rollouts", "train", step, "group", "task_id", "value", "correct"):
                rows[row["group"]].append(row)
            self._groups[step] = [
                Group(of[0]["task_id"], [row["value"] for row in of], all(row["correct"] for row in of))
                for of in rows.values()
            ]
        return self._groups[step]

    def limit(self, mode: str, step: int) -> int:
        """Return of how many tasks a measurement was to be, 0 for all: as its file says, else as the settings do."""
        import pyarrow.parquet as pq

        file = self.path / "rollouts" / f"{mode}-{step:05d}.parquet"
        with readable(file):
            stated = (pq.read_schema(file).metadata or {}).get(b"tasks")
            return int(mapping(self.config.get("run")).get(f"{mode}_tasks", 0) if stated is None else stated)

    def rows(self, mode: str, step: int) -> list[Row]:
        """Return the rollouts of a mode and step; none without a file."""
        table = self.table("rollouts", mode, step, *COLUMNS)
        with readable(self.path / "rollouts" / f"{mode}-{step:05d}.parquet"):
            return [_row(row) for row in table]

    def table(self, folder: str, mode: str, step: int, *columns: str) -> list[dict[str, Any]]:
        """Return columns of a step's file in `rollouts` or `calls` (where each call went); no rows without a file.

        Raises:
            RunFileError: The file is gone, damaged or changed, it lacks one of the columns, or one has another type.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        types = {"value": pa.float64(), "advantage": pa.float64(), "own_reward": pa.float64(), "correct": pa.bool_()}
        file = self.path / folder / f"{mode}-{step:05d}.parquet"
        if not file.exists():
            if self.stated(folder, mode, step) is not None:
                raise RunFileError(f"{file} is gone, and the run wrote it: restore it from a copy")
            return []
        with readable(file):
            there = pq.read_schema(file).names
            if lacking := [name for name in columns if name not in there]:
                raise ValueError(f"it has no column {lacking[0]}")
            schema = pa.schema([(name, types.get(name, pa.string())) for name in columns])
            read = pq.read_table(file, columns=list(columns)).select(columns).cast(schema)
            found: list[dict[str, Any]] = read.to_pylist()
            state = file.stat()
        stated = self.stated(folder, mode, step)
        if stated is not None and _digest(file, state.st_ino, state.st_size, state.st_mtime_ns) != stated:
            raise RunFileError(f"{file} was changed since the run wrote it: restore it from a copy")
        return found


def _settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of `[algorithm]`, with those that nobody sets where demonstrations are learned."""
    own = config["algorithm"]
    return {**(IMITATED if own.get("demonstrations") else {}), **own}


def _over(sections: Mapping[str, Any], was: Any) -> dict[str, Any]:
    """Return sections with the keys that they had before; None is a key that was not there."""
    found = dict(sections)
    for name, keys in mapping(was).items():
        merged = {**mapping(found.get(name)), **mapping(keys)}
        found[name] = {key: value for key, value in merged.items() if value is not None}
    return found


@contextmanager
def readable(file: Path, cure: str = "") -> Iterator[None]:
    """Turn any error while a file of the record is read into one that names the file.

    Raises:
        RunFileError: Replaces the block's exception.
    """
    try:
        check_regular(file)
        yield
    except Exception as error:
        raise RunFileError(f"{file} cannot be read: {read_fault(error)}{cure and f'. {cure}'}") from error


@lru_cache(1 << 10)
def _digest(file: Path, *_state: int) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _row(row: Mapping[str, Any]) -> Row:
    read = {**row, **{name: json.loads(row[name]) for name in COLUMNS[-4:]}}
    calls, spans = [], items(read["spans"])
    root = mapping(spans[0]["attributes"]) if spans else {}
    for span in spans:
        said = span["attributes"]
        answered = span["name"] == LLM_CALL and span["error"] is None and SERVER not in said
        if answered and said.get("prompt_token_ids") and said.get("response_token_ids"):
            response = mapping(said.get("response"))
            call = Call(
                rollout=row["id"],
                span=span["id"],
                request=mapping(said.get("request")),
                response=response,
                prompt=said["prompt_token_ids"],
                reply=said["response_token_ids"],
                logprobs=said.get("response_logprobs"),
                version=weights_version(response),
                sent=said.get(SENT),
                handed=said.get(HANDED),
            )
            calls.append(call)
    return Row(**read, calls=calls, given=root.get(GIVEN), returned=root.get(RETURNED))
