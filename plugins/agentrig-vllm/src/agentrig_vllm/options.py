"""vLLM's engine arguments for a plan, and the command line that vLLM's own parser reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrig.servers import ServerPlan
    from agentrig_vllm.config import VllmConfig

SHARE = 0.4
"""The share of the device's memory if neither the settings nor the algorithm's plan set it."""

PLANNED = "agentrig_memory"
"""Where the worker finds the bytes of the plan, in vLLM's `additional_config`."""

LIMITED = "agentrig_limited"
"""Whether the worker holds torch to that memory, in the same place: the run has a limit."""

ADAPTERS = "agentrig_adapters"
"""The rank of the run's adapters, in the same place: the learner reads the weights, and sends adapters alone."""

ADAPTER = 1
"""The number of the run's adapters in vLLM, which has no others."""

ADAPTED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
"""The layers of vLLM that compute with adapters."""

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks that vLLM has room for; a smaller one takes the next."""

GRAPH_SIZES = (1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, 513, 32))
"""Batch sizes that CUDA graphs are recorded for; a batch is padded to the next one."""


def arguments_of(plan: ServerPlan, config: VllmConfig) -> dict[str, Any]:
    """Return vLLM's engine arguments for a plan, the run's own ones last."""
    # Without compiling, graphs of whole decode steps still take the time of launching kernels away, and the start is
    # that of loading the model. Prompts run without graphs: they keep the device busy.
    graphs = "FULL_DECODE_ONLY" if not config.compile else "FULL_AND_PIECEWISE"
    compilation: dict[str, Any] = {"mode": 3 if config.compile else 0, "cudagraph_mode": graphs}
    if config.cuda_graphs:
        compilation["cudagraph_capture_sizes"] = graph_sizes(config.max_num_seqs)
    else:
        compilation["cudagraph_mode"] = "NONE"
    found: dict[str, Any] = {
        "model": str(plan.model),
        "served_model_name": plan.name,
        "dtype": plan.dtype,
        "seed": plan.seed,
        "max_num_seqs": config.max_num_seqs,
        "gpu_memory_utilization": config.gpu_memory_utilization or SHARE,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "disable_cascade_attn": True,  # it runs without graphs, and rounds differently from the rest
        "enable_flashinfer_autotune": False,  # nothing that it tunes is used by these models
        "disable_log_stats": True,
        "worker_cls": "agentrig_vllm.worker.Worker",
        "compilation_config": compilation,
    }
    if plan.context:
        found["max_model_len"] = plan.context
    if plan.sleeps:
        found["enable_sleep_mode"] = True
    if config.kv_cache_mb:
        found["kv_cache_memory_bytes"] = config.kv_cache_mb << 20
    extra = dict(config.vllm.get("additional_config") or {})
    if plan.memory is not None and not config.gpu_memory_utilization:
        extra[PLANNED] = plan.memory  # the worker, which sees the device, makes a share of it
    if plan.hardware.memory_limit:
        extra[LIMITED] = True
    if plan.adapters:
        extra[ADAPTERS] = plan.adapters
        rank = next(rank for rank in RANKS if rank >= plan.adapters)
        # Adapters of embeddings and of the output layer would take memory, and there are none.
        found |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank, "lora_target_modules": list(ADAPTED)}
    parser = tool_call_parser(plan.model) if config.tool_call_parser == "auto" else config.tool_call_parser
    if parser:
        found |= {"enable_auto_tool_choice": True, "tool_call_parser": parser}
    return found | config.vllm | ({"additional_config": extra} if extra else {})


def tool_call_parser(model: Path) -> str:
    """Return the name of vLLM's parser of the tool calls that a model's chat template writes; '' if it writes none.

    Without a parser vLLM refuses requests with tools: status 400.
    """
    file = model / "chat_template.jinja"
    if file.is_file():
        template = file.read_text("utf-8")
    elif (file := model / "tokenizer_config.json").is_file():
        template = str(json.loads(file.read_text("utf-8")).get("chat_template") or "")
    else:
        return ""
    if "<tool_call>" in template:
        return "qwen3_coder" if "<function=" in template else "hermes"
    return "llama3_json" if "tools" in template and '"parameters": ' in template else ""


def graph_sizes(most: int) -> list[int]:
    """Return the batch sizes up to a number, itself among them."""
    return [*(size for size in GRAPH_SIZES if size < most), min(most, GRAPH_SIZES[-1])]


def command_line(arguments: Mapping[str, Any]) -> list[str]:
    """Return engine arguments as vLLM's own parser reads them."""
    words: list[str] = []
    for name, value in arguments.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        elif isinstance(value, Mapping):
            words += [f"--{option}", json.dumps(dict(value))]
        elif isinstance(value, list | tuple):
            words += [f"--{option}", *(str(each) for each in value)]
        else:
            words += [f"--{option}", str(value)]
    return words
