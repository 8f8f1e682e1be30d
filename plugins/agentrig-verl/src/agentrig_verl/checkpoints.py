"""Checkpoints: verl's own state below `trainer/`, a Hugging Face directory at the top."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrig.errors import ConfigError

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
             "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja")  # fmt: skip


def finish_checkpoint(path: Path, step: int, *, base: str) -> None:
    """Turn what verl saved into agentrig's layout.

    Args:
        path: The checkpoint's directory; verl saved below `path / "trainer"`.
        step: The training step.
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
        for name in TOKENIZER:
            if (Path(base) / name).is_file():
                shutil.copyfile(Path(base) / name, path / name)


def trainer_state(checkpoint: Path) -> Path:
    """Return the folder that verl resumes from.

    Raises:
        ConfigError: The checkpoint was not written by this algorithm.
    """
    found = sorted((checkpoint / "trainer").glob("global_step_*"))
    if not found:
        raise ConfigError(
            f"{checkpoint} holds no state of verl's trainer (trainer/global_step_N): it was written by another "
            "algorithm. Start from its weights with algorithm.model instead of --resume"
        )
    return found[-1].resolve()


def merge_adapter(path: Path, meta: Mapping[str, Any]) -> None:
    """Merge LoRA weights, saved under peft's names, into the plain model in place.

    Each `W + (alpha / r) * B A` replaces `W` (Hu et al. 2021, arXiv 2106.09685, section 4.1), computed in
    fp32 and stored in the dtype of `W`.
    """
    import torch
    from safetensors.torch import load_file, save_file

    state: dict[str, Any] = {}
    for file in sorted(path.glob("*.safetensors")):
        state.update(load_file(str(file)))
        file.unlink()
    (path / "model.safetensors.index.json").unlink(missing_ok=True)
    scale = float(meta["lora_alpha"]) / float(meta["r"])
    merged: dict[str, Any] = {}
    for name, tensor in state.items():
        if ".lora_" in name:
            continue
        plain = re.sub(r"^base_model\.model\.", "", name).replace(".base_layer.", ".")
        stem = name.removesuffix(".weight").removesuffix(".base_layer")
        a, b = state.get(f"{stem}.lora_A.default.weight"), state.get(f"{stem}.lora_B.default.weight")
        if name.endswith(".base_layer.weight") and a is not None and b is not None:
            tensor = (tensor.float() + scale * (b.float() @ a.float())).to(tensor.dtype)
        merged[plain] = tensor.contiguous()
    assert all(isinstance(t, torch.Tensor) for t in merged.values())
    save_file(merged, str(path / "model.safetensors"), metadata={"format": "pt"})
