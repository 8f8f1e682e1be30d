"""From a Hugging Face directory to a decoder."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch  # noqa: TID253  (imported in the server process only)

from agentrig.errors import AgentrigError
from agentrig.hardware.cpu import host_memory
from agentrig_grpo.context import configuration, context_of
from agentrig_grpo.model_files import loading, model_files, weight_files
from agentrig_grpo.server.decoder import LlamaDecoder, supports
from agentrig_grpo.server.fallback import TransformersDecoder

log = logging.getLogger(__name__)


def build_decoder(
    directory: Path, *, device: str, dtype: torch.dtype, slots: int, max_length: int
) -> tuple[LlamaDecoder | TransformersDecoder, int]:
    """Return the model's decoder and its context in tokens (`max_length`, 0 for the model's own).

    Raises:
        agentrig.errors.ConfigError: The model's context is shorter than `max_length`.
        agentrig_grpo.model_files.ModelError: A file is missing or damaged, or a parameter is missing or misshapen.
        ValueError: The model can't be decoded step by step.
    """
    model_files(directory, "config.json")
    config = configuration(directory)
    max_length = context_of(config, max_length)
    reason = supports(config)
    if reason is None:
        state = read_weights(directory)
        with loading(directory, "weights"), _room(slots, max_length):
            return (
                LlamaDecoder(config, state, device=device, dtype=dtype, slots=slots, max_length=max_length),
                max_length,
            )
    from agentrig_grpo import checkpoint

    log.warning("%s has %s: decoding through transformers, one request at a time (slow)", directory, reason)
    model = checkpoint.load_model(directory, dtype=dtype, device=device)
    return TransformersDecoder(model, device=device), max_length


@contextmanager
def _room(slots: int, max_length: int) -> Iterator[None]:
    """Say which settings to lower where the decoder does not fit into memory."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if "memory" not in str(error):
            raise
        raise AgentrigError(
            f"the model and the keys and values of {slots} requests of up to {max_length} tokens do not fit into "
            f"memory: lower server.batch or algorithm.max_length ({str(error).splitlines()[0]})"
        ) from error


def read_weights(directory: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a directory's one safetensors file, or of its shards; see `weight_files` for the errors."""
    from safetensors.torch import load_file

    state: dict[str, torch.Tensor] = {}
    for file in weight_files(directory):
        state |= load_file(file)
    return state


def eos_tokens(directory: Path, tokenizer: Any) -> list[int]:
    """Return the tokens that end a response: the generation config's and the tokenizer's."""
    found: set[int] = set()
    file = directory / "generation_config.json"
    if file.is_file():
        with loading(directory, "generation_config.json"):
            eos = json.loads(file.read_text("utf-8")).get("eos_token_id")
            found.update(eos if isinstance(eos, list) else [] if eos is None else [eos])
    if tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    return sorted(found)


def device_memory(device: str) -> int:
    """Return the device's memory in bytes: of a CPU what this process may use of the machine's."""
    if device == "cpu":
        return host_memory()
    module: Any = torch.get_device_module(device.split(":")[0])
    return int(module.get_device_properties(device).total_memory)
