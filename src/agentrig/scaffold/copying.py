"""Copies a template with its names replaced: a whole package, or its one source file."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from agentrig.errors import ConfigError
from agentrig.scaffold.templates import Template, source_of


def copy(template: Template, name: str, target: Path) -> None:
    """Copy a template to a folder that does not exist yet, or its source to a `FILE.py`; an error leaves nothing.

    Raises:
        ConfigError: There is something of that name, even a broken link; or it can't be written.
    """
    if os.path.lexists(target):
        raise ConfigError(f"{target} exists already: use another name, or delete it. Nothing is overwritten")
    parent = target.parent
    try:
        with tempfile.TemporaryDirectory(prefix=".agentrig-new-", dir=parent) as folder:
            made = Path(folder) / "package"
            for path, text in template.files(name).items():
                (made / path).parent.mkdir(parents=True, exist_ok=True)
                (made / path).write_text(text, "utf-8")
            if target.suffix == ".py":
                os.link(made / source_of(name), target)  # unlike a rename it fails if somebody has just made the file
            else:
                os.rename(made, target)
    except OSError as error:
        raise ConfigError(f"{parent} can't be written: {error.strerror or error}") from error
