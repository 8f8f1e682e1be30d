"""Checks of what a run reads: the model and the data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentrig.doctor.devices import workload
from agentrig.errors import AgentrigError, nearest_path
from agentrig.findings import Finding, ModelHub, Result, Situation
from agentrig.hardware import usable_cores
from agentrig.hardware.memory import in_words
from agentrig.run.splits import read_split, split_of
from agentrig.tasks import ROLES, fingerprint
from agentrig.text import amount

WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
SHIPPED = "mini"
"""The default model of `grpo`."""

OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def cached_model(model: str, environ: dict[str, str]) -> Path | None:
    """Return the newest snapshot of a model in Hugging Face's cache, or None; imports nothing."""
    home = Path(environ.get("HF_HOME") or Path(environ.get("HOME") or Path.home()) / ".cache" / "huggingface")
    hub = Path(environ.get("HF_HUB_CACHE") or home / "hub")
    snapshots = hub / f"models--{model.replace('/', '--')}" / "snapshots"
    found = [p for p in snapshots.glob("*") if (p / "config.json").exists()] if snapshots.is_dir() else []
    return max(found, key=lambda p: p.stat().st_mtime, default=None)


def is_folder(model: str) -> bool:
    """Whether a model's name is that of a folder, be it there or not."""
    return model.startswith(("/", ".", "~", "models/"))


def check_model(situation: Situation) -> Iterator[Finding]:
    """Is the model on this machine, or can it be downloaded?"""
    load = workload(situation)
    model = load.model if load else situation.setting("algorithm", "model")
    if not isinstance(model, str) or not model:
        return
    plan = situation.plan
    if situation.setting("algorithm", "model") == SHIPPED and plan and plan.components["agent"].distribution == "file":
        yield Finding.warning(
            "model",
            f"{SHIPPED}: it knows the SQL prompts of the recipe {SHIPPED} only, and the agent is one of yours",
            cure=f"set algorithm.model, or make a small model for your tasks: {plan.warmup_command()}",
        )
        return
    environ = dict(situation.environ)
    folder = Path(model).expanduser()
    if not folder.exists():
        if is_folder(model) or model.count("/") != 1:
            near = nearest_path(folder)
            yield Finding.problem(
                "model",
                f"there is no folder {model}{near and f'.{near}'}",
                cure=f"make one with {plan.warmup_command(model) if plan else 'agentrig warmup'}, or set "
                "algorithm.model to a Hugging Face folder, or to OWNER/NAME as Hugging Face has it",
            )
            return
        asks = getattr(situation.plan.components["algorithm"].spec, "hub", None) if situation.plan else None
        hub: ModelHub | None = asks(situation.environ) if asks is not None else None
        cached = hub.cached(model) if hub else cached_model(model, environ)
        if cached is None:
            yield _from_host(model, hub.address, hub.mirror) if hub else _download(model, environ)
            return
        folder = cached
    lacking = [] if any(any(folder.glob(w)) for w in WEIGHTS) else ["weights (*.safetensors)"]
    lacking += [n for n in ("config.json", "tokenizer_config.json") if not (folder / n).exists()]
    if lacking:
        yield Finding.problem("model", f"{folder} lacks {', '.join(lacking)}", cure="download the whole model again")
    else:
        size = sum(p.stat().st_size for w in WEIGHTS for p in folder.glob(w))
        yield Finding.ok("model", f"{folder}, {in_words(size)} of weights")


def _download(model: str, environ: dict[str, str]) -> Finding:
    offline = next((n for n in OFFLINE if environ.get(n, "0") not in ("", "0", "false")), None)
    if offline:
        cure = f"unset {offline}, or download it elsewhere and set algorithm.model to the folder"
        return Finding.problem("model", f"{model} is not here, and {offline} forbids a download", cure=cure)
    if model.lower().startswith("meta-llama/") and not environ.get("HF_TOKEN"):
        token = Path(environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface") / "token"
        if not token.exists():
            return Finding.problem(
                "model",
                f"{model} is gated, and there is no HF_TOKEN",
                cure="accept its licence on its page, then export HF_TOKEN",
            )
    return _from_host(model, environ.get("HF_ENDPOINT", "https://huggingface.co"), "HF_ENDPOINT")


def _from_host(model: str, host: str, mirror: str) -> Finding:
    if not _reachable(host):
        cure = f"download it elsewhere and set algorithm.model to the folder, or set {mirror} to a mirror"
        return Finding.problem("model", f"{model} is not here, and {host} cannot be reached", cure=cure)
    return Finding.warning("model", f"{model} is not here; it will be downloaded from {host}")


def _reachable(url: str) -> bool:
    import httpx

    try:
        httpx.head(url, timeout=5.0)
    except (httpx.HTTPError, OSError):
        return False
    return True


def check_data(situation: Situation) -> Iterator[Finding]:
    """Can the recipe's splits be loaded? Their fingerprints are shown, to be compared with a run's manifest."""
    plan = situation.plan
    if plan is None:
        return
    try:
        tasks = plan.tasks()
        for role in ROLES:
            split = split_of(plan.run, tasks, role)
            if not split:
                continue
            rows = read_split(tasks, split, who=plan.whose_tasks, key=f"run.{role}")
            if rows:
                evidence = f"{amount(len(rows), 'task')} of {split}, SHA-256 {fingerprint(rows)[:16]}"
                yield Finding.ok(f"data: {role}", evidence)
            else:
                cure = f"choose another split: run.{role}=NAME, one of {', '.join(tasks.splits)}"
                result: Result = "problem" if role == "train" else "warning"
                yield Finding(check=f"data: {role}", result=result, evidence=f"{split} is empty", cure=cure)
    except AgentrigError as error:
        used = plan.components["tasks"]
        spec: Any = used.spec
        converts = f"see agentrig data {plan.registry.reference(used)} --help" if spec.convert is not None else ""
        yield Finding.of_error("data", error, cure=converts)


def check_cores(situation: Situation) -> Iterator[Finding]:
    """Are there enough cores for the runners?"""
    if situation.plan is None:
        return
    runners, cores = situation.plan.runners.n, usable_cores()
    crowded = runners > 4 * cores
    yield Finding(
        check="runners",
        result="warning" if crowded else "ok",
        evidence=f"{runners} runner processes on {cores} usable cores",
        cure="fewer runners with more threads each: runners.n, runners.threads" if crowded else "",
    )
