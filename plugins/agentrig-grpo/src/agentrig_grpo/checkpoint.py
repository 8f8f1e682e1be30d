"""Hugging Face directories: loaded, and written so that transformers and vLLM both load them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch  # noqa: TID253  (imported with the learner, the server or the warm-up only)

from agentrig.errors import ConfigError
from agentrig.hardware import Hardware
from agentrig.run.checkpoints import copy_tokenizer
from agentrig_grpo.lora import MergedWeights
from agentrig_grpo.model_files import loading, model_files, weight_files

TOKENIZER_CLASS = "PreTrainedTokenizerFast"
"""The class that any `tokenizer.json` loads with, in transformers 4 and 5 and in vLLM. transformers 5
itself writes `TokenizersBackend`, which older loaders refuse."""


def load_tokenizer(directory: str | Path) -> Any:
    """Return the tokenizer of a local Hugging Face directory, exactly as its `tokenizer.json` says.

    For some model types (Qwen2 among them) transformers 5's `AutoTokenizer` replaces the file's
    pre-tokenizer with the model family's, which tokenizes differently from a custom tokenizer.

    Raises:
        ModelError: There is no such directory or no tokenizer in it, or a file is damaged or may not be read.
        ConfigError: The tokenizer has no chat template, or is written in Python alone.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    directory = model_files(directory, "tokenizer_config.json")
    loader: Any = PreTrainedTokenizerFast if (directory / "tokenizer.json").is_file() else AutoTokenizer
    with loading(directory, "tokenizer"):
        tokenizer = loader.from_pretrained(str(directory), local_files_only=True)
    if not tokenizer.chat_template:
        raise ConfigError(
            f"the tokenizer of {directory} has no chat template, which turns chats into tokens (base models "
            "often lack it): use the model's instruct variant, or put a chat_template.jinja into the directory"
        )
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise ConfigError(
            f"the tokenizer of {directory} ({type(tokenizer).__name__}) has no fast form; put a fast one's "
            "tokenizer.json into the directory"
        )
    return tokenizer


def attention_of(hardware: Hardware) -> str:
    """Return the attention that the learner's model is loaded with: the hardware's first choice that computes in fp32.

    With sdpa, calls share tokens (`agentrig_forest.attention`); with another one each call is a row of its own.

    Raises:
        ConfigError: The hardware is set to flash attention only.
    """
    fit = [name for name in hardware.attention if name != "flash_attention_2"]
    if not fit:
        raise ConfigError(
            f"[hardware] attention = {', '.join(hardware.attention)} of {hardware.name}: grpo also computes in fp32, "
            "for the bound of the proof of delivery, and flash attention takes 16-bit numbers only. Leave attention "
            "out, or set sdpa (tokens that calls share are computed once) or eager"
        )
    return fit[0]


def load_model(
    directory: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    attention: str | None = None,
) -> Any:
    """Return the causal language model of a local Hugging Face directory, in evaluation mode.

    Args:
        attention: One of transformers' implementations; None for its own choice.

    Raises:
        ModelError: There is no such directory or no `config.json` in it, or a file is damaged or may not be read.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    directory = model_files(directory, "config.json")
    if not any(directory.glob("pytorch_model*.bin")):
        weight_files(directory)
    disable_progress_bar()  # type: ignore[no-untyped-call]
    with loading(directory, "model"):
        model: Any = AutoModelForCausalLM.from_pretrained(
            str(directory), dtype=dtype, local_files_only=True, attn_implementation=attention
        )
    return model.to(device).eval()


def check_vocabulary(model: Any, tokenizer: Any) -> None:
    """Make sure that the model has an embedding for every token."""
    rows, last = model.get_input_embeddings().weight.shape[0], max(tokenizer.get_vocab().values())
    if last >= rows:
        raise ConfigError(
            f"the tokenizer of {tokenizer.name_or_path} has tokens up to number {last}, and the model's embedding "
            f"{rows} rows, from 0: they do not belong together"
        )


def save(
    model: Any,
    tokenizer: Any,
    directory: Path,
    *,
    dtype: torch.dtype | None = None,
    state: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Write config, generation config, `model.safetensors` and tokenizer.

    Args:
        model: A causal language model; one wrapped by peft is written with its adapters merged.
        tokenizer: Its tokenizer. When it was loaded from a directory, those files are copied as they are.
        directory: Is made if it does not exist.
        dtype: The weights' dtype on disk; None for the model's own.
        state: Weights to write in place of the model's own, as `weights` returns them.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    written = {}
    for name, tensor in (weights(model) if state is None else state).items():
        kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        written[name] = tensor.detach().to(kind)
    save_settings(base, tokenizer, directory, dtype=next(iter(written.values())).dtype)
    save_tensors(written, directory / "model.safetensors")


def save_settings(model: Any, tokenizer: Any, directory: Path, *, dtype: torch.dtype) -> None:
    """Write config, generation config and tokenizer of a plain model whose weights are written in a dtype."""
    directory.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(str(directory))
    config = json.loads((directory / "config.json").read_text("utf-8"))
    config["architectures"] = [type(model).__name__]
    config["dtype"] = str(dtype).removeprefix("torch.")
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    if model.generation_config is not None:
        model.generation_config.save_pretrained(str(directory))
    save_tokenizer(tokenizer, directory)


def save_tensors(tensors: Mapping[str, torch.Tensor], file: Path) -> None:
    """Write a safetensors file beside a `config.json`, whose permissions it gets: else its owner alone can read it."""
    from safetensors.torch import save_file

    save_file({n: t.detach().cpu().contiguous() for n, t in tensors.items()}, str(file), metadata={"format": "pt"})
    file.chmod((file.parent / "config.json").stat().st_mode & 0o777)


def save_tokenizer(tokenizer: Any, directory: Path) -> None:
    """Write a tokenizer with a class name that every loader knows."""
    source = Path(str(tokenizer.name_or_path or ""))
    if source.is_dir() and (source / "tokenizer.json").is_file():
        copy_tokenizer(source, directory)
    else:
        tokenizer.save_pretrained(str(directory))
    file = directory / "tokenizer_config.json"
    config = json.loads(file.read_text("utf-8"))
    if config.get("tokenizer_class") in (None, "TokenizersBackend"):
        config["tokenizer_class"] = TOKENIZER_CLASS
        config.pop("backend", None)
        file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", "utf-8")


def weights(model: Any) -> Mapping[str, torch.Tensor]:
    """Return the weights under the names of the plain model, tied tensors once; adapters are merged when one is read.

    A merged tensor is in fp32, others are the model's own. Iterate over `items()`, and keep no merged tensor longer
    than needed: all of them are a second model.
    """
    if hasattr(model, "get_base_model"):
        return MergedWeights(model)
    state: dict[str, torch.Tensor] = dict(model.state_dict())
    for name in getattr(model, "all_tied_weights_keys", None) or {}:
        state.pop(name, None)
    return state
