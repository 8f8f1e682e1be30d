"""`agentrig new`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("kind")
@click.argument("name")
@click.option("--here", "file", type=click.Path(path_type=Path), metavar="FILE.py", help="One file, not a package.")
def new(kind: str, name: str, file: Path | None) -> None:
    """Start a component of your own: a package with tests, or one file.

    For any kind of agent, KIND is domain: tasks, an agent that calls a tool, a reward, a demonstrator and a recipe. Or
    one component: tasks, agent, reward (these are for SQL), adapter, algorithm, credit, server, runners, hardware,
    observer or recipe. The package is the folder agentrig-NAME and works as it is: install it, run its tests, edit its
    source.

    \b
    agentrig new domain my-domain
    agentrig new reward my-reward
    agentrig new agent my-sql-agent --here my_agent.py
    """
    from agentrig.plugins.loading import load
    from agentrig.scaffold.names import check_file, check_name
    from agentrig.scaffold.templates import copy, source_of, template_of

    template = template_of(kind)
    registry = load()
    check_name(kind, name, registry)
    if file is not None:
        check_file(file, registry)
    target = file or Path(f"agentrig-{name}")
    copy(template, name, target)
    click.echo(f"{target} {'has' if file else 'is a package with'} the {kind} {name}.\n")
    if file is not None:
        steps = [(f"agentrig plugins --plugin {file}", "lists it"), (template.validation(file), "checks it")]
        edit = f"Then edit {file}."
    else:
        steps = [
            (f"cd {target}", ""),
            ('pip install -e ".[test]"', "agentrig finds it from now on"),
            ("pytest", "runs its tests"),
            ("agentrig plugins", "lists it"),
        ]
        edit = f"Then edit {source_of(name)}. README.md says how to publish it."
    steps += template.commands(name, file=file)
    width = max(len(command) for command, _ in steps)
    for command, why in steps:
        click.echo(f"  {command:<{width}}  # {why}" if why else f"  {command}")
    click.echo(f"\n{edit}")
    if template.sql:
        here = " --here my_domain.py" if file is not None else ""
        click.echo(f"For tasks other than SQL: agentrig new domain my-domain{here}")
