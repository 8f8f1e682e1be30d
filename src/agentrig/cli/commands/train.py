"""`agentrig train`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import click

from agentrig.cli.options import RunPath, configured, find_checkpoint, json_option, make_plan, print_json
from agentrig.errors import ConfigError
from agentrig.plugins.specs import RUN_KINDS


@click.command()
@configured
@click.option(
    "--start",
    type=RunPath(),
    metavar="RUN",
    help="Start from the model that an earlier run ended with: its latest checkpoint.",
)
@click.option(
    "--resume",
    type=RunPath(),
    metavar="RUN",
    help="Resume a run directory.",
)
@click.option(
    "--from-step", type=click.IntRange(min=1), metavar="N", help="With --resume: from the checkpoint of step N."
)
@click.option(
    "--store",
    metavar="HOST:PORT",
    help="Let runners of other machines join; short for runners.use=lightning runners.store=…",
)
@click.option("--otlp", metavar="URL", help="Send traces to this OpenTelemetry collector (OTLP/HTTP).")
@json_option("Print summary.json at the end, and no display.")
@click.option(
    "--watch", "watched", is_flag=True, help="Serve the live page of this run's folder; in a terminal until Ctrl-C."
)
@click.option("--yes", is_flag=True, help="Stop what blocks the run (a stale Ray cluster) without asking.")
def train(
    words: Sequence[str],
    start: Path | None,
    resume: Path | None,
    from_step: int | None,
    store: str | None,
    otlp: str | None,
    as_json: bool,
    watched: bool,
    yes: bool,
    **options: Any,
) -> None:
    """Train the model inside an agent. A recipe is a complete configuration with a name; the default is `mini`.

    \b
    agentrig train
    agentrig train mini algorithm.steps=20 run.seed=1 --reward spider-exec-strict
    agentrig train my-run.toml --plugin my_agent.py
    agentrig train mini --algorithm sft run.name=demonstrated
    agentrig train mini --start runs/demonstrated
    agentrig train --resume runs/mini-20260101-120000
    agentrig train --resume runs/mini-20260101-120000 --from-step 20
    agentrig train mini --store 127.0.0.1:4747
    agentrig train mini --watch
    agentrig train mini --otlp http://localhost:4318
    """
    if yes:
        os.environ["AGENTRIG_YES"] = "1"
    if from_step is not None and resume is None:
        raise ConfigError("--from-step needs --resume RUN: it selects the checkpoint that the run resumes from")
    if start is not None:
        if resume is not None or any(word.startswith("algorithm.model=") for word in words):
            raise ConfigError(
                "--start names the model that a new run starts from: leave --resume and algorithm.model out"
            )
        words = [*words, f"algorithm.model={json.dumps(str(find_checkpoint(start.absolute())))}"]
    if store is not None:
        words = [*words, "runners.use=lightning", f"runners.store={store}"]
    senders = []
    if otlp is not None:
        words, senders = [*words, f"observer.otlp.url={otlp}"], ["otlp"]
    if resume is not None:
        source = words[0] if words and "=" not in words[0] else None
        if source or any(
            options[k]
            for k in (*RUN_KINDS, "observers", "trackers", "files", "prompts", "active_agent", "strict_plugins")
        ):
            raise ConfigError(
                "a resumed run keeps its configuration; with --resume you can only give section.key=value"
            )
        from agentrig.run.resume import resume_plan

        plan = resume_plan(resume, overrides=words, observers=senders, from_step=from_step)
    else:
        options["observers"] = [*options["observers"], *senders]
        plan = make_plan(words, options)
    folder = resume.parent if resume is not None else Path(plan.run.directory)
    stays = not as_json and sys.stdin is not None and sys.stdin.isatty()
    with ExitStack() as ending:
        if watched:
            ending.enter_context(page_of(folder, stays=stays))
        shown: dict[str, Any] = {}
        if not as_json:
            from agentrig.view.live import LiveDisplay

            display = LiveDisplay()
            plan.registry.add_observer(display, "display")
            ending.callback(display.close)  # what ends before the run has begun tells no observer
            display.preparing()
            shown["starting"] = display.starting
        from agentrig.run import training as run

        summary = run.train(plan, resume=resume, from_step=from_step, **shown)
    if as_json:
        print_json(summary, indent=2)


@contextmanager
def page_of(folder: Path, *, stays: bool) -> Iterator[None]:
    """Serve the live page of a folder of runs in a process of its own, which ends with this one.

    It prints its link to standard error, so that `--json` keeps standard output for itself.

    If it `stays`, it is served on after a run that ended well, until Ctrl-C.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "agentrig", "watch", str(folder), "--with-input"]
    page = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=sys.stderr, start_new_session=True)
    try:
        yield
        if stays:
            click.echo("the page is still served; Ctrl-C ends it", err=True)
            with suppress(KeyboardInterrupt):
                while True:
                    time.sleep(0.2)  # not for ever: a signal that another thread has taken does not end a wait
    finally:
        page.communicate()  # its input ends, and then it does
