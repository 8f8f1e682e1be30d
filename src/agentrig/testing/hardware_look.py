"""Looks at hardware: in a fresh interpreter, what each of its methods returns, imports and costs."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from agentrig.errors import place_of
from agentrig.hardware import Context, Hardware, Probe

HEAVY = ("torch", "transformers", "tensorflow", "jax", "ray", "verl", "vllm", "agentlightning", "litellm", "torch_npu")
"""Modules that take seconds to import, or open a device."""

ROLES = ("", "driver", "worker", "rollout")
"""The processes that an environment is asked for; '' for no context at all."""

CODE = "from agentrig.testing.hardware_look import main; main()"
"""The program of the fresh interpreter."""


def heavy() -> list[str]:
    """Return the heavy modules that this process has imported."""
    return [name for name in HEAVY if name in sys.modules]


def said(error: BaseException) -> str:
    """Return an exception in one line, with its place in the plugin."""
    return f"{type(error).__name__}: {error}{place_of(error)}"


def probe_of(found: Any) -> dict[str, Any]:
    """Return a probe as JSON has it; anything else as its text, under `wrong`."""
    if not isinstance(found, Probe):
        return {"wrong": f"{found!r:.200}"}
    return {
        "available": found.available if isinstance(found.available, bool) else f"{found.available!r:.80}",
        "devices": [_device(d) for d in found.devices],
        "evidence": [line if isinstance(line, str) else f"{line!r:.80} is no text" for line in found.evidence],
        "problems": [line if isinstance(line, str) else f"{line!r:.80} is no text" for line in found.problems],
    }


def _device(device: Any) -> dict[str, Any]:
    memory = getattr(device, "memory", None)
    whole = memory is None or (isinstance(memory, int) and not isinstance(memory, bool))
    return {"name": str(getattr(device, "name", device)), "memory": memory if whole else f"{memory!r:.80}"}


def environment_of(found: Any) -> dict[str, Any]:
    """Return an environment as JSON has it; values that are no text as numbers of their type, under `wrong`."""
    if not isinstance(found, Mapping):
        return {"wrong": f"it returned {found!r:.80}, which is no mapping"}
    odd = [f"{k}={v!r:.40}" for k, v in found.items() if not isinstance(k, str) or not isinstance(v, str)]
    if odd:
        return {"wrong": f"{', '.join(odd)}: the name or the value is no text"}
    return {"variables": dict(found)}


def look(hardware: Hardware) -> dict[str, Any]:
    """Ask for the environments, then probe twice; an exception becomes a text under `raised`."""
    seen: dict[str, Any] = {}

    def ask(name: str, call: Callable[[], Any]) -> None:
        before, start = heavy(), time.perf_counter()
        try:
            seen[name] = call()
        except Exception as error:
            seen[name] = {"raised": said(error)}
        seen.setdefault("imported", {})[name] = [m for m in heavy() if m not in before]
        seen.setdefault("seconds", {})[name] = time.perf_counter() - start

    kept = dict(os.environ)
    for role in ROLES:
        context = Context(role=role) if role else None  # type: ignore[arg-type]
        ask(f"environment {role}".strip(), lambda context=context: environment_of(hardware.environment(context)))  # type: ignore[misc]
    seen["changed"] = sorted(k for k in {*kept, *os.environ} if kept.get(k) != os.environ.get(k))
    ask("probe", lambda: probe_of(hardware.probe()))
    ask("probe again", lambda: probe_of(hardware.probe()))
    return seen


def compute(hardware: Hardware) -> str:
    """Set the environment, import torch, and compute on the device; return what is wrong, or ''."""
    for name, value in hardware.environment().items():
        os.environ.setdefault(name, value)
    try:
        import torch
    except ImportError:
        return "no torch"
    try:
        found = (torch.ones(2, 2, device=hardware.torch_device) @ torch.ones(2, 2, device=hardware.torch_device)).sum()
        return "" if float(found) == 8.0 else f"a sum of products on {hardware.torch_device} is {float(found)}, not 8.0"
    except Exception as error:
        return f'torch cannot compute on the device "{hardware.torch_device}": {type(error).__name__}: {error}'


def main() -> None:
    """Build the hardware that the first argument describes, look at it, and print what was seen as JSON."""
    from agentrig.plugins.building import built
    from agentrig.plugins.loading import load
    from agentrig.settings import structure

    asked = json.loads(sys.argv[1])
    before = heavy()
    registry = load(block=asked["block"], files=asked["files"])
    component = registry.find("hardware", asked["name"])
    config: Any = structure(component.spec.config, asked["settings"], owner=asked["name"], section="hardware")
    hardware = built(component, config)
    built_with = [m for m in heavy() if m not in before]
    seen = {"built": built_with, **look(hardware)}
    if asked["compute"] and seen["probe"].get("available") is True:
        seen["compute"] = compute(hardware)
    print("\n" + json.dumps(seen))
