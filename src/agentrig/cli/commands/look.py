"""`agentrig why`, `report`, `compare`, `watch` and `audit`: what a run did."""

from __future__ import annotations

import math
import shlex
import sys
import time
import webbrowser
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import attrs
import click

from agentrig.cli.options import RunPath, json_option, newest_run, print_json
from agentrig.cli.progress import reading
from agentrig.errors import AgentrigError
from agentrig.text import printable

PROBLEMS = 1
"""Exit status when something held learning back."""

CANNOT = 2
"""Exit status when the run cannot be read, or none of its steps, or no step can be audited."""


@click.command()
@click.argument("run", required=False, type=click.Path(path_type=Path, file_okay=False))
@json_option("Print the diagnosis as JSON.")
@click.pass_context
def why(context: click.Context, run: Path | None, as_json: bool) -> None:
    """Say what held a run's learning back, the first cause first; without RUN, that of the newest in runs/.

    Each cause comes with its count, the step since which it was seen, and the settings to change. The run may still go
    on, or be interrupted or copied. The exit status is 0 if it names no cause, 1 if it names one, 2 if RUN, or all of
    its metrics.jsonl, cannot be read. A gain that may be chance is no cause: such a run has 0, or 1 for a cause.

    \b
    agentrig why
    agentrig why runs/mini-20260101-120000 --json
    """
    try:
        with reading("the run"):
            from agentrig.view.diagnosis import diagnose, words

            found = diagnose(run or newest_run("why"))
    except AgentrigError as error:
        click.echo(f"agentrig: {printable(str(error))}", err=True)
        context.exit(CANNOT)
    if as_json:
        print_json(attrs.asdict(found), indent=2)
    else:
        click.echo(printable(words(found)))
    unread = not found.steps and found.missing and found.status != "running" and not found.no_gain
    context.exit(PROBLEMS if found.problems else CANNOT if unread else 0)


@click.command()
@click.argument("runs", metavar="[RUN]", nargs=-1, type=RunPath())
@click.option("--out", type=click.Path(path_type=Path), help="Where to write the page; the run by default.")
@click.option("--gold", is_flag=True, help="Show the rollouts on the page with the private part of their tasks.")
@click.option("--binned", is_flag=True, help="Draw training curves as the mean of each 16 steps, not a moving mean.")
@json_option("Print the figures as JSON.")
def report(runs: Sequence[Path], out: Path | None, gold: bool, binned: bool, as_json: bool) -> None:
    """Rebuild the report of a run, without RUN of the newest in runs/; several runs have `agentrig compare`.

    \b
    agentrig report
    agentrig report runs/mini-20260101-120000
    """
    from agentrig.figures import points
    from agentrig.view import build_report
    from agentrig.view.causes.evidence import Evidence
    from agentrig.view.causes.outcome import changes
    from agentrig.view.comparison import compare
    from agentrig.view.reading import read_run
    from agentrig.view.table import SHOWN, results, text_of

    if len(runs) > 1:
        raise click.UsageError(f"a report is of one run. For several: agentrig compare {shlex.join(map(str, runs))}")
    runs = runs or [newest_run("report")]
    page = build_report(runs, out, gold=gold, binned=binned)
    (row,) = compare(runs).rows
    _warn_of_missing([row])
    if as_json:
        print_json({"report": str(page), **row}, indent=2, default=str)
        return
    click.echo(text_of(results([row], SHOWN)))
    evidence = Evidence.of(read_run(runs[0]))
    gain = "" if evidence.gain is None else f"{points(evidence.gain)} points: "
    for found in changes(evidence):
        click.echo(printable(f"{gain}{found.text}"))
    click.echo(f"report: {page}")


def _warn_of_missing(rows: Sequence[Mapping[str, Any]]) -> None:
    """Say what of each run is missing, cannot be read, or was changed."""
    for row in rows:
        for text in row["missing"]:
            click.echo(f"agentrig: warning: {row['run']}: {printable(text)}", err=True)


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
    help="Write a page, with curves and all settings that differ, too; images go into PAGE-plots/ beside it.",
)
@click.option("--gold", is_flag=True, help="Show the rollouts on the page with the private part of their tasks.")
@click.option("--binned", is_flag=True, help="Draw the page's curves as the mean of each 16 steps, not a moving mean.")
@json_option("Print the lines, and more of each run, as JSON.")
def compare(
    runs: Sequence[Path], prices: Path | None, each: bool, out: Path | None, gold: bool, binned: bool, as_json: bool
) -> None:
    """Compare runs in one table: method, start, held-out accuracy, rollouts, LLM calls, tokens, time and cost.

    Each run is compared with the common start by an exact sign test over the held-out tasks. The common start is the
    measurement before training that most of the runs can be compared with, the first of several; a run that came from
    another one is compared with the start of that one. A run with other held-out tasks, another reward or another
    start is compared with its own start, and the table says so. Above it stands whether each other line is
    better than the first after training, and whether that may be chance.

    Finished runs that differ only in their seed are one line: mean, least and greatest, and one test of them together,
    the exact Cochran-Mantel-Haenszel test with each task as a stratum (two-sided: twice the smaller tail;
    equal seeds are not paired).

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
    if not runs:
        raise click.UsageError("name the runs to compare: agentrig compare RUN RUN (of one run: agentrig report)")
    if (gold or binned) and out is None:
        raise click.UsageError(f"{'--gold' if gold else '--binned'} is for the page: name one with --out PAGE.html")
    with reading("the runs"):
        from agentrig.view import build_report, images_of
        from agentrig.view.comparison import compare as compare_runs
        from agentrig.view.prices import read_prices

        table = None if prices is None else read_prices(prices)
        found = compare_runs(runs, prices=table, each=each)
    _warn_of_missing(found.rows)
    page = None
    if out is not None:
        page = build_report(runs, out, gold=gold, binned=binned, prices=table, each=each)
    if as_json:
        told = {"report": str(page)} if page else {}
        print_json({**told, **found.as_dict()}, indent=2, default=str)
        return
    click.echo(found.text())
    if page:
        plots = images_of(page)
        click.echo(f"report: {page}{f', images: {plots}' if plots.is_dir() else ''}")


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
    directories and writes nothing into them but tags and notes, so it can be started before, during or after a run, or
    on a copy of one.
    For a machine that you reach by SSH, forward the port: ssh -L PORT:127.0.0.1:PORT HOST

    \b
    agentrig watch
    agentrig watch runs/mini-20260101-120000
    agentrig watch runs --port 8421
    """
    from agentrig.view.prices import read_prices
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


@click.command()
@click.argument("run", type=RunPath())
@click.option("--step", type=click.IntRange(min=1), help="The step; without it the latest.")
@click.option("--all", "every", is_flag=True, help="All steps of the run.")
@json_option("Print the verdicts as JSON.")
@click.pass_context
def audit(context: click.Context, run: Path, step: int | None, every: bool, as_json: bool) -> None:
    """Look at each link of a recorded step again, with code that shares nothing with the trainer.

    Nothing in the run directory changes. Gradient and update need the sketch that the run left of the steps that it
    audited itself, and the weights before: those of the starting model, or the checkpoint of the step before. The exit
    status is 0 if every link that could be looked at holds, 1 if one does not, and 2 if nothing could be audited.

    \b
    agentrig audit runs/mini-20260101-120000 --step 2
    agentrig audit runs/mini-20260101-120000 --all --json
    """
    if every and step is not None:
        raise click.UsageError("--step is for one step, --all for every one: leave one of them out")
    from agentrig.audit.auditor import Auditor
    from agentrig.audit.verdicts import LINKS
    from agentrig.processes.scratch import temporary_files
    from agentrig.run.auditing import Rebuilt
    from agentrig.run.manifest import EDITED, edited_settings
    from agentrig.run.resume import recorded_plan
    from agentrig.view.reading import read_run

    found = []
    click.echo(f"{run}: reading it, and building its tasks and its reward again …", err=True)
    try:
        with temporary_files():  # torch makes a folder for compiled kernels
            plan = recorded_plan(run)  # names the file if config.toml or manifest.json is damaged
            data = read_run(run)
            for name, now, was in edited_settings(data.config, data.manifest):
                if name == "algorithm.model":  # no weights could be compared
                    raise AgentrigError(f"{EDITED.format(name, now, was)}. Write {name} = {was!r} there again")
            for text in data.unread:
                click.echo(f"agentrig: warning: {printable(text)}", err=True)
            steps = [line["step"] for line in data.steps]
            if step is not None and step not in steps:
                raise AgentrigError(f"{run}/metrics.jsonl has no step {step}; it has {steps or 'none'}")
            if not steps and data.ended:
                raise AgentrigError(f"{run}/metrics.jsonl has no step, so none can be compared. Restore it from a copy")
            if not steps:
                raise AgentrigError(f"{run} has no step yet")
            with closing(Rebuilt(plan)) as rebuilt:
                auditor = Auditor(run, rebuilt.sources(seconds=math.inf))
                chosen = steps if every else [step or steps[-1]]
                for i, one in enumerate(chosen, 1):
                    of = f" ({i} of {len(chosen)})" if every else ""

                    def tell(link: str, at: str = f"  step {one}{of}") -> None:
                        click.echo(f"{at}: looking at its {link} …", err=True)

                    stated = data.summary.get("accuracy") if one == data.summary.get("steps") else None
                    found.append(auditor.audit(one, begun=tell, stated=stated))
                    if not as_json:
                        click.echo(f"step {one}: {len(found[-1].looked)} of {len(LINKS)} parts compared")
                        for verdict in found[-1].verdicts:
                            causes = f"\n{'':30}likely causes: {verdict.causes}" if verdict.causes else ""
                            click.echo(f"  {verdict.link:<13} {verdict.result:<14} {printable(verdict.detail)}{causes}")
    except AgentrigError as error:
        click.echo(f"agentrig: {printable(str(error))}", err=True)
        context.exit(CANNOT)
    if as_json:
        print_json([attrs.asdict(each) for each in found], indent=2)
    if any(each.faults for each in found):
        context.exit(1)
    context.exit(0 if any(each.looked for each in found) else CANNOT)
