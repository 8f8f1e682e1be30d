"""From a Hugging Face directory to a decoder."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch  # noqa: TID253  (imported in the server process only)

from agentrig.hardware.cpu import host_memory
from agentrig_grpo.context import context_of
from agentrig_grpo.server.decoder import LlamaDecoder, supports
from agentrig_grpo.server.fallback import TransformersDecoder

log = logging.getLogger(__name__)


def build_decoder(
    directory: Path, *, device: str, dtype: torch.dtype, slots: int, max_length: int
) -> tuple[LlamaDecoder | TransformersDecoder, int]:
    """Return the model's decoder and its context in tokens (`max_length`, 0 for the model's own).

    Raises:
        agentrig.errors.ConfigError: The model's context is shorter than `max_length`.
        FileNotFoundError: There are no weights in safetensors files.
        WeightsError: A parameter is missing or misshapen; names it.
        ValueError: The model can't be decoded step by step.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(str(directory), local_files_only=True)
    max_length = context_of(config, max_length)
    reason = supports(config)
    if reason is None:
        state = read_weights(directory)
        return (
            LlamaDecoder(config, state, device=device, dtype=dtype, slots=slots, max_length=max_length),
            max_length,
        )
    from agentrig_grpo import checkpoint

    log.warning("%s has %s: decoding through transformers, one request at a time (slow)", directory, reason)
    model = checkpoint.load_model(directory, dtype=dtype, device=device)
    return TransformersDecoder(model, device=device), max_length


def read_weights(path: str | Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file, or of a directory's one file or shards.

    Raises:
        FileNotFoundError: There is none.
    """
    from safetensors.torch import load_file

    path = Path(path)
    if path.is_file():
        return load_file(path)
    index = path / "model.safetensors.index.json"
    if index.is_file():
        shards = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
    elif (path / "model.safetensors").is_file():
        shards = ["model.safetensors"]
    else:
        raise FileNotFoundError(
            f"{path} holds no model.safetensors; weights of another format are rewritten by transformers: "
            "AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
        )
    state: dict[str, torch.Tensor] = {}
    for shard in shards:
        state |= load_file(path / shard)
    return state


def eos_tokens(directory: Path, tokenizer: Any) -> list[int]:
    """Return the tokens that end a response: the generation config's and the tokenizer's."""
    found: set[int] = set()
    file = directory / "generation_config.json"
    if file.is_file():
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
