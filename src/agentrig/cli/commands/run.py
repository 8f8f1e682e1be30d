"""`agentrig run`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("script", type=click.Path(path_type=Path), metavar="FILE.py")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS …]")
@click.option("--algorithm", default="", metavar="NAME", help="Train by this algorithm, instead of agl.VERL: grpo.")
@click.option("--model", default="", metavar="DIR", help="Short for --set algorithm.model=DIR.")
@click.option("--set", "settings", multiple=True, metavar="SECTION.KEY=VALUE", help="A setting of the run; repeatable.")
def run(script: Path, arguments: Sequence[str], algorithm: str, model: str, settings: Sequence[str]) -> None:
    """Run a script written for Agent Lightning's Trainer, unchanged.

    Everything that is no option of this command goes to the script, and so does all that follows `--`.

    \b
    agentrig run train_sql_agent.py qwen
    agentrig run train_sql_agent.py fast --algorithm grpo --model DIR
    agentrig run my_script.py --set runners.deadline_s=600 -- --model of-the-script
    """
    from agentrig.lightning.launch import launch

    named = [f"algorithm.model={model}"] if model else []
    launch(script, arguments, algorithm=algorithm, settings=[*named, *settings])
