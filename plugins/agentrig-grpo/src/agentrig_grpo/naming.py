"""Finds the starting model: a local directory, or a model shipped with this distribution."""

from __future__ import annotations

import os
import re
from pathlib import Path

from agentrig.errors import ConfigError, nearest

OF_HUB = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
"""What a model of the Hugging Face hub is called: owner and name."""

SHIPPED = Path(__file__).parent / "models"


def shipped() -> list[str]:
    """Return the names of the models that this distribution ships."""
    return sorted(p.parent.name for p in SHIPPED.glob("*/config.json"))


def model_directory(name: str) -> Path:
    """Return the directory of a model.

    Args:
        name: A Hugging Face directory, or a shipped model's name.

    Raises:
        ConfigError: It is neither; the message lists the shipped models.
    """
    directory = Path(name).expanduser()
    try:
        if (directory / "config.json").is_file():
            return directory.resolve()
    except PermissionError:
        raise ConfigError(
            f"[algorithm] model = {name!r}: this user (uid {os.getuid()}) may not look into it or a folder above; "
            "change the permissions: chmod u+rX"
        ) from None
    known = shipped()
    if name in known:
        return SHIPPED / name
    found = "it has no config.json" if directory.is_dir() else "there is no such directory"
    fetch = "algorithm.model=DIR, or --model DIR in agentrig run"
    if OF_HUB.fullmatch(name) and not directory.parent.is_dir():
        fetch = f"hf download {name} --local-dir models/{directory.name}, then algorithm.model=models/{directory.name}"
    raise ConfigError(
        f"[algorithm] model = {name!r}: {found}, and no shipped model has this name.{nearest(name, known)}\n"
        f"  shipped models: {', '.join(known) or 'none'}; any other must be a local Hugging Face directory:\n"
        f"  {fetch}; agentrig warmup makes a small one for your tasks"
    )
