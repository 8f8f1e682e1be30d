"""The keys of the server `vllm`, observed in the command line and the environment of vLLM's process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrig_vllm.handle import VllmServer
from agentrig_vllm.options import arguments_of

from agentrig.servers import ServerPlan
from effects import Elsewhere, Flip, Settings, config_of, exact
from effects.tasks import build

TESTS = "plugins/agentrig-vllm/tests/test_vllm_server.py"


def _plan() -> ServerPlan:
    return ServerPlan(model=Path("/models/m"), name="policy", hardware=build("hardware.cuda", {}))


def arguments(settings: Settings) -> Mapping[str, Any]:
    return arguments_of(_plan(), config_of("server.vllm", settings))


def largest_graph(settings: Settings) -> int:
    """Return the largest batch that a CUDA graph is recorded for."""
    return int(arguments(settings)["compilation_config"]["cudagraph_capture_sizes"][-1])


def visible(settings: Settings) -> str:
    """Return the GPUs that vLLM's process sees, the server's first."""
    return VllmServer(_plan(), config_of("server.vllm", settings))._environment()["CUDA_VISIBLE_DEVICES"]


TABLE: Mapping[str, Flip | Elsewhere] = {
    "gpu_memory_utilization": exact(0.2, 0.6, lambda s: arguments(s)["gpu_memory_utilization"]),
    "kv_cache_mb": exact(0, 64, lambda s: arguments(s).get("kv_cache_memory_bytes"), (None, 64 << 20)),
    "max_num_seqs": exact(8, 64, lambda s: (arguments(s)["max_num_seqs"], largest_graph(s)), ((8, 8), (64, 64))),
    "cuda_graphs": exact(
        True, False, lambda s: arguments(s)["compilation_config"]["cudagraph_mode"], ("FULL_DECODE_ONLY", "NONE")
    ),
    "compile": exact(False, True, lambda s: arguments(s)["compilation_config"]["mode"], (0, 3)),
    "tool_call_parser": exact("", "mistral", lambda s: arguments(s).get("tool_call_parser"), (None, "mistral")),
    "vllm": exact({}, {"block_size": 32}, lambda s: arguments(s).get("block_size"), (None, 32)),
    "device": exact(-1, 1, visible, ("0", "1,0")),
    "api_server_count": Elsewhere(
        f"{TESTS}::test_several_processes_answer_for_one_engine_and_one_version", "it needs vLLM's process"
    ),
    "chunk_mb": Elsewhere(f"{TESTS}::test_address_and_buffer_are_those_of_the_settings", "it needs vLLM's process"),
    "host": Elsewhere(f"{TESTS}::test_address_and_buffer_are_those_of_the_settings", "it needs vLLM's process"),
    "port": Elsewhere(f"{TESTS}::test_address_and_buffer_are_those_of_the_settings", "it needs vLLM's process"),
    "start_s": Elsewhere(
        f"{TESTS}::test_a_server_that_starts_too_slowly_is_ended_with_its_children", "it needs vLLM's process"
    ),
}
