"""Checks of the device: what is there, whether torch can use it, whether the model fits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from agentrig.findings import Finding, Result, Situation
from agentrig.hardware.memory import GB, KNOWN, ModelShape, Workload, estimate, in_words
from agentrig.plugins.auto import OWN, refusal

REFERENCE_MINIMUM = 40 * GB
"""Known need of the reference profiles (1B and 1.5B, full training); with 24 GB, Adam runs out of memory."""

REFERENCE_MODELS = ("qwen/qwen2.5-coder-1.5b-instruct", "meta-llama/llama-3.2-1b-instruct")


def check_hardware(situation: Situation) -> Iterator[Finding]:
    """Which devices are there: those of the chosen hardware, and the probe results of the others."""
    for hardware in situation.candidates:
        probe = situation.probes[hardware.name]
        chosen = situation.uses(hardware.name)
        evidence = "; ".join([*(f"{d.name} {_size(d.memory)}".strip() for d in probe.devices), *probe.evidence])
        if probe.problems:
            result: Result = "problem" if chosen and not probe.available else "warning"
            for problem in probe.problems:
                what, _, cure = problem.rpartition(": ")
                yield Finding(
                    check=f"{hardware.name} devices", result=result, evidence=f"{what} [{evidence}]", cure=cure
                )
        elif probe.available:
            note = "used; " if chosen else "not used; "
            yield Finding.ok(f"{hardware.name} devices", note + evidence)
        elif chosen:
            yield Finding.problem(
                f"{hardware.name} devices",
                f"requested, but not found: {evidence}",
                cure="run it on a machine with such a device, or choose another: --hardware auto",
            )
        else:
            yield Finding.ok(f"{hardware.name} devices", f"none here: {evidence}")


def _size(memory: int | None) -> str:
    return f"{memory / GB:.0f} GB" if memory else ""


def check_visible(situation: Situation) -> Iterator[Finding]:
    """Are the ids in the visible-devices variable in an order that the runtime accepts?"""
    hardware = situation.hardware
    if hardware is None or hardware.visible_devices is None:
        return
    value = situation.environ.get(hardware.visible_devices)
    if value is None:
        return
    ids = [part.strip() for part in value.split(",") if part.strip()]
    numbers = [int(i) for i in ids if i.isdigit()]
    setting = f"{hardware.visible_devices}={value}"
    if hardware.visible_order == "ascending" and numbers != sorted(numbers):
        yield Finding.problem(
            "visible devices",
            f"{setting}: the ids do not ascend, and the runtime then finds no device",
            cure=f"export {hardware.visible_devices}={','.join(str(n) for n in sorted(numbers))}",
        )
    elif len(set(ids)) != len(ids):
        yield Finding.problem("visible devices", f"{setting}: an id occurs twice", cure="name each device once")
    else:
        yield Finding.ok("visible devices", setting)


def check_torch(situation: Situation) -> Iterator[Finding]:
    """Can torch be imported, and was it built for this device? Checked in a subprocess."""
    hardware = situation.hardware
    device = hardware.torch_device if hardware else "cpu"
    if "torch" not in situation.versions:
        cure = hardware.torch_cure if hardware else "install torch"
        yield Finding.problem("torch", "torch is not installed", cure=cure)
        return
    answer = situation.torch
    if not answer.ok:
        cure = "reinstall torch; the whole error: python -c 'import torch'"
        yield situation.failure("torch", "import torch fails", answer, cure=cure)
        return
    report = answer.data
    build = f"torch {report['version']} (CUDA {report['cuda'] or 'no'}, ROCm {report['hip'] or 'no'})"
    if report["available"]:
        count = f", {report['count']} device(s)" if report["count"] else ""
        yield Finding.ok("torch", f"{build} can use {device}{count}")
    else:
        cure = hardware.torch_cure if hardware else ""
        if report["built"]:
            cure = f"torch is built for {device}: check that the device is there and its driver works"
        evidence = f"{build} cannot use {device}: torch.{device}.is_available() is false"
        yield Finding.problem("torch", evidence, cure=cure)


def check_algorithm(situation: Situation) -> Iterator[Finding]:
    """Does this hardware support this algorithm, and the algorithm this hardware?"""
    hardware, plan = situation.hardware, situation.plan
    if hardware is None or plan is None:
        return
    spec: Any = plan.components["algorithm"].spec
    if not hardware.carries(spec.name):
        able = ", ".join(hardware.algorithms)
        evidence, cure = f"{hardware.name} does not support {spec.name}", f"choose --algorithm from: {able}"
    elif spec.hardware and hardware.name not in spec.hardware:
        able = ", ".join(spec.hardware)
        evidence, cure = f"{spec.name} cannot run on {hardware.name}", f"choose --hardware from: {able}"
    else:
        yield Finding.ok("algorithm", f"{spec.name} on {hardware.name}")
        return
    yield Finding.problem("algorithm", evidence, cure=cure)


def check_server(situation: Situation) -> Iterator[Finding]:
    """Check whether the model's server can serve on the chosen hardware, and say why `auto` chose it."""
    plan, hardware = situation.plan, situation.hardware
    if plan is None or hardware is None or plan.components["server"].spec.name == OWN:
        return
    component = plan.components["server"]
    who = f"{component.spec.name} of {component.source}"
    why = refusal(component, hardware)
    if why:
        yield Finding.problem(
            "server",
            f"{who} can't serve on {hardware.name}: {why}",
            cure="leave --server out, or name another: agentrig plugins",
        )
        return
    chosen = f"; auto chose it: {plan.reasons['server']}" if "server" in plan.reasons else ""
    yield Finding.ok("server", f"{who} serves on {hardware.name}{chosen}")


def workload(situation: Situation) -> Workload | None:
    """Return what the recipe needs from a device: the spec's `workload`, else a guess from its model."""
    if situation.plan is None:
        return None
    spec: Any = situation.plan.components["algorithm"].spec
    ask = getattr(spec, "workload", None)
    if ask is not None:
        own: Workload | None = ask(situation.plan.configs["algorithm"])
        sequences = getattr(situation.plan.components["server"].spec, "sequences", None)
        if own is not None and sequences is not None:
            return attrs.evolve(own, sequences=sequences(situation.plan.configs["server"]))
        return own
    model = situation.setting("algorithm", "model")
    return Workload(model=model, micro_batch=4, context=6144) if isinstance(model, str) and model else None


def shape_of(model: str) -> ModelShape | None:
    """Return a model's shape: from the `config.json` of a local folder, else from the table of known models."""
    config = Path(model).expanduser() / "config.json"
    if config.is_file():
        try:
            return ModelShape.from_config(json.loads(config.read_text("utf-8")))
        except json.JSONDecodeError:
            return None
    return KNOWN.get(model.lower())


def check_memory(situation: Situation) -> Iterator[Finding]:
    """Does training this model fit on one device?"""
    hardware, load = situation.hardware, workload(situation)
    if hardware is None or load is None:
        return
    sizes = [d.memory for d in situation.probes[hardware.name].devices if d.memory]
    shape = shape_of(load.model)
    if shape is None:
        yield Finding.skipped("memory", f"the shape of {load.model} is not known here")
        return
    need = estimate(shape, load)
    if not sizes:
        evidence = f"{hardware.name} does not say its memory; {load.model} would need {need.describe()}"
        yield Finding.skipped("memory", evidence)
        return
    has = min(sizes)
    minimum = load.minimum
    if not minimum and load.trained == 1.0 and hardware.name != "cpu" and load.model.lower() in REFERENCE_MODELS:
        minimum = REFERENCE_MINIMUM
    # Devices sold as 40 GB or 80 GB report a few percent less than that in bytes.
    required = max(need.floor, int(minimum * 0.97))
    evidence = f"{in_words(has)}; {load.model} ({shape.parameters / 10**6:.0f} M weights): {need.describe()}"
    if has < required:
        evidence += f"; at least {in_words(required)} are needed"
        cure = "a smaller model, LoRA, more devices to shard over, or a larger device"
        yield Finding.problem("memory", evidence, cure=cure)
    elif has < need.peak:
        evidence += f"; {in_words(need.peak)} if every sequence has the maximum length"
        cure = "a smaller micro-batch or shorter prompts and responses, if it runs out"
        yield Finding.warning("memory", evidence, cure=cure)
    else:
        yield Finding.ok("memory", evidence)
