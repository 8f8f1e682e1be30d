"""Copies a template with its names replaced: a whole package, or its one source file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentrig.errors import ConfigError
from agentrig.scaffold.templates import Template, source_of


def refuse_existing(target: Path) -> None:
    """Raise `ConfigError` if there is something of that name, even a broken link."""
    if os.path.lexists(target):
        raise ConfigError(f"{target} exists already: use another name, or delete it. Nothing is overwritten")


def make_package(template: Template, name: str, target: Path) -> None:
    """Copy a template to a folder that does not exist yet; after an error nothing is left.

    Raises:
        ConfigError: The folder exists, or can't be written.
    """
    refuse_existing(target)
    with _copied(template, name, target.parent) as made:
        os.rename(made, target)


def make_file(template: Template, name: str, target: Path) -> None:
    """Copy a template's source file to a file that does not exist yet; after an error nothing is left.

    Raises:
        ConfigError: The file exists, or can't be written.
    """
    refuse_existing(target)
    with _copied(template, name, target.parent) as made:
        os.link(made / source_of(name), target)  # unlike a rename it fails if somebody has just made the file


@contextmanager
def _copied(template: Template, name: str, parent: Path) -> Iterator[Path]:
    """Yield a copy of the package in a temporary folder below `parent`, so that one rename completes it."""
    try:
        with tempfile.TemporaryDirectory(prefix=".agentrig-new-", dir=parent) as folder:
            made = Path(folder) / "package"
            for path, text in template.files(name).items():
                (made / path).parent.mkdir(parents=True, exist_ok=True)
                (made / path).write_text(text, "utf-8")
            yield made
    except OSError as error:
        raise ConfigError(f"{parent} can't be written: {error.strerror or error}") from error
