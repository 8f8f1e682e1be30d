"""The manifest: what makes a run reproducible."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from agentrig.hardware import Hardware
from agentrig.plan import Plan
from agentrig.plugins.loading import imported_beside
from agentrig.run.files import sha256_of
from agentrig.run.splits import labels_among
from agentrig.tasks import Task, fingerprint
from agentrig.text import flat
from agentrig.traces import mapping

FORMAT = 1
"""Format version of run directories; later formats are rejected. Manifests of the first version have none."""

OF_NO_STEP = frozenset(
    {
        *("algorithm.steps", "algorithm.save_every", "algorithm.keep_every", "run.audit", "run.delivery"),
        *("run.directory", "gateway", "hardware", "observer", "runners", "trackers"),
    }
)
"""Settings, and sections, that change no rollout and no update."""

PACKAGES = (
    "torch", "transformers", "agentlightning", "langgraph", "langchain-openai", "openai", "verl", "vllm", "ray",
    "tensordict", "TransferQueue", "litellm", "opentelemetry-sdk", "peft",
)  # fmt: skip


def manifest(plan: Plan, hardware: Hardware, splits: Mapping[str, tuple[str, Sequence[Task]]]) -> dict[str, Any]:
    """Return what makes a run reproducible: versions, components, seeds, data, hardware."""
    probe = hardware.probe()
    model = getattr(plan.configs["algorithm"], "model", None)
    return {
        "format": FORMAT,
        "id": uuid.uuid4().hex,
        "agentrig": _version("agentrig"),
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "recipe": plan.recipe,
        "resumes": plan.resumes,
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
        "formulas": list(getattr(plan.components["algorithm"].spec, "formulas", ())),
        "files": {
            str(path): sha256_of(path)
            for file in map(Path, plan.run.plugins)
            for path in (file, *imported_beside(file))
        },
        "component_files": {
            kind: str(Path(c.origin).resolve()) for kind, c in plan.components.items() if c.distribution == "file"
        },
        "observers": [
            {"name": c.spec.name, "distribution": c.distribution, "version": c.version} for c, _ in plan.observers
        ],
        "server": {"name": plan.components["server"].spec.name, "chosen": plan.reasons.get("server")},
        "packages": {name: version for name in PACKAGES if (version := _version(name)) is not None},
        "data": {
            role: {
                "split": split,
                "tasks": len(tasks),
                "labels": labels_among(tasks, model),
                "fingerprint": fingerprint(tasks),
            }
            for role, (split, tasks) in splits.items()
        },
        "agent_sees_gold": plan.sees_gold,
        "model": model,
    }


EDITED = "config.toml was edited: {} is {!r:.80}, and the run had {!r:.80}"
"""What is said of one of `edited_settings`."""


def edited_settings(settings: Mapping[str, Any], facts: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield the settings that were edited after the run wrote them: `section.key`, its value, and what it was.

    Args:
        settings: `config.toml`.
        facts: `manifest.json`, of the right types.
    """
    for section, keys in facts.get("config", {}).items():
        for key, was in keys.items():
            now = mapping(settings.get(section)).get(key)
            if was != now:
                yield f"{section}.{key}", now, was


def changed_settings(
    before: Mapping[str, Any], after: Mapping[str, Any], *, step: int, ended: bool
) -> list[dict[str, Any]]:
    """Return what resumes have changed of a run's settings, in their order: the entry `changes` of its manifest.

    Each has the step `after` which it holds, whether the run had `ended` there (then its measurement after training was
    made before), and the values until then: of settings (`config`), of `components` and of `formulas`. What an earlier
    resume changed after a step that is removed now, holds from this resume on.

    Args:
        before: The manifest so far.
        after: The manifest from now on.
        step: The step that the run resumes from; from 0, all its steps are made again.
    """
    if not step:
        return []
    earlier = before.get("changes", [])
    found = [{**each, "after": min(each["after"], step), "ended": each["ended"] and ended} for each in earlier]
    now = json.loads(json.dumps(after, default=str))  # as it is when it is read again
    was: dict[str, Any] = {}
    for part in ("config", "components"):
        for name, keys in before.get(part, {}).items():
            new = now[part].get(name, {})
            others = {key: value for key, value in keys.items() if new.get(key) != value}
            if "use" in others:
                others |= {key: None for key in new if key not in keys}  # of another component
            if others:
                was.setdefault(part, {})[name] = others
    if "formulas" in before and before["formulas"] != now["formulas"]:
        was["formulas"] = before["formulas"]
    return [*found, {"after": step, "ended": ended, **was}] if was else found


def settings_before(change: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of an entry of `changes` by dotted key, without those that change no rollout and no update.

    Such as the number of steps.
    """
    settings = flat(mapping(change.get("config")))
    return {key: was for key, was in settings if not {key, key.partition(".")[0]} & OF_NO_STEP}


def manifest_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return warnings about what has changed since a resumed run started: data, plugins, hardware."""
    changes = []
    for role, now in after["data"].items():
        was = before.get("data", {}).get(role, now)
        if was["fingerprint"] != now["fingerprint"]:
            asked = _asked_for(role, *(each.get("config", {}).get("run", {}) for each in (before, after)))
            changes.append(f"the {role} tasks (split {now['split']}) have changed since this run started{asked}")
    versions = {kind: c["version"] for kind, c in before.get("components", {}).items()}
    for kind, c in after["components"].items():
        if versions.get(kind, c["version"]) != c["version"]:
            changes.append(f"{kind} {c['name']} is {c['version']} now; this run started with {versions[kind]}")
    contents = before.get("files", {})
    for file, now in after["files"].items():
        if contents.get(file, now) != now:
            changes.append(f"the file {file} has changed since this run started")
    hardware = before.get("hardware", after["hardware"])["name"]
    if hardware != after["hardware"]["name"]:
        changes.append(f"this run started on {hardware} and continues on {after['hardware']['name']}")
    return changes


def _asked_for(role: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return which settings of a resume choose other tasks for a role than those of its start; '' if none does."""
    keys = [key for key in (role, f"{role}_tasks") if key in before and before[key] != now[key]]
    told = "; ".join(f"run.{key} is {now[key]!r} now and was {before[key]!r}" for key in keys)
    return f": {told}" if told else ""


def agentrig_version() -> str | None:
    """Return the version of this agentrig."""
    return _version("agentrig")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
