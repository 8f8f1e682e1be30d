"""`agentrig report`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import click


@click.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--out", type=click.Path(path_type=Path), help="Where to write the page; the first run by default.")
@click.option("--gold", is_flag=True, help="Show the rollouts on the page with the private part of their tasks.")
@click.option("--binned", is_flag=True, help="Draw training curves as the mean of each 16 steps, not a moving mean.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def report(runs: Sequence[Path], out: Path | None, gold: bool, binned: bool, as_json: bool) -> None:
    """Rebuild the report of a run, or compare several.

    \b
    agentrig report runs/mini-20260101-120000
    agentrig report runs/one runs/other --out comparison.html
    """
    from agentrig.view import build_report, compare, compare_text

    page = build_report(list(runs), out, gold=gold, binned=binned)
    if as_json:
        click.echo(json.dumps({"report": str(page), "runs": compare(list(runs))}, indent=2, default=str))
        return
    click.echo(compare_text(list(runs)))
    click.echo(f"report: {page}")
