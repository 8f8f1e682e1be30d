"""`agentrig eval`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from agentrig.cli.options import (
    configured,
    find_checkpoint,
    make_plan,
    measured_server,
    model_options,
    open_nothing,
    stdout_to_stderr,
)
from agentrig.errors import AgentrigError

if TYPE_CHECKING:
    from agentrig.run.evaluate import Evaluation


@click.command("eval")
@configured
@model_options
@click.option("--split", metavar="NAME", help="The split to measure; the report split by default.")
@click.option("--limit", type=click.IntRange(min=0), default=0, help="Only the first n tasks; 0 for all.")
@click.option("--temperature", type=click.FloatRange(min=0), help="Sampling temperature; by default the run's, or 0.")
@click.option("--save", type=click.Path(path_type=Path), metavar="FILE.jsonl", help="Write every prediction there.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def eval_(
    words: Sequence[str],
    endpoint: str | None,
    model: str | None,
    checkpoint: Path | None,
    split: str | None,
    limit: int,
    temperature: float | None,
    save: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Measure a model through an agent: accuracy, its 95% interval, mean reward, a table per database.

    Exit status 1 if every rollout failed: then nothing was measured.

    \b
    agentrig eval mini --checkpoint runs/mini-20260101-120000
    agentrig eval spider --endpoint http://127.0.0.1:8000/v1 --save predictions.jsonl --json
    """
    from agentrig.run.evaluate import eval_tasks, evaluate, prediction
    from agentrig.run.metrics import failure_lines
    from agentrig.text import json_text

    plan = make_plan(words, options)
    server = measured_server(endpoint, model, checkpoint)
    checkpoint = find_checkpoint(checkpoint)
    name, tasks = eval_tasks(plan, split, limit)
    where = server.base_url if server else str(checkpoint or "the starting model")
    click.echo(f"{len(tasks)} tasks of split {name}, model: {where}", err=True)
    with stdout_to_stderr(as_json), open(save, "w", encoding="utf-8") if save else open_nothing() as file:

        def each(rollout: Any) -> None:
            if file is not None:
                file.write(json_text(prediction(rollout)) + "\n")

        try:
            found = evaluate(
                plan,
                tasks=tasks,
                endpoint=server,
                checkpoint=checkpoint,
                temperature=temperature,
                each=each,
            )
        finally:
            if file is not None and save is not None and not file.tell() and save.is_file():
                save.unlink()  # nothing was measured
    for line in failure_lines(found.failures, found.reasons):
        click.echo(line, err=True)
    if as_json:
        click.echo(json.dumps(found.as_dict()))
    else:
        _show(found)
    if found.accuracy is None:
        raise AgentrigError(f"no rollout has a reward: all {len(tasks)} failed, so nothing was measured")


def _show(found: Evaluation) -> None:
    for name, parts in found.slices.items():
        click.echo(name)
        for part, (right, n) in parts.items():
            click.echo(f"  {part:<38} {right:>4} of {n:<4} {right / n:7.1%}")
    if found.wrong:
        click.echo("wrong answers: " + ", ".join(f"{count} {kind}" for kind, count in found.wrong.items()))
    if found.accuracy is not None and found.ci95 is not None:
        click.echo(f"accuracy {found.accuracy:.1%}  (95%: {found.ci95[0]:.1%} to {found.ci95[1]:.1%}, n = {found.n})")
        click.echo(f"mean reward {found.reward:.4g}")
    failures = ", ".join(f"{count} x {kind}" for kind, count in found.failures.items())
    click.echo(f"failures: {failures or 'none'}; {found.wall_s:.1f} s, {found.rollouts_per_s:.1f} rollouts/s")
