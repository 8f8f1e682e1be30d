"""`agentrig report`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

import click

from agentrig.cli.options import RunPath, newest_run


@click.command()
@click.argument("runs", metavar="[RUN]", nargs=-1, type=RunPath())
@click.option("--out", type=click.Path(path_type=Path), help="Where to write the page; the run by default.")
@click.option("--gold", is_flag=True, help="Show the rollouts on the page with the private part of their tasks.")
@click.option("--binned", is_flag=True, help="Draw training curves as the mean of each 16 steps, not a moving mean.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def report(runs: Sequence[Path], out: Path | None, gold: bool, binned: bool, as_json: bool) -> None:
    """Rebuild the report of a run, without RUN of the newest in runs/; several runs have `agentrig compare`.

    \b
    agentrig report
    agentrig report runs/mini-20260101-120000
    """
    from agentrig.figures import points
    from agentrig.view import build_report, compare
    from agentrig.view.causes.evidence import Evidence
    from agentrig.view.causes.outcome import changes
    from agentrig.view.reading import read_run
    from agentrig.view.table import SHOWN, results, text_of

    if len(runs) > 1:
        raise click.UsageError(f"a report is of one run. For several: agentrig compare {shlex.join(map(str, runs))}")
    runs = runs or [newest_run("report")]
    page = build_report(runs, out, gold=gold, binned=binned)
    (row,) = compare(runs).rows
    if as_json:
        click.echo(json.dumps({"report": str(page), **row}, indent=2, default=str))
        return
    click.echo(text_of(results([row], SHOWN)))
    before, after = row["accuracy"]["before"], row["accuracy"]["after"]
    gain = "" if None in (before, after) else f"{points(before, after)} points: "
    for found in changes(Evidence.of(read_run(runs[0]))):
        click.echo(f"{gain}{found.text}")
    click.echo(f"report: {page}")
