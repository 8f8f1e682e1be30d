"""`agentrig data`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import click

from agentrig.cli.groups import NearestGroup
from agentrig.cli.options import stdout_to_stderr


class DataGroup(NearestGroup):
    """One command for each task set that can convert a download, and the tools that task sets provide.

    A name that two plugins use is listed as `distribution:name`.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names, from the installed plugins."""
        return sorted(self._found())

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Return a command; None makes click suggest the nearest name."""
        make = self._found().get(name)
        return make() if make is not None else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Look a command up by name or `distribution:name`; a name that two task sets share is an error."""
        from agentrig.plugins.loading import load

        with stdout_to_stderr():  # `--json` of its tools has stdout for itself
            registry = load()
        if args and any(c.answers_to(args[0]) for c in registry.components("tasks")):
            args = [registry.reference(registry.find("tasks", args[0])), *args[1:]]
        return super().resolve_command(ctx, args)

    def _found(self) -> dict[str, Callable[[], click.Command]]:
        from agentrig.plugins.loading import load

        found: dict[str, Callable[[], click.Command]] = {}
        with stdout_to_stderr():  # `--json` of its tools has stdout for itself
            registry = load()
        for component in registry.components("tasks"):
            spec: Any = component.spec
            if spec.convert is not None:
                found[registry.reference(component)] = partial(convert_command, spec)
            for tool, make in spec.tools.items():
                found[tool if tool not in found else f"{component.distribution}:{tool}"] = make
        return found


def convert_command(spec: Any) -> click.Command:
    """Return the command that converts an official download of a task set."""
    says = f"Make the files of {spec.name} from an official download, or check them."

    @click.command(spec.name, help=f"{says}\n\n\b\nagentrig data {spec.name} --from download.zip")
    @click.option("--from", "source", required=True, metavar="DIR_OR_ZIP", help="The download, or files to check.")
    @click.option("--to", "target", metavar="DIR", help="Where to write; beside the download by default.")
    def convert(source: str, target: str | None) -> None:
        click.echo(spec.convert(source, target))

    return convert


@click.group(cls=DataGroup)
def data() -> None:
    """Make the files of a task set from an official download, or work on its databases.

    \b
    agentrig data spider --from spider.zip --to ~/data/spider
    """
