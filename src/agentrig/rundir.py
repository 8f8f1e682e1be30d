"""The run directory: everything that happened in a run, on disk."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from agentrig.algorithms import Rollout
from agentrig.config import Plan, to_toml
from agentrig.errors import ConfigError
from agentrig.hardware import Hardware
from agentrig.rewards import Score
from agentrig.tasks import Task, fingerprint
from agentrig.text import json_text, storable
from agentrig.traces import Span

KEPT_CHECKPOINTS = 2
"""How many of the latest checkpoints stay, beside those that the algorithm asked to keep."""

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
            (path / part).mkdir(parents=True, exist_ok=True)

    @classmethod
    def create(cls, plan: Plan) -> RunDirectory:
        """Make a fresh directory for a run.

        Raises:
            ConfigError: A run of that name is there already.
        """
        name = plan.run.name or f"{plan.recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
        path = Path(plan.run.directory) / name
        if (path / "config.toml").exists():
            raise ConfigError(
                f"there is a run in {path} already; go on with it by --resume {path}, or give another run.name"
            )
        run = cls(path)
        run.write("config.toml", to_toml(plan.as_dict()))
        return run

    def write(self, name: str, text: str) -> None:
        """Write a file whole or not at all."""
        target = self.path / name
        part = target.with_name(f".{target.name}.part")
        part.write_text(storable(text), "utf-8")
        os.replace(part, target)

    def write_json(self, name: str, value: Any) -> None:
        """Write a JSON file whole or not at all."""
        self.write(name, json.dumps(value, indent=2, default=str) + "\n")

    def read_json(self, name: str) -> Any:
        """Return a JSON file's content; an empty dict when it is not there."""
        with contextlib.suppress(FileNotFoundError):
            return json.loads((self.path / name).read_text("utf-8"))
        return {}

    def append_metrics(self, line: Mapping[str, Any]) -> None:
        """Add a step's line to `metrics.jsonl`."""
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, default=float) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """Return the lines of `metrics.jsonl`; a last line cut short by a crash is left out."""
        lines = []
        with contextlib.suppress(FileNotFoundError):
            for text in (self.path / "metrics.jsonl").read_text("utf-8").splitlines():
                with contextlib.suppress(json.JSONDecodeError):
                    lines.append(json.loads(text))
        return lines

    def rewind(self, step: int) -> list[dict[str, Any]]:
        """Forget what happened after a step, for a resumed run; return the metrics that stay."""
        kept = [line for line in self.metrics() if line["step"] <= step]
        self.write("metrics.jsonl", "".join(json.dumps(line) + "\n" for line in kept))
        for file in (self.path / "rollouts").glob("*.parquet"):
            if int(file.stem.rsplit("-", 1)[1]) > step:
                file.unlink()
        return kept

    def measured(self) -> dict[str, int]:
        """Return how many rollouts are there that nothing was learned from, by failure; `""` for those without."""
        import pyarrow.parquet as pq

        found: Counter[str] = Counter()
        for file in (self.path / "rollouts").glob("*.parquet"):
            if not file.name.startswith("train-"):
                found.update(kind or "" for kind in pq.read_table(file, columns=["failure"])["failure"].to_pylist())
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
        pq.write_table(table, part, compression="zstd")
        os.replace(part, target)

    def save_checkpoint(self, step: int, write: Callable[[Path], None], *, keep: bool) -> Path:
        """Let `write` fill a checkpoint, make it the latest, and drop old ones."""
        folder = self.path / "checkpoints"
        target = folder / f"step-{step:05d}"
        part = folder / f".step-{step:05d}.part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        write(part)
        if keep:
            (part / "keep").touch()
        stale = folder / f".step-{step:05d}.old"
        shutil.rmtree(stale, ignore_errors=True)
        if target.exists():
            os.replace(target, stale)  # a crash must never leave half a checkpoint under a good name
        os.replace(part, target)
        self.write("checkpoints/latest", target.name)
        shutil.rmtree(stale, ignore_errors=True)
        old = [c for c in sorted(folder.glob("step-*")) if not (c / "keep").exists() and c != target]
        for checkpoint in old[: -(KEPT_CHECKPOINTS - 1) or None]:
            shutil.rmtree(checkpoint)
        return target

    def latest_checkpoint(self) -> tuple[Path | None, int]:
        """Return the latest checkpoint and its step, or (None, 0).

        When `latest` names one that is gone, the newest that is there counts: each came under its name whole.
        """
        folder = self.path / "checkpoints"
        found = sorted(c for c in folder.glob("step-*") if c.is_dir())
        with contextlib.suppress(FileNotFoundError):
            named = folder / (folder / "latest").read_text("utf-8").strip()
            found += [named] if named in found else []
        return (found[-1], int(found[-1].name.rsplit("-", 1)[1])) if found else (None, 0)


def manifest(plan: Plan, hardware: Hardware, splits: Mapping[str, tuple[str, Sequence[Task]]]) -> dict[str, Any]:
    """Return what makes a run reproducible: versions, components, seeds, data, hardware."""
    probe = hardware.probe()
    return {
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
        "status": text, "value": number, "components": text, "details": text, "audit": text, "input": text,
        "answer": text, "start": number, "duration_s": number, "reward_s": number, "calls": count, "triplets": count,
        "prompt_tokens": count, "response_tokens": count, "spans": text,
    }  # fmt: skip
    return pa.schema(list(types.items()))
