"""The run directory: everything that happened in a run, on disk."""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import json
import os
import platform
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from agentrig.algorithms import Rollout
from agentrig.checkpoints import Checkpoints
from agentrig.config import Plan, to_toml
from agentrig.damage import read_object, reading, writing
from agentrig.errors import ConfigError, RunInUse
from agentrig.files import append_line, put, write_whole
from agentrig.hardware import Hardware
from agentrig.locks import Lock
from agentrig.rewards import Score
from agentrig.tasks import Task, fingerprint
from agentrig.text import json_text, storable
from agentrig.traces import Span

FORMAT = 1
"""Of run directories; a later one is refused. Manifests of the first version name none."""

ROLLOUTS = re.compile(r"[a-z]+-\d+\.parquet")
"""What a file of rollouts is called: `MODE-STEP.parquet`; others in that folder are somebody's own."""

LONGEST_NAME = 200
"""Bytes of a run's name; file systems end at 255, and files beside it have longer ones."""

PACKAGES = (
    "torch", "transformers", "agentlightning", "langgraph", "langchain-openai", "openai", "verl", "vllm", "ray",
    "tensordict", "TransferQueue", "litellm", "opentelemetry-sdk", "peft",
)  # fmt: skip


class RunDirectory:
    """One run's files; see `docs/report.md` for each.

    Args:
        path: The directory; made when it is not there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        for part in ("rollouts", "checkpoints", "plots"):
            with writing(path / part):
                (path / part).mkdir(parents=True, exist_ok=True)
        self.checkpoints = Checkpoints(path / "checkpoints")
        self._lock = Lock(path / "run.lock")

    @classmethod
    def create(cls, plan: Plan) -> RunDirectory:
        """Make a fresh directory for a run, locked; runs without a `run.name` that start at once get one each.

        Raises:
            ConfigError: The name would not do, or a run of that name is there already.
            RunInUse: A run of that name is just being made.
        """
        parent = Path(plan.run.directory)
        name = run_name(plan)
        with writing(parent):
            parent.mkdir(parents=True, exist_ok=True)
            path = parent / name if plan.run.name else _own_folder(parent, name)
        _check_vacant(path)
        run = cls(path)
        run.lock()
        _check_vacant(path)  # another one may have come and gone since
        run.write("config.toml", to_toml(plan.as_dict()))
        return run

    def lock(self) -> None:
        """Keep other runs out of this directory until `release`, or until this process ends.

        Raises:
            RunInUse: A living process works in it; the message says which.
        """
        with writing(self._lock.path):
            taken = self._lock.take()
        if not taken:
            raise RunInUse(f"a run is at work in {self.path}: {self._lock.holder()}. Wait for its end, or end it")

    def release(self) -> None:
        """Let other runs into this directory."""
        self._lock.release()

    def write(self, name: str, text: str) -> None:
        """Write a file whole or not at all; it is on the disk when this returns."""
        with writing(self.path / name):
            write_whole(self.path / name, storable(text))

    def write_json(self, name: str, value: Any) -> None:
        """Write a JSON file whole or not at all."""
        self.write(name, json.dumps(value, indent=2, default=str) + "\n")

    def read_json(self, name: str) -> Any:
        """Return the object that a JSON file holds; an empty one when it is not there.

        Raises:
            RunFileError: It is damaged; the message says what to do.
        """
        return read_object(self.path / name)

    def append_metrics(self, line: Mapping[str, Any]) -> None:
        """Add a step's line to `metrics.jsonl`."""
        with writing(self.path / "metrics.jsonl"):
            append_line(self.path / "metrics.jsonl", json.dumps(line, default=float))

    def metrics(self) -> list[dict[str, Any]]:
        """Return the lines of `metrics.jsonl`; a last line cut short by a crash is left out."""
        return read_metrics(self.path / "metrics.jsonl")[0]

    def rewind(self, step: int) -> list[dict[str, Any]]:
        """Forget what happened after a step's checkpoint, for a resumed run; return the metrics that stay.

        What was measured at the end of the run, after that checkpoint, goes too.
        """
        kept = [line for line in self.metrics() if line["step"] <= step]
        self.checkpoints.drop_after(step)
        self.write("metrics.jsonl", "".join(json.dumps(line) + "\n" for line in kept))
        for file in (self.path / "rollouts").iterdir():
            if file.suffix == ".part" or (ROLLOUTS.fullmatch(file.name) and not _stays(file, step)):
                file.unlink()
        for part in self.path.glob(".*.part"):
            part.unlink()
        return kept

    def measured(self, step: int) -> dict[str, int]:
        """Return how many rollouts nothing was learned from, by failure; `""` for those without.

        Args:
            step: Of its checkpoint; what `rewind` would forget is not counted.
        """
        import pyarrow.parquet as pq

        found: Counter[str] = Counter()
        for file in (self.path / "rollouts").glob("*.parquet"):
            if ROLLOUTS.fullmatch(file.name) and not file.name.startswith("train-") and _stays(file, step):
                with reading(file, "Remove it: its rollouts then go uncounted among the run's failures"):
                    kinds = pq.read_table(file, columns=["failure"])["failure"].to_pylist()
                found.update(kind or "" for kind in kinds)
        return dict(found)

    def write_rollouts(
        self, rollouts: Sequence[Rollout], *, mode: str, step: int, audits: Mapping[str, Score] | None = None
    ) -> None:
        """Write a step's rollouts as Parquet; private parts of tasks stay out.

        Args:
            rollouts: All of a mode and step.
            mode: Of the rollouts.
            step: Of the rollouts.
            audits: Rollout id to the score of the audit reward, where there is one.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = pa.Table.from_pylist([row_of(r, (audits or {}).get(r.id)) for r in rollouts], schema=_schema(pa))
        target = self.path / "rollouts" / f"{mode}-{step:05d}.parquet"
        part = target.with_suffix(".part")
        with writing(target):
            pq.write_table(table, part, compression="zstd")
            put(part, target)

    def save_checkpoint(self, step: int, write: Callable[[Path], None], *, keep: bool) -> Path:
        """Let `write` fill a checkpoint, make it the latest, and drop old ones."""
        with writing(self.checkpoints.path(step)):
            return self.checkpoints.save(step, write, keep=keep)

    def latest_checkpoint(self) -> tuple[Path | None, int]:
        """Return the latest checkpoint and its step, or (None, 0)."""
        return self.checkpoints.latest()


def run_name(plan: Plan) -> str:
    """Return the name of a new run's directory: `run.name`, or one of recipe and time.

    Raises:
        ConfigError: It is no plain name of a folder.
    """
    name = plan.run.name or f"{plan.recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
    wrong = None
    if any(c in name for c in {"/", "\\", os.sep}):
        wrong = "it holds a path; say where runs are made by run.directory"
    elif name in (".", "..") or name.startswith((".", "-")):
        wrong = 'it begins with "." or "-"'
    elif name != name.strip() or not name.isprintable():
        wrong = "it holds blanks at an end, or characters that cannot be shown"
    elif len(os.fsencode(name)) > LONGEST_NAME:
        wrong = f"it is longer than {LONGEST_NAME} bytes"
    if wrong:
        raise ConfigError(f"run.name = {name!r} cannot name a run's folder: {wrong}")
    return name


def _check_vacant(path: Path) -> None:
    if (path / "config.toml").exists():
        raise ConfigError(
            f"there is a run in {path} already; go on with it by --resume {path}, or give another run.name"
        )


def _own_folder(parent: Path, name: str) -> Path:
    """Make a folder that nobody else has made: of that name, or with -2, -3 … behind it."""
    for n in itertools.count(1):
        path = parent / (name if n == 1 else f"{name}-{n}")
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            return path
    raise AssertionError


def _stays(file: Path, step: int) -> bool:
    """Whether a file of rollouts is of the time before a step's checkpoint; the end's measurement is after it."""
    mode, _, of = file.stem.rpartition("-")
    return int(of) < step if mode == "report" and step else int(of) <= step


def read_metrics(file: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """Read `metrics.jsonl`.

    Returns:
        The lines that hold a step, and the numbers, from 1, of those that are damaged or cut short.
    """
    lines: list[dict[str, Any]] = []
    damaged = []
    with contextlib.suppress(FileNotFoundError), reading(file):
        for i, text in enumerate(file.read_text("utf-8", errors="replace").split("\n"), 1):
            if not text.strip():
                continue
            try:
                line = json.loads(text)
            except json.JSONDecodeError:
                line = None
            if isinstance(line, dict) and isinstance(line.get("step"), int):
                lines.append(line)
            else:
                damaged.append(i)
    return lines, damaged


def manifest(plan: Plan, hardware: Hardware, splits: Mapping[str, tuple[str, Sequence[Task]]]) -> dict[str, Any]:
    """Return what makes a run reproducible: versions, components, seeds, data, hardware."""
    probe = hardware.probe()
    return {
        "format": FORMAT,
        "agentrig": _version("agentrig"),
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "recipe": plan.recipe,
        "config": plan.as_dict(),
        "seed": plan.run.seed,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "hardware": {
            "name": hardware.name,
            "devices": [attrs.asdict(d) for d in probe.devices],
            "evidence": list(probe.evidence),
        },
        "plugins": [
            {"name": p.name, "distribution": p.distribution, "version": p.version, "status": p.status, "error": p.error}
            for p in plan.registry.plugins
        ],
        "components": {
            kind: {"name": c.spec.name, "distribution": c.distribution, "version": c.version}
            for kind, c in plan.components.items()
        },
        "packages": dict(_versions()),
        "data": {
            role: {"split": split, "tasks": len(tasks), "fingerprint": fingerprint(tasks)}
            for role, (split, tasks) in splits.items()
        },
        "model": getattr(plan.configs["algorithm"], "model", None),
    }


def manifest_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return warnings about what a resumed run does not find as it was: data, plugins, hardware."""
    changes = []
    for role, now in after["data"].items():
        was = before.get("data", {}).get(role, now)
        if was["fingerprint"] != now["fingerprint"]:
            changes.append(f"the {role} tasks (split {now['split']}) are not those that this run began with")
    versions = {kind: c["version"] for kind, c in before.get("components", {}).items()}
    for kind, c in after["components"].items():
        if versions.get(kind, c["version"]) != c["version"]:
            changes.append(f"{kind} {c['name']} is {c['version']} now; this run began with {versions[kind]}")
    hardware = before.get("hardware", after["hardware"])["name"]
    if hardware != after["hardware"]["name"]:
        changes.append(f"this run began on {hardware} and goes on on {after['hardware']['name']}")
    return changes


def _versions() -> Iterator[tuple[str, str]]:
    for name in PACKAGES:
        version = _version(name)
        if version is not None:
            yield name, version


def agentrig_version() -> str | None:
    """Return the version of this agentrig."""
    return _version("agentrig")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _span(s: Span) -> dict[str, Any]:
    # not attrs.asdict: it would copy every token id one by one
    return {
        "id": s.id,
        "parent": s.parent,
        "name": s.name,
        "start": s.start,
        "end": s.end,
        "error": s.error,
        "attributes": s.attributes,
    }


def _verdict(score: Score) -> dict[str, Any]:
    return {
        "status": score.status,
        "value": score.value,
        "components": dict(score.components),
        "details": dict(score.details),
        "correct": score.correct,
    }


def row_of(r: Rollout, audit: Score | None = None) -> dict[str, Any]:
    """Return a rollout as a row of the Parquet files; its task's private part stays out."""
    score = r.score
    return {
        "id": r.id,
        "task_id": r.task.id,
        "group": r.group,
        "mode": r.mode,
        "step": r.step,
        "failure": r.failure,
        "message": storable(r.outcome.message) or None,
        "status": score.status if score else None,
        "value": score.value if score else None,
        "correct": r.correct,
        "components": json_text(dict(score.components) if score else {}),
        "details": json_text(dict(score.details) if score else {}),
        "audit": json_text(_verdict(audit)) if audit else None,
        "input": json_text(dict(r.task.input)),
        "answer": json_text(r.outcome.answer),
        "start": r.start,
        "duration_s": r.duration_s,
        "reward_s": r.reward_s,
        "calls": len(r.trace.llm_calls()),
        "triplets": len(r.triplets),
        "prompt_tokens": sum(len(t.prompt_ids) for t in r.triplets),
        "response_tokens": sum(len(t.response_ids) for t in r.triplets),
        "spans": json_text([_span(s) for s in r.trace.spans]),
    }


def _schema(pa: Any) -> Any:
    text, number, count = pa.string(), pa.float64(), pa.int64()
    types = {
        "id": text, "task_id": text, "group": text, "mode": text, "step": count, "failure": text, "message": text,
        "status": text, "value": number, "correct": pa.bool_(), "components": text, "details": text, "audit": text,
        "input": text, "answer": text, "start": number, "duration_s": number, "reward_s": number, "calls": count,
        "triplets": count, "prompt_tokens": count, "response_tokens": count, "spans": text,
    }  # fmt: skip
    return pa.schema(list(types.items()))
