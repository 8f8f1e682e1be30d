"""vLLM's engine arguments: all names, and those that agentrig sets itself.

The names are read from the installed vLLM's source without importing it, which would take seconds, and without vLLM
from the list that `arguments.txt` recorded.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrig.errors import ConfigError, nearest

RECORDED = Path(__file__).with_name("arguments.txt")
"""The engine arguments of the vLLM in its first line."""

SOURCE = "vllm/engine/arg_utils.py"
CLASSES = ("EngineArgs", "AsyncEngineArgs")

OWN: Mapping[str, str] = {
    "model": "set algorithm.model",
    "model_weights": "set algorithm.model",
    "tokenizer": "the tokenizer is the model's own",
    "served_model_name": "the algorithm names the model",
    "dtype": "set algorithm.dtype",
    "max_model_len": "set algorithm.max_length",
    "seed": "set run.seed",
    "skip_tokenizer_init": "the server answers chats with text",
    "gpu_memory_utilization": "set server.gpu_memory_utilization",
    "kv_cache_memory_bytes": "set server.kv_cache_mb",
    "max_num_seqs": "set server.max_num_seqs",
    "enforce_eager": "set server.cuda_graphs=false",
    "compilation_config": "set server.cuda_graphs and server.compile",
    "cudagraph_capture_sizes": "set server.max_num_seqs",
    "max_cudagraph_capture_size": "set server.max_num_seqs",
    "optimization_level": "set server.cuda_graphs and server.compile",
    "enable_sleep_mode": "the algorithm says whether the server sleeps",
    "enable_cumem_allocator": "the algorithm says whether the server sleeps",
    "enable_prefix_caching": "it is on, and emptied with each version of the weights",
    "logprobs_mode": "log-probabilities are those that tokens were sampled with",
    "generation_config": "sampling is the algorithm's",
    "override_generation_config": "sampling is the algorithm's",
    "worker_cls": "agentrig's own takes the weights",
    "worker_extension_cls": "agentrig's own worker takes the weights",
    "weight_transfer_config": "agentrig's own worker takes the weights",
    "distributed_executor_backend": "the server is one process",
    "tensor_parallel_size": "the server is one process on one GPU; several GPUs: algorithm verl",
    "pipeline_parallel_size": "the server is one process on one GPU; several GPUs: algorithm verl",
    "data_parallel_size": "the server is one process on one GPU; several GPUs: algorithm verl",
    "enable_lora": "algorithm.lora_base says how the server gets adapters",
    "max_loras": "algorithm.lora_base says how the server gets adapters",
    "max_lora_rank": "set algorithm.lora_rank",
    "lora_target_modules": "set algorithm.lora_targets",
    "lora_dtype": "set algorithm.dtype",
    "quantization": "new weights could not be loaded into quantized ones",
    "load_format": "the weights come from the algorithm's model",
}
"""Arguments that agentrig sets itself, and what to set instead."""


@functools.cache
def known() -> tuple[str, frozenset[str]]:
    """Return a version of vLLM and the names of its engine arguments: the installed one's, else the recorded ones."""
    try:
        distribution = importlib.metadata.distribution("vllm")
        source = Path(str(distribution.locate_file(SOURCE))).read_text("utf-8")
    except (importlib.metadata.PackageNotFoundError, OSError):
        version, *names = RECORDED.read_text("utf-8").split()
        return version, frozenset(names)
    return distribution.version, frozenset(names_in(source))


def names_in(source: str) -> list[str]:
    """Return the fields of vLLM's classes of engine arguments, from their source."""
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name in CLASSES]
    fields = (line for node in classes for line in node.body if isinstance(line, ast.AnnAssign))
    found = [line.target.id for line in fields if isinstance(line.target, ast.Name)]
    return [name for name in found if not name.startswith("_")]


def check(arguments: Mapping[str, Any]) -> None:
    """Check a run's own engine arguments."""
    version, names = known()
    for name in arguments:
        if name in OWN:
            raise ConfigError(f"[server] vllm: {name} is agentrig's to set: {OWN[name]}")
        if name not in names:
            dashed = name.replace("-", "_")
            hint = f" Write {dashed}" if dashed in names else nearest(name, names)
            raise ConfigError(f"[server] vllm: vLLM {version} has no engine argument {name}.{hint}")
