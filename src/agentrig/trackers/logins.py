"""Whether the clients of trackers have a login on this machine: without one they ask for it, or fail."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import urlsplit

WANDB_HOSTS = ("api.forge.coreweave.com", "api.wandb.ai")
"""W&B's default servers, since 0.31 and before; it accepts a login for either."""


def wandb_ready() -> bool:
    """Return whether W&B's client needs no login, or has one."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    if os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun"):
        return True
    base = os.environ.get("WANDB_BASE_URL")
    hosts = [urlsplit(base).hostname or ""] if base else WANDB_HOSTS
    files = [os.environ["NETRC"]] if "NETRC" in os.environ else ["~/.netrc", "~/_netrc"]
    texts = [f.read_text("utf-8", errors="replace") for f in map(Path, map(os.path.expanduser, files)) if f.is_file()]
    return any(host in text for host in hosts for text in texts)


def swanlab_ready() -> bool:
    """Return whether SwanLab's client needs no login, or has one."""
    if os.environ.get("SWANLAB_API_KEY") or os.environ.get("SWANLAB_MODE") in ("offline", "local", "disabled"):
        return True
    import swanlab

    return bool(swanlab.Settings().api_key)  # what `swanlab login` wrote, or one of its settings files
