"""`agentrig compare`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import click

from agentrig.cli.options import RunPath


@click.command()
@click.argument("runs", nargs=-1, type=RunPath())
@click.option(
    "--prices",
    metavar="FILE.toml",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="What tokens and machines cost, see below. What has no price is left empty.",
)
@click.option("--each", is_flag=True, help="A line for each run, also for those that differ only in their seed.")
@click.option(
    "--out",
    metavar="PAGE.html",
    type=click.Path(path_type=Path),
    help="Write a page, with curves, too; their images go into plots/ beside it.",
)
@click.option("--gold", is_flag=True, help="Show the rollouts on the page with the private part of their tasks.")
@click.option("--binned", is_flag=True, help="Draw the page's curves as the mean of each 16 steps, not a moving mean.")
@click.option("--json", "as_json", is_flag=True, help="Print the lines, and more of each run, as JSON.")
def compare(
    runs: Sequence[Path], prices: Path | None, each: bool, out: Path | None, gold: bool, binned: bool, as_json: bool
) -> None:
    """Compare runs in one table: method, start, held-out accuracy, rollouts, LLM calls, tokens, time and cost.

    Each run is compared with the common start by an exact sign test over the held-out tasks. The common start is the
    measurement before training that most of the runs can be compared with, the first of several; a run that came from
    another one is compared with the start of that one. A run with other held-out tasks, another reward or another
    start is compared with its own start, and the table says so.

    Finished runs that differ only in their seed are one line: mean, least and greatest.

    \b
    agentrig compare runs/one runs/other
    agentrig compare runs/* --prices prices.toml --out comparison.html

    \b
    prices.toml:
      currency = "USD"
      [models."large-1"]       # by the names that the table shows
      prompt = 0.4             # of a million tokens
      response = 1.6
      [machines."cpu: x86_64"]
      hour = 0.1
    """
    from agentrig.text import printable
    from agentrig.view import build_report, read_prices
    from agentrig.view import compare as compare_runs

    if not runs:
        raise click.UsageError("name the runs to compare: agentrig compare RUN RUN (of one run: agentrig report)")
    if (gold or binned) and out is None:
        raise click.UsageError(f"{'--gold' if gold else '--binned'} is for the page: name one with --out PAGE.html")
    table = None if prices is None else read_prices(prices)
    found = compare_runs(runs, prices=table, each=each)
    for row in found.rows:
        for text in row["missing"]:
            click.echo(f"agentrig: warning: {row['run']}: {printable(text)}", err=True)
    page = None
    if out is not None:
        page = build_report(runs, out, gold=gold, binned=binned, prices=table, each=each)
    if as_json:
        told = {"report": str(page)} if page else {}
        click.echo(json.dumps({**told, **found.as_dict()}, indent=2, default=str))
        return
    click.echo(found.text())
    if page:
        plots = page.parent / "plots"
        click.echo(f"report: {page}{f', images: {plots}' if plots.is_dir() else ''}")
