"""The templates: packages in `agentrig/templates/`, one a kind, each with a component that works."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import attrs

import agentrig
from agentrig.errors import ConfigError, nearest

FOLDER = Path(agentrig.__file__).parent / "templates"
"""Where the templates are: `FOLDER/KIND` is a package, `FOLDER/common` has the files that all packages get."""

DOMAIN = "domain"
"""What `agentrig new` calls tasks, agent, reward, demonstrator and recipe in one package."""


@attrs.frozen(kw_only=True)
class Template:
    """The template of one kind.

    Attributes:
        kind: What `agentrig new` calls it, and its folder.
        name: The name of its component; its distribution is `agentrig-NAME` and its module `agentrig_NAME`.
        use: How a run uses the component: what follows `agentrig train`, with `{name}`.
        environment: What a shell sets in front of that command, with a space at the end; '' for nothing.
        beside: The components of others that `agentrig validate` needs to check it: what follows its name.
        before: What makes the model that this command starts from: what follows `agentrig`; '' for nothing.
    """

    kind: str
    name: str
    use: str
    environment: str = ""
    beside: str = ""
    before: str = ""

    @property
    def folder(self) -> Path:
        """The package."""
        return FOLDER / self.kind

    @property
    def source(self) -> Path:
        """Its one source file, relative to the package."""
        return source_of(self.name)

    def commands(self, name: str, *, file: Path | None = None) -> list[tuple[str, str]]:
        """Return the commands that train with what is made from it, in a package or in a file, and why."""
        more = f" --plugin {file}" if file else ""
        found = [(f"agentrig {self.before.format(name=name)}{more}", "makes its starting model")] if self.before else []
        return [*found, (f"{self.environment}agentrig train {self.use.format(name=name)}{more}", "trains with it")]

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
        Template(
            kind=DOMAIN,
            name="order-desk",
            use="{name}",
            before="warmup {name} --labels 100 --parameters 3e5 --passes 12 --until 0.2",
        ),
    )
}
"""What `agentrig new` makes: every kind, in the order of a run file's sections, and a domain."""


def template_of(kind: str) -> Template:
    """Return the template of a kind.

    Raises:
        ConfigError: There is none; the message has the kinds and the nearest one.
    """
    if kind not in TEMPLATES:
        raise ConfigError(f'there is no kind "{kind}".{nearest(kind, TEMPLATES)} The kinds are: {", ".join(TEMPLATES)}')
    return TEMPLATES[kind]
