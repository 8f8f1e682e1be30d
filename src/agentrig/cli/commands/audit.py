"""`agentrig audit`."""

from __future__ import annotations

import json
import math
from contextlib import closing
from pathlib import Path

import attrs
import click

from agentrig.cli.options import RunPath, stdout_to_stderr

CANNOT = 2
"""Exit status when the step cannot be audited."""


@click.command()
@click.argument("run", type=RunPath())
@click.option("--step", type=click.IntRange(min=1), help="The step; without it the latest.")
@click.option("--all", "every", is_flag=True, help="All steps of the run.")
@click.option("--json", "as_json", is_flag=True, help="Print the verdicts as JSON.")
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
    from agentrig.audit.record import Record
    from agentrig.audit.verdicts import LINKS
    from agentrig.errors import AgentrigError
    from agentrig.processes.scratch import temporary_files
    from agentrig.run.auditing import Rebuilt
    from agentrig.run.directory import RunDirectory
    from agentrig.run.manifest import EDITED, edited_settings
    from agentrig.run.past import losses
    from agentrig.run.resume import recorded_plan
    from agentrig.text import printable

    found = []
    click.echo(f"{run}: reading it, and building its tasks and its reward again …", err=True)
    try:
        with temporary_files(), stdout_to_stderr(as_json):  # torch makes a folder for compiled kernels
            plan = recorded_plan(run)  # names the file if config.toml or manifest.json is damaged
            for name, now, was in edited_settings(Record(run).config, RunDirectory(run).manifest()):
                if name == "algorithm.model":  # no weights could be compared
                    raise AgentrigError(f"{EDITED.format(name, now, was)}. Write {name} = {was!r} there again")
            told, damaged = RunDirectory(run).read_metrics()
            for text in losses(told, damaged, max((line["step"] for line in told), default=0)):
                click.echo(f"agentrig: warning: {text}", err=True)
            steps = sorted(Record(run).lines)
            if step is not None and step not in steps:
                raise AgentrigError(f"{run}/metrics.jsonl has no step {step}; it has {steps or 'none'}")
            if not steps:
                raise AgentrigError(f"{run} has no step yet")
            with closing(Rebuilt(plan)) as rebuilt:
                auditor = Auditor(run, rebuilt.sources(seconds=math.inf))
                chosen = steps if every else [step or steps[-1]]
                for i, one in enumerate(chosen, 1):
                    of = f" ({i} of {len(chosen)})" if every else ""

                    def tell(link: str, at: str = f"  step {one}{of}") -> None:
                        click.echo(f"{at}: looking at its {link} …", err=True)

                    found.append(auditor.audit(one, begun=tell))
                    if not as_json:
                        click.echo(f"step {one}: {len(found[-1].looked)} of {len(LINKS)} parts compared")
                        for verdict in found[-1].verdicts:
                            causes = f"\n{'':30}likely causes: {verdict.causes}" if verdict.causes else ""
                            click.echo(f"  {verdict.link:<13} {verdict.result:<14} {printable(verdict.detail)}{causes}")
    except AgentrigError as error:
        click.echo(f"agentrig: {printable(str(error))}", err=True)
        context.exit(CANNOT)
    if as_json:
        click.echo(json.dumps([attrs.asdict(each) for each in found], indent=2))
    if any(each.faults for each in found):
        context.exit(1)
    context.exit(0 if any(each.looked for each in found) else CANNOT)
