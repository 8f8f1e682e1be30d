"""Settings of `vllm`. Free of torch and vLLM."""

from __future__ import annotations

from typing import Any

import attrs

from agentrig import setting
from agentrig.errors import ConfigError
from agentrig_vllm.schema import check


def _known_to_vllm(_config: Any, _field: Any, value: dict[str, Any]) -> None:
    try:
        check(value)
    except ConfigError as error:
        raise ValueError(str(error).removeprefix("[server] vllm: ")) from None


@attrs.frozen(kw_only=True)
class VllmConfig:
    """Settings of `vllm`; more of vLLM's own engine arguments are in the table `vllm`, under vLLM's names."""

    gpu_memory_utilization: float = setting(
        0.0,
        help="share of the device's memory for the server; 0 for what the run's memory plan gives it, else 0.4",
        ge=0,
        le=0.95,
    )
    kv_cache_mb: int = setting(
        0,
        help="MiB for keys and values; 0 for what its memory leaves beside the weights, as far as it is of use",
        ge=0,
        le=1 << 24,
    )
    max_num_seqs: int = setting(256, help="most requests that it samples at once", ge=1, le=4096)
    device: int = setting(
        -1, help="the server's GPU, counted among those that the run sees; -1 for the learner's", ge=-1, le=63
    )
    api_server_count: int = setting(
        0,
        help="processes that answer requests with the one engine; 0 for one for each six cores, up to 4",
        ge=0,
        le=64,
    )
    cuda_graphs: bool = setting(True, help="record CUDA graphs of decode steps at the start: it samples faster")
    compile: bool = setting(
        False, help="compile the model too: it samples a little faster, and starts later by the time of compiling"
    )
    tool_call_parser: str = setting(
        "auto", help="vLLM's parser of tool calls, by its name; auto for that of the model's chat template"
    )
    chunk_mb: int = setting(512, help="MiB of new weights that are handed over at once", ge=1, le=1 << 16)
    host: str = setting("127.0.0.1", help="address that the server listens on")
    port: int = setting(
        0,
        help="port that the server listens on, and those after it if several processes answer; 0 for free ones",
        ge=0,
        le=65535,
    )
    start_s: float = setting(600.0, help="longest wait for the server to start, seconds", gt=0)
    vllm: dict[str, Any] = setting(
        dict, help="vLLM's own engine arguments, for example max_num_batched_tokens = 16384", validator=_known_to_vllm
    )
