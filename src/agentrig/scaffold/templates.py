"""The templates: packages in `agentrig/templates/`, one a kind, each with a component that works."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import attrs

import agentrig
from agentrig.errors import ConfigError, nearest

FOLDER = Path(agentrig.__file__).parent / "templates"
"""Where the templates are: `FOLDER/KIND` is a package, `FOLDER/common` has the files that all packages get."""


@attrs.frozen(kw_only=True)
class Template:
    """The template of one kind.

    Attributes:
        kind: What `agentrig new` calls it, and its folder.
        name: The name of its component; its distribution is `agentrig-NAME` and its module `agentrig_NAME`.
        use: How a run uses the component: what follows `agentrig train`, with `{name}`.
        environment: What a shell sets in front of that command, with a space at the end; '' for nothing.
        beside: The components of others that `agentrig validate` needs to check it: what follows its name.
    """

    kind: str
    name: str
    use: str
    environment: str = ""
    beside: str = ""

    @property
    def folder(self) -> Path:
        """The package."""
        return FOLDER / self.kind

    @property
    def source(self) -> Path:
        """Its one source file, relative to the package."""
        return source_of(self.name)

    def command(self, name: str, *, file: Path | None = None) -> str:
        """Return the command that trains with a component made from it, in a package or in a file."""
        words = self.use.format(name=name) + (f" --plugin {file}" if file else "")
        return f"{self.environment}agentrig train {words}"

    def validation(self, file: Path) -> str:
        """Return the command that runs the kit's checks on a component in a file."""
        return f"{self.environment}agentrig validate {file}{self.beside and f' {self.beside}'}"


def source_of(name: str) -> Path:
    """Return the source file of the package of a component."""
    return Path("src", f"agentrig_{snake(name)}", "__init__.py")


def snake(name: str) -> str:
    """Return a component's name as Python writes it."""
    return name.replace("-", "_")


TEMPLATES: Mapping[str, Template] = {
    t.kind: t
    for t in (
        Template(kind="tasks", name="car-dealers", use="mini --tasks {name}"),
        Template(
            kind="agent", name="one-shot", use="mini --agent {name}", beside="--tasks mini-sql --reward spider-exec"
        ),
        Template(kind="reward", name="partial-credit", use="mini --reward {name}", beside="--tasks mini-sql"),
        Template(kind="adapter", name="last-calls", use="mini --adapter {name}"),
        Template(kind="algorithm", name="best-of-group", use="mini --algorithm {name} algorithm.model=mini"),
        Template(kind="server", name="timed-server", use="mini --server {name}"),
        Template(kind="runners", name="gentle-runners", use="mini --runners {name}"),
        Template(
            kind="hardware",
            name="fake-accelerator",
            use="mini --hardware {name}",
            environment="FAKE_ACCELERATORS=2 ",
        ),
        Template(kind="observer", name="hard-tasks", use="mini --observer {name}"),
        Template(kind="recipe", name="five-minutes", use="{name}"),
    )
}
"""Every kind that `agentrig new` knows, in the order of a run file's sections."""


def template_of(kind: str) -> Template:
    """Return the template of a kind.

    Raises:
        ConfigError: There is none; the message has the kinds and the nearest one.
    """
    if kind not in TEMPLATES:
        raise ConfigError(f'there is no kind "{kind}".{nearest(kind, TEMPLATES)} The kinds are: {", ".join(TEMPLATES)}')
    return TEMPLATES[kind]
