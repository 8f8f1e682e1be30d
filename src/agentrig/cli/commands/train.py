"""`agentrig train`."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from agentrig.cli.options import configured, make_plan, stdout_to_stderr
from agentrig.plugins.specs import RUN_KINDS


@click.command()
@configured
@click.option("--resume", type=click.Path(path_type=Path), metavar="RUN", help="Resume a run directory.")
@click.option(
    "--from-step", type=click.IntRange(min=1), metavar="N", help="With --resume: from the checkpoint of step N."
)
@click.option("--store", metavar="HOST:PORT", help="Let runners of other machines join; short for runners.store=…")
@click.option("--json", "as_json", is_flag=True, help="Print summary.json at the end, and no display.")
@click.option("--yes", is_flag=True, help="Stop what blocks the run (a stale Ray cluster) without asking.")
def train(
    words: Sequence[str],
    resume: Path | None,
    from_step: int | None,
    store: str | None,
    as_json: bool,
    yes: bool,
    **options: Any,
) -> None:
    """Train; the default recipe is `mini`.

    \b
    agentrig train
    agentrig train mini algorithm.steps=20 run.seed=1 --reward spider-exec-strict
    agentrig train my-run.toml --plugin my_agent.py
    agentrig train --resume runs/mini-20260101-120000
    agentrig train --resume runs/mini-20260101-120000 --from-step 20
    agentrig train mini --store 127.0.0.1:4747
    """
    from agentrig.errors import ConfigError
    from agentrig.run import training as run
    from agentrig.run.resume import resume_plan

    if yes:
        os.environ["AGENTRIG_YES"] = "1"
    if from_step is not None and resume is None:
        raise ConfigError("--from-step needs --resume RUN: it selects the checkpoint that the run resumes from")
    if store is not None:
        words = [*words, f"runners.store={store}"]
    if resume is not None:
        source = words[0] if words and "=" not in words[0] else None
        if source or any(
            options[k] for k in (*RUN_KINDS, "observers", "trackers", "files", "active_agent", "strict_plugins")
        ):
            raise ConfigError(
                "a resumed run keeps its configuration; with --resume you can only give section.key=value"
            )
        plan = resume_plan(resume, overrides=words, from_step=from_step)
    else:
        plan = make_plan(words, options)
    if not as_json:
        from agentrig.display import LiveDisplay

        plan.registry.add_observer(LiveDisplay(), "display")
    with stdout_to_stderr(as_json):
        summary = run.train(plan, resume=resume, from_step=from_step)
    if as_json:
        click.echo(json.dumps(summary, indent=2))
