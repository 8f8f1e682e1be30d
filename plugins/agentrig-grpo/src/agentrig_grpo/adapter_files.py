"""Checkpoints of adapters: the files that peft and vLLM read, and the plain model that is made of them."""

from __future__ import annotations

import fcntl
import json
import re
import shutil
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch  # noqa: TID253  (imported with the learner, or where a checkpoint of adapters is used as a model)
from safetensors import SafetensorError
from safetensors.torch import load_file

from agentrig.delivery.digests import fingerprint
from agentrig.errors import CheckpointDamaged, ConfigError
from agentrig.run.checkpoints import STARTING_MODEL, verify, write_list
from agentrig_grpo import checkpoint
from agentrig_grpo.lora import MergedWeights, wrap
from agentrig_grpo.model_files import ModelError, stored_in

WEIGHTS = "adapter_model.safetensors"
SETTINGS = "adapter_config.json"

MERGED = ".model"
"""Folder in a checkpoint: the plain model, once somebody has asked for it. It is not part of what was saved."""

ALGORITHM = "grpo"
"""The algorithm whose `export` makes a plain model of such a checkpoint."""


def reference(model: Any, name: str) -> dict[str, str]:
    """Return what identifies the starting model of adapters: the content of a checkpoint's `starting_model.json`.

    Args:
        model: It, as it was loaded, not wrapped yet.
        name: What it is found by from any working directory, see `agentrig_grpo.naming.lasting`.
    """
    return {"algorithm": ALGORITHM, "model": name, "digest": _digest(model)}


def _digest(model: Any) -> str:
    """Return a digest of a model's weights as its files have them, whatever the dtype that it was loaded in."""
    short = bool(model.name_or_path) and stored_in(Path(model.name_or_path), "BF16")
    return fingerprint(checkpoint.weights(model), torch.bfloat16 if short else torch.float32)


def save(
    model: Any,
    tokenizer: Any,
    directory: Path,
    *,
    dtype: torch.dtype,
    trained: Mapping[str, torch.Tensor],
    start: Mapping[str, str],
) -> None:
    """Write adapters, their settings, the model's config and tokenizer, and the reference to the starting model.

    Args:
        model: The model that peft has wrapped.
        directory: Is made if it does not exist.
        dtype: Of the weights when they are merged.
        trained: Name to tensor of the adapters.
        start: See `reference`.
    """
    checkpoint.save_settings(model.get_base_model(), tokenizer, directory, dtype=dtype)
    checkpoint.save_tensors({plain_name(name): tensor for name, tensor in trained.items()}, directory / WEIGHTS)
    model.peft_config["default"].save_pretrained(str(directory))
    settings = json.loads((directory / SETTINGS).read_text("utf-8"))
    settings["target_modules"] = sorted(settings["target_modules"])  # a set: its order changes from run to run
    if "/" in start["model"] and not Path(start["model"]).is_absolute():  # of the hub; else it is the directory
        settings["base_model_name_or_path"] = start["model"]
    (directory / SETTINGS).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", "utf-8")
    (directory / STARTING_MODEL).write_text(json.dumps(start, indent=2) + "\n", "utf-8")


def plain_name(name: str) -> str:
    """Return the name of an adapter's tensor in a file: peft leaves out the adapter's own."""
    return re.sub(r"\.default(\.weight)?$", r"\1", name)


def check_start(directory: Path, start: Mapping[str, str]) -> None:
    """Check that a checkpoint's adapters belong to a starting model.

    Raises:
        ConfigError: It is another model.
        CheckpointDamaged: It does not name one.
    """
    _compare(directory, _read(directory, STARTING_MODEL), start["digest"], start["model"])


def _compare(directory: Path, wanted: Mapping[str, str], digest: str, name: str) -> None:
    if wanted["digest"] != digest:
        raise ConfigError(
            f"{directory} holds adapters of {wanted['model']} as it was when the run began, and {name} has other "
            "weights: it was changed since, or is another model. Put the starting model back"
        )


def plain_directory(directory: Path, find: Callable[[str], Path]) -> Path:
    """Return a model's directory that every loader reads: of a checkpoint of adapters, its folder `.model`.

    That is made when it is first asked for, by merging the adapters into the starting model, and removed with the
    checkpoint.

    Args:
        find: Returns the directory of a starting model, by its name.

    Raises:
        ConfigError: The starting model is gone, or is another one.
        CheckpointDamaged: A file of the checkpoint has changed.
        ModelError: The folder cannot be written, or has changed.
    """
    if not (directory / STARTING_MODEL).is_file():
        return directory
    made, part = directory / MERGED, directory / f"{MERGED}.part"
    if not made.is_dir():
        verify(directory, trains=False)
        try:
            with (directory / f"{MERGED}.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be making it
                if not made.is_dir():
                    shutil.rmtree(part, ignore_errors=True)  # of one that was killed
                    write_plain(directory, part, find)
                    write_list(part)
                    part.rename(made)
        except (OSError, SafetensorError) as error:
            raise ModelError(
                f"{directory} holds adapters, and the model with them cannot be written there ({error}). "
                f"Write it elsewhere: agentrig export {directory} DIR, then use DIR"
            ) from error
        finally:
            shutil.rmtree(part, ignore_errors=True)
    _verify_once(made, made.stat().st_ino)
    return made


@cache
def _verify_once(made: Path, _inode: int) -> None:
    try:
        verify(made)
    except CheckpointDamaged as error:
        raise ModelError(f"{error}. Remove this folder: it is made again when it is needed") from error


def write_plain(directory: Path, target: Path, find: Callable[[str], Path]) -> None:
    """Write the model of a checkpoint of adapters, merged as the learner merges them for the server.

    Raises:
        ConfigError: The starting model is gone, or is another one.
        CheckpointDamaged: The adapters cannot be read, or do not fit the starting model.
    """
    start, settings = _read(directory, STARTING_MODEL), _read(directory, SETTINGS)
    dtype: torch.dtype = getattr(torch, _read(directory, "config.json")["dtype"])
    try:
        source = find(start["model"])
    except ConfigError as error:
        raise ConfigError(
            f"{directory} holds adapters of {start['model']}, and that model is not there any more: put it back\n"
            f"  {error}"
        ) from error
    short = dtype == torch.bfloat16 and stored_in(source, "BF16")
    model = checkpoint.load_model(source, dtype=dtype if short else torch.float32)
    _compare(directory, start, _digest(model), str(source))
    targets = ",".join(settings["target_modules"])
    model = wrap(model, rank=settings["r"], alpha=settings["lora_alpha"], targets=targets)
    adapters = {plain_name(name): p for name, p in model.named_parameters() if p.requires_grad}
    try:
        found = load_file(str(directory / WEIGHTS))
        if found.keys() != adapters.keys():
            raise ValueError("they are of other layers")
        for name, parameter in adapters.items():
            parameter.data = found[name].view_as(parameter)
    except Exception as error:
        raise CheckpointDamaged(directory, f"{WEIGHTS} does not fit ({type(error).__name__}: {error})") from error
    checkpoint.save(model, checkpoint.load_tokenizer(directory), target, state=MergedWeights(model).fold(dtype))


def _read(directory: Path, name: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((directory / name).read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointDamaged(directory, f"{name} cannot be read ({type(error).__name__}: {error})") from None
    return found
