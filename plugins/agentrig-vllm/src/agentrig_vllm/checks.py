"""Whether vLLM can serve here: for `[server] use = "auto"`, and for the doctor."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator

from agentrig.findings import Finding, Situation
from agentrig.hardware import Hardware
from agentrig.hardware.tools import ask
from agentrig.hardware.versions import fits

SUPPORTED = "==0.24.*"
"""The versions of vLLM whose modules `agentrig_vllm.serving` and `agentrig_vllm.worker` were written for."""

CURE = f"install vllm{SUPPORTED} with the torch that it pins (docs/gpu.md), or use another server: server.use=embedded"

IMPORTS = """
import importlib.metadata, json
import vllm.entrypoints.openai.api_server, vllm.v1.engine.async_llm
print(json.dumps({"vllm": importlib.metadata.version("vllm"), "torch": importlib.metadata.version("torch")}))
"""


def refusal(hardware: Hardware) -> str:
    """Return why vLLM cannot serve on this hardware, as a short text, or ''. Reads metadata only."""
    if hardware.torch_device.partition(":")[0] != "cuda":
        return f"it needs an NVIDIA GPU, and the run's hardware is {hardware.name}"
    version = installed()
    if version is None:
        return "vLLM is not installed"
    if not fits(version, SUPPORTED):
        return f"vLLM {version} is installed, and it supports vllm{SUPPORTED}"
    return ""


def installed() -> str | None:
    """Return the version of the installed vLLM, or None."""
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return None


def check_vllm(situation: Situation) -> Iterator[Finding]:
    """Check for `agentrig doctor` whether vLLM can run, if it is the chosen server."""
    plan, hardware = situation.plan, situation.hardware
    if plan is None or hardware is None or "server" not in plan.components:
        return
    if plan.components["server"].spec.name != "vllm":
        return
    reason = refusal(hardware)
    if reason:
        yield Finding.problem("server vllm", f"vllm cannot serve here: {reason}", cure=CURE)
        return
    answer = ask(IMPORTS, environ=situation.environ)
    what = f"vLLM {installed()}"
    if answer.ok:
        yield Finding.ok("server vllm", f"{what} loads beside torch {answer.data['torch']}")
    else:
        yield situation.failure("server vllm", f"{what} does not load", answer, cure=CURE)
