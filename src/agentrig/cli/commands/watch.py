"""`agentrig watch`."""

from __future__ import annotations

import sys
import time
import webbrowser
from pathlib import Path

import click

from agentrig.cli.options import RunPath, newest_run


@click.command()
@click.argument("place", metavar="[RUN | DIRECTORY]", required=False, type=RunPath())
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="On this machine; any free one by default.")
@click.option("--open/--no-open", "opens", default=False, help="Open the page in a browser.")
@click.option(
    "--prices",
    metavar="FILE.toml",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="For comparisons: what tokens and machines cost, see `agentrig compare --help`.",
)
@click.option("--with-input", is_flag=True, hidden=True, help="End when standard input ends.")
def watch(place: Path | None, port: int, opens: bool, prices: Path | None, with_input: bool) -> None:
    """Show runs in a browser, live: curves, failures, every trace, runs side by side.

    The page is for this machine only, and its link has a token that no other program knows. It reads the run
    directories and changes nothing, so it can be started before, during or after a run, or on a copy of one.
    For a machine that you reach by SSH, forward the port: ssh -L PORT:127.0.0.1:PORT HOST

    \b
    agentrig watch
    agentrig watch runs/mini-20260101-120000
    agentrig watch runs --port 8421
    """
    from agentrig.view import read_prices
    from agentrig.view.watch.app import serving

    place = place or Path("runs")
    if not place.is_dir():
        newest_run("watch")  # it says that there is none
    with serving(place, port, prices=None if prices is None else read_prices(prices)) as link:
        click.echo(f"watching {place}: {link}")
        if with_input:  # `agentrig train --watch` ends it
            sys.stdin.buffer.read()
            return
        click.echo("Ctrl-C ends the page, not the run")
        if opens:
            webbrowser.open(link)
        try:
            while True:
                time.sleep(0.2)  # not for ever: a signal that another thread has taken does not end a wait
        except KeyboardInterrupt:
            click.echo("")
