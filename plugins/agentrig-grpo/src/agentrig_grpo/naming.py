"""Finds the starting model: a local directory, one shipped with this distribution, or one of the Hugging Face hub."""

from __future__ import annotations

import json
import logging
import os
import re
from pathlib import Path

from agentrig.errors import ConfigError, ModelAbsent, nearest, nearest_path
from agentrig.run.checkpoints import STARTING_MODEL
from agentrig.text import words_of

log = logging.getLogger(__name__)

OWN = "models/"
"""Where `agentrig warmup` puts a model: a name that begins so is a folder, whether it is there or not."""

OF_HUB = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
"""What a model of the Hugging Face hub is called: owner and name."""

WEIGHTS = "model.safetensors"

FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
"""What is downloaded of a model: its configuration, weights, tokenizer and chat template."""

SHIPPED = Path(__file__).parent / "models"


def shipped() -> list[str]:
    """Return the names of the models that this distribution ships."""
    return sorted(p.parent.name for p in SHIPPED.glob("*/config.json"))


def model_directory(name: str) -> Path:
    """Return the directory of a model.

    Args:
        name: A Hugging Face directory, a shipped model's name, or `OWNER/NAME` of the hub: then it must be in the
            hub's cache, see `download`. A checkpoint of adapters is merged, see `adapter_files.plain_directory`.

    Raises:
        ConfigError: It is none of them; the message lists the shipped models.
    """
    directory = Path(name).expanduser()
    try:
        if (directory / "config.json").is_file():
            return plain(directory.resolve())
    except PermissionError:
        raise ConfigError(
            f"[algorithm] model = {name!r}: this user (uid {os.getuid()}) may not look into it or a folder above; "
            "change the permissions: chmod u+rX"
        ) from None
    if name in shipped():
        return SHIPPED / name
    if is_of_hub(name) and (cached := in_cache(name)) is not None:
        return cached
    raise ModelAbsent(_absent(name), folder=name) if _is_folder(name) else ConfigError(_absent(name))


def plain(directory: Path) -> Path:
    """Return a directory with the whole model, see `adapter_files.plain_directory`; torch is imported if needed."""
    if not (directory / STARTING_MODEL).is_file():
        return directory
    from agentrig_grpo.adapter_files import plain_directory

    return plain_directory(directory, model_directory)


def lasting(name: str) -> str:
    """Return a model's name as it is found from any working directory: an absolute path, where it is a folder's."""
    directory = Path(name).expanduser()
    return str(directory.resolve()) if (directory / "config.json").is_file() else name


def _absent(name: str) -> str:
    """Say that a model is not there, and what to do."""
    directory, known = Path(name).expanduser(), shipped()
    found = "it has no config.json" if directory.is_dir() else "there is no such directory"
    fetch = "algorithm.model=DIR, or --model DIR in agentrig run"
    if _is_folder(name):
        near = "" if directory.is_dir() else nearest_path(directory)
        return (
            f"[algorithm] model = {name!r}: {found}.{near} Name a local Hugging Face directory, "
            f"{', '.join(known)}, or OWNER/NAME of the hub, or make a small model for your tasks with agentrig warmup"
        )
    if is_of_hub(name):
        fetch = f"hf download {name} --local-dir models/{directory.name}, then algorithm.model=models/{directory.name}"
    return (
        f"[algorithm] model = {name!r}: {found}, and no shipped model has this name.{nearest(name, known)}\n"
        f"  shipped models: {', '.join(known) or 'none'}; others: a local Hugging Face directory, or OWNER/NAME of the "
        f"hub:\n"
        f"  {fetch}; agentrig warmup makes a small one for your tasks"
    )


def _is_folder(name: str) -> bool:
    """Whether a name is that of a folder, be it there or not."""
    return name.startswith(("/", ".", "~", OWN))


def is_of_hub(name: str) -> bool:
    """Whether a name is that of a model of the hub, and not of a place in a folder that is here."""
    local = _is_folder(name) or Path(name).parent.is_dir()
    return OF_HUB.fullmatch(name) is not None and not local


def in_cache(name: str) -> Path | None:
    """Return the directory of a model of the hub in this machine's cache; None if it is not there as a whole."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        found = Path(snapshot_download(name, allow_patterns=list(FILES), local_files_only=True))
    except (LocalEntryNotFoundError, ValueError):
        return None
    index = found / "model.safetensors.index.json"
    parts = set(json.loads(index.read_text("utf-8"))["weight_map"].values()) if index.is_file() else {WEIGHTS}
    return found if all((found / file).is_file() for file in ("config.json", *parts)) else None


def download(name: str) -> None:
    """Download a model of the hub into the cache if it is not there.

    Raises:
        ConfigError: The hub does not answer, or does not give it; the message has the reason and the command to try.
    """
    if not is_of_hub(name) or in_cache(name) is not None:
        return
    from huggingface_hub import snapshot_download

    log.warning("downloading the model %s from the Hugging Face hub", name)
    try:
        snapshot_download(name, allow_patterns=list(FILES))
    except Exception as error:  # of the client, or of the HTTP library below it
        raise ConfigError(f"{_absent(name)}\n  the hub: {words_of(error).splitlines()[0]}") from error
