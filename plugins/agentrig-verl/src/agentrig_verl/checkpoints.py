"""Checkpoints: verl's own state below `trainer/`, a Hugging Face directory at the top."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrig.errors import ConfigError
from agentrig.run.checkpoints import STARTING_MODEL, copy_tokenizer


def finish_checkpoint(path: Path, step: int, *, base: str) -> None:
    """Turn what verl saved into agentrig's layout.

    Args:
        path: The checkpoint's directory; verl saved below `path / "trainer"`.
        base: The starting model; its tokenizer files are kept as they are.

    Raises:
        FileNotFoundError: verl saved no Hugging Face model (`checkpoint.save_contents` lacks `hf_model`).
    """
    saved = path / "trainer" / f"global_step_{step}" / "actor" / "huggingface"
    if not any(saved.glob("*.safetensors")):
        raise FileNotFoundError(f"verl saved no weights in {saved}")
    for file in saved.iterdir():
        shutil.move(str(file), path / file.name)
    saved.rmdir()
    meta = path / "trainer" / f"global_step_{step}" / "actor" / "lora_train_meta.json"
    if meta.is_file():
        merge_adapter(path, json.loads(meta.read_text("utf-8")))
    if Path(base).is_dir():
        copy_tokenizer(Path(base), path)


def whole_model(directory: Path) -> Path:
    """Return a model's directory.

    Raises:
        ConfigError: It is a checkpoint of `grpo` that holds adapters only.
    """
    if (directory / STARTING_MODEL).is_file():
        raise ConfigError(
            f"{directory} holds adapters only. Write the whole model, then use DIR: agentrig export {directory} DIR"
        )
    return directory


def trainer_state(checkpoint: Path) -> Path:
    """Return the folder that verl resumes from; a checkpoint that this algorithm did not write is an error."""
    found = sorted((checkpoint / "trainer").glob("global_step_*"))
    if not found:
        raise ConfigError(
            f"{checkpoint} holds no state of verl's trainer (trainer/global_step_N): it was written by another "
            "algorithm. Start from its weights with algorithm.model instead of --resume"
        )
    return found[-1].resolve()


def merge_adapter(path: Path, meta: Mapping[str, Any]) -> None:
    """Merge LoRA weights, saved under peft's names, into the plain model in place.

    Each layer is merged in fp32, as peft does it; the result is stored in the layer's own dtype.
    """
    from safetensors.torch import load_file, save_file

    state: dict[str, Any] = {}
    for file in sorted(path.glob("*.safetensors")):
        state.update(load_file(str(file)))
        file.unlink()
    (path / "model.safetensors.index.json").unlink(missing_ok=True)
    merged: dict[str, Any] = {}
    for name, tensor in state.items():
        if ".lora_" in name:
            continue
        plain = re.sub(r"^base_model\.model\.", "", name).replace(".base_layer.", ".")
        layer = name.removesuffix(".base_layer.weight")
        a, b = (state.get(f"{layer}.lora_{factor}.default.weight") for factor in "AB")  # (rank, in) and (out, rank)
        if layer != name and a is not None and b is not None:
            change = (b.float() @ a.float()) * (float(meta["lora_alpha"]) / len(a))
            tensor = (tensor.float() + change).to(tensor.dtype)
        merged[plain] = tensor.contiguous()
    save_file(merged, str(path / "model.safetensors"), metadata={"format": "pt"})
