"""`agentrig why`."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import click

from agentrig.cli.options import newest_run

PROBLEMS = 1
"""Exit status when something held learning back."""

CANNOT = 2
"""Exit status when the run cannot be read, or none of its steps."""


@click.command()
@click.argument("run", required=False, type=click.Path(path_type=Path, file_okay=False))
@click.option("--json", "as_json", is_flag=True, help="Print the diagnosis as JSON.")
@click.pass_context
def why(context: click.Context, run: Path | None, as_json: bool) -> None:
    """Say what held a run's learning back, the first cause first; without RUN, that of the newest in runs/.

    Each cause comes with its count, the step since which it was seen, and the settings to change. The run may still go
    on, or be interrupted or copied. The exit status is 0 if nothing held learning back, 1 if something did, 2 if RUN,
    or all of its metrics.jsonl, cannot be read.

    \b
    agentrig why
    agentrig why runs/mini-20260101-120000 --json
    """
    from agentrig.errors import AgentrigError
    from agentrig.text import printable
    from agentrig.view.diagnosis import diagnose, words

    try:
        found = diagnose(run or newest_run("why"))
    except AgentrigError as error:
        click.echo(f"agentrig: {printable(str(error))}", err=True)
        context.exit(CANNOT)
    click.echo(json.dumps(attrs.asdict(found), indent=2) if as_json else printable(words(found)))
    unread = not found.steps and found.missing and found.status != "running" and not found.no_gain
    context.exit(PROBLEMS if found.problems else CANNOT if unread else 0)
