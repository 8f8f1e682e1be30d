"""The doctor's checks of an NVIDIA host."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator

from agentrig.findings import Finding, Situation
from agentrig.hardware.tools import ask

LOADS = """
import importlib.metadata, json
import torch
import flash_attn_2_cuda
print(json.dumps({"flash_attn": importlib.metadata.version("flash-attn"), "torch": torch.__version__}))
"""


def check_flash_attention(situation: Situation) -> Iterator[Finding]:
    """Does flash-attn's binary load with this torch? It is imported in a separate process."""
    if not situation.uses("cuda"):
        return
    wanted = situation.setting("hardware", "attention", "auto")
    if "flash-attn" not in situation.versions:
        if wanted == "flash_attention_2":
            yield Finding.problem(
                "flash-attn",
                "hardware.attention asks for flash_attention_2, and flash-attn is not installed",
                cure="pip install flash-attn --no-build-isolation, or hardware.attention=auto",
            )
        else:
            yield Finding.ok("flash-attn", "not installed: sdpa is used")
        return
    answer = ask(LOADS, environ=situation.environ)
    if answer.ok:
        pair = f"flash-attn {answer.data['flash_attn']} loads beside torch {answer.data['torch']}"
        yield Finding.ok("flash-attn", pair)
    else:
        what = f"flash-attn {situation.versions['flash-attn']} does not load"
        cure = "reinstall it for this torch, or uninstall it: sdpa is used then"
        yield situation.failure("flash-attn", what, answer, cure=cure)


def check_unwanted_ascend(situation: Situation) -> Iterator[Finding]:
    """Would vLLM detect this NVIDIA host as an Ascend one? vllm-ascend registers itself on every host."""
    if not situation.uses("cuda"):
        return
    points = importlib.metadata.entry_points(group="vllm.platform_plugins")
    foreign = sorted({p.name for p in points if p.name == "ascend"})
    if not foreign and "vllm-ascend" not in situation.versions:
        return
    allowed = situation.environ.get("VLLM_PLUGINS")
    if allowed is not None and "ascend" not in allowed.split(","):
        yield Finding.ok("vllm platform", f"vllm-ascend is installed, and VLLM_PLUGINS={allowed} omits it")
        return
    yield Finding.problem(
        "vllm platform",
        f"vllm-ascend {situation.versions.get('vllm-ascend', '')} is installed on a CUDA host: "
        "vLLM would choose the Ascend platform",
        cure="pip uninstall vllm-ascend, or name the vLLM plugins to load without ascend in VLLM_PLUGINS "
        "(VLLM_PLUGINS= loads none)",
    )
