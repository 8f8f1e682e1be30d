"""The server `vllm`: one vLLM process on the learner's GPU or another one; weights by CUDA handles, no Ray."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from agentrig import ServerSpec, hookimpl

if TYPE_CHECKING:
    from agentrig.servers import MakeServer, ServerMemory
    from agentrig_vllm.config import VllmConfig


def build(config: VllmConfig) -> MakeServer:
    """Return what makes the server; vLLM itself is imported in the server's process only."""
    from agentrig_vllm.handle import VllmServer

    return lambda plan: VllmServer(plan, config)


def sequences(config: VllmConfig) -> int:
    """Return the most requests that it samples at once."""
    return config.max_num_seqs


def memory(config: VllmConfig) -> ServerMemory:
    """Return what the settings say of its memory."""
    from agentrig.servers import ServerMemory
    from agentrig_vllm.options import RANKS

    return ServerMemory(
        sequences=config.max_num_seqs,
        prefill=int(config.vllm.get("max_num_batched_tokens") or 8192),
        transfer=config.chunk_mb << 20,
        transfer_of_torch=True,
        share=config.gpu_memory_utilization,
        cache=config.kv_cache_mb << 20,
        elsewhere=config.device > 0,
        lends=0 if config.device > 0 else RANKS[-1],
    )


@hookimpl
def register_servers() -> Iterable[ServerSpec]:
    """Register `vllm`."""
    from agentrig_vllm.checks import check_vllm, refusal
    from agentrig_vllm.config import VllmConfig

    yield ServerSpec(
        name="vllm",
        summary="One vLLM process on the learner's GPU or another one; new weights by CUDA handles.",
        config=VllmConfig,
        build=build,
        rank=10,
        refusal=refusal,
        sequences=sequences,
        memory=memory,
        checks=(check_vllm,),
    )
