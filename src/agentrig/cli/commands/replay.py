"""`agentrig replay`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import click

from agentrig.cli.options import stdout_to_stderr

CANNOT = 2
"""Exit status when the step cannot be replayed."""


@click.command()
@click.argument("run", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("words", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--step", type=click.IntRange(min=1), required=True, help="The step to repeat.")
@click.option("--rescore", is_flag=True, help="Also run the reward again on the recorded outcomes.")
@click.option("--json", "as_json", is_flag=True, help="Print the stages as JSON.")
@click.pass_context
def replay(context: click.Context, run: Path, words: Sequence[str], step: int, rescore: bool, as_json: bool) -> None:
    """Repeat one stored step of a run, and say at which stage it differs.

    The step starts from the checkpoint of the step before, with the recorded rollouts: no agent runs, and nothing in
    the run directory changes. The exit status is 0 if every stage that could be compared is the same, 1 if one
    differs, and 2 if the step cannot be replayed.

    \b
    agentrig replay runs/mini-20260101-120000 --step 12
    agentrig replay runs/mini-20260101-120000 --step 12 --rescore --json
    agentrig replay runs/mini-20260101-120000 --step 12 algorithm.lr=1e-5
    """
    from agentrig.errors import AgentrigError
    from agentrig.run import replay as repeating
    from agentrig.run.resume import recorded_plan
    from agentrig.text import storable

    try:
        with stdout_to_stderr(as_json):
            found = repeating.replay(recorded_plan(run, overrides=words), run, step, rescore=rescore)
    except AgentrigError as error:
        click.echo(f"agentrig: {storable(str(error))}", err=True)
        context.exit(CANNOT)
    first = found.first_difference
    if as_json:
        click.echo(json.dumps(found.as_dict(), indent=2))
        context.exit(1 if first else 0)
    start = f"the checkpoint {found.start}" if found.start else "the starting model"
    click.echo(f"step {step} of {run}, algorithm {found.algorithm}, from {start}")
    for stage in found.stages:
        click.echo(f"  {stage.name:<11} {stage.result:<13} {stage.detail}")
    for reason in found.inexact:
        click.echo(f"bit for bit can't be expected: {reason}")
    for note in found.notes:
        click.echo(f"note: {note}")
    if first is None:
        left = [stage.name for stage in found.stages if stage.result == "not compared"]
        but = f"; not compared: {', '.join(left)}" if left else ""
        click.echo(f"every stage that was compared is the same{but}")
    else:
        click.echo(f"first difference: {first.name}. Later stages may differ because of it")
    context.exit(1 if first else 0)
