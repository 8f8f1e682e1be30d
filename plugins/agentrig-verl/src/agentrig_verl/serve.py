"""vLLM's own OpenAI server for a checkpoint, for `agentrig eval` and `agentrig dev`."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from agentrig import Endpoint
from agentrig.processes.servers import ServerProcess
from agentrig_verl.manager import answers

START_S = 600.0
"""Seconds that vLLM may take to start."""

END_S = 30.0
"""How long vLLM may take to end its workers and give the GPU back."""


@contextmanager
def serve_model(
    model: str,
    *,
    sampling: Mapping[str, Any],
    max_model_len: int | None,
    memory: float,
    options: Mapping[str, Any] | None = None,
) -> Iterator[Endpoint]:
    """Serve a model until the block ends.

    Args:
        model: A Hugging Face directory or a name on the Hub.
        max_model_len: Prompt and response together, in tokens; None for the model's own.
        memory: The share of the GPU's memory that vLLM may use.
        options: More options of `vllm serve`; True for one without a value.

    Raises:
        ServerError: vLLM did not come up; the message ends with its last lines.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", "serve", model, "--host", "127.0.0.1"]
    command += ["--port", str(port), "--dtype", "bfloat16", "--gpu-memory-utilization", str(memory)]
    command += ["--generation-config", "vllm", "--logprobs-mode", "processed_logprobs"]
    if max_model_len is not None:
        command += ["--max-model-len", str(max_model_len)]
    for name, value in (options or {}).items():
        values = [] if value is True else value if isinstance(value, list) else [value]
        command += [f"--{name}", *(json.dumps(v) if isinstance(v, Mapping) else str(v) for v in values)]
    endpoint = Endpoint(base_url=f"http://127.0.0.1:{port}/v1", model=model, sampling=dict(sampling), token_ids=True)
    server = ServerProcess("vLLM", command)
    try:
        server.wait_until(lambda: answers(endpoint), START_S)
        yield endpoint
    finally:
        server.stop(END_S)
