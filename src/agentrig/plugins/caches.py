"""The user's cache folder: the refreshed index of plugins, and which plugins were tried."""

from __future__ import annotations

import os
from pathlib import Path


def folder() -> Path:
    """Return `$AGENTRIG_CACHE`, else `agentrig` in the user's cache folder."""
    own = os.environ.get("AGENTRIG_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentrig"


def write(file: Path, text: str) -> None:
    """Write a file whole or not at all, and its folder; raises `OSError`."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.{os.getpid()}.part")
    part.write_text(text, "utf-8")
    part.replace(file)
