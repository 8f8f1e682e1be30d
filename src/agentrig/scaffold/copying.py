"""Copies a template with its names replaced: a whole package, or its one source file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jinja2 import Environment
from jinja2.ext import Extension

from agentrig.errors import ConfigError, extra
from agentrig.scaffold.templates import FOLDER, TEMPLATES, Template, snake, source_of


class RealNames(Extension):
    """Makes copier's variables of the real names in a template, in files and in paths."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        start, end = environment.variable_start_string, environment.variable_end_string
        self._variables = [
            (form(template.name), f"{start} {variable} {end}")
            for template in TEMPLATES.values()
            for form, variable in ((str, "name"), (snake, "module"))
        ]

    def preprocess(self, source: str, name: str | None, filename: str | None = None) -> str:
        """Return a text with variables instead of names."""
        for real, variable in self._variables:
            source = source.replace(real, variable)
        return source


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
    with extra("new", "`agentrig new` needs copier"):
        import copier
        from copier import Settings

    values = {"name": name, "module": snake(name)}
    try:
        with tempfile.TemporaryDirectory(prefix=".agentrig-new-", dir=parent) as folder:
            made = Path(folder) / "package"
            for part in ("common", template.kind):
                data = {**values, "folder": part}
                # Settings of its own: a file of the user's about copier has no say here.
                copier.run_copy(str(FOLDER), made, data, defaults=True, quiet=True, unsafe=True, settings=Settings())
            yield made
    except OSError as error:
        raise ConfigError(f"{parent} can't be written: {error.strerror or error}") from error
