"""`agentrig dev`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import click

from agentrig.cli.options import (
    configured,
    find_checkpoint,
    json_option,
    make_plan,
    measured_server,
    model_options,
    names_model,
    print_json,
    server_origin,
    typed_again,
)
from agentrig.cli.progress import STARTING, progress
from agentrig.figures import amount
from agentrig.rollouts import Mode


@click.command()
@configured
@model_options
@click.option("--limit", type=click.IntRange(1), default=3, show_default=True, help="How many tasks.")
@click.option("--split", metavar="NAME", help="Which split; the validation split by default.")
@click.option("--gold", is_flag=True, help="Show the private part of each task too: the right answer.")
@json_option("Print the rollouts with their spans as JSON.")
def dev(
    words: Sequence[str],
    endpoint: str | None,
    model: str | None,
    checkpoint: Path | None,
    limit: int,
    split: str | None,
    gold: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Run an agent on a few tasks and show every span; nothing is learned.

    Exit status 1 when a rollout failed, or none had an answer.

    \b
    agentrig dev mini
    OPENAI_BASE_URL=http://127.0.0.1:8000/v1 agentrig dev spider --limit 5
    """
    from agentrig.run.evaluate import eval_tasks, evaluate
    from agentrig.run.forecast import sampling_of
    from agentrig.run.guards import (
        none_answered,
        refused_sampling,
        unanswered,
        unseen_calls,
        untrained_calls,
        with_token_ids,
        wrong_in_form,
    )
    from agentrig.run.rows import row_of
    from agentrig.run.splits import split_of
    from agentrig.text import message_lines

    again = f"agentrig train {typed_again(words, options)}".rstrip()
    named = names_model(words, options)
    plan = make_plan(words, options)
    server = measured_server(endpoint, model, checkpoint, named=named)
    made = plan.tasks()
    name, tasks = eval_tasks(made, plan.run, split, limit, who=plan.whose_tasks, role="validation")
    trains = name == split_of(plan.run, made, "train")  # as in Agent Lightning's own dev
    checkpoint = find_checkpoint(checkpoint)
    if server is None and checkpoint is None:
        plan.use_hardware()
        plan.check_algorithm()
    starting = STARTING if server is None else "starting the agent"
    if not as_json:
        tried = f"{amount(len(tasks), 'task')} of split {name}"
        who = answering(plan, server, checkpoint) + (server_origin(endpoint) if server is not None else "")
        click.echo(f"{tried}, answered by {who}: {starting} …", err=True)
    with progress(len(tasks), starting) as shown:
        as_mode: Mode = "train" if trains else "dev"
        found = evaluate(
            plan,
            tasks=tasks,
            endpoint=server,
            checkpoint=checkpoint,
            mode="dev",
            as_mode=as_mode,
            keep=True,
            ended=shown,
            begun=shown.begin,
        )
    failed = [rollout for rollout in found.rollouts if rollout.failure]
    valid = [rollout for rollout in found.rollouts if rollout.failure is None]
    trained = with_token_ids(valid, plan.build("adapter"))
    if as_json:
        print_json([row_of(r) for r in found.rollouts], indent=2)
    else:
        from rich.console import Console

        from agentrig.view.terminal import span_tree

        console = Console()
        kept = {rollout.id: rollout.triplets for rollout in trained}
        for rollout in found.rollouts:
            told = attrs.evolve(rollout, triplets=kept.get(rollout.id, ()))  # of a failed one nothing is learned
            console.print(span_tree(told, gold=gold, own_model=server is None))
    warning = unseen_calls(found.rollouts, unrecorded=found.unrecorded)
    if not warning:
        why, _ = untrained_calls(trained, adapter=plan.components["adapter"].spec)
        warning = f"no call of this agent would be trained on.\n  {why}" if why else ""
        warning = warning or refused_sampling(trained, sampling_of(plan.configs["algorithm"]), found.sampling)
    warning = warning or unanswered(found.rollouts) or wrong_in_form(found.rollouts)
    if warning:
        click.echo(f"agentrig: warning: {message_lines(warning)}", err=True)
    if not as_json:
        ends = [f"{sum(bool(r.correct) for r in found.rollouts)} of {amount(len(found.rollouts), 'rollout')} right"]
        ends += [f"{len(failed)} failed"] if failed else []
        fine = not failed and not warning and any(r.correct for r in found.rollouts)
        trainable = fine and server is None and checkpoint is None
        click.echo(", ".join(ends) + (f"; next: {again}" if trainable else ""))
    if failed or none_answered(found.rollouts):
        raise SystemExit(1)


def answering(plan: Any, server: Any, checkpoint: Path | None) -> str:
    """Return which model answers, in words."""
    from agentrig.doctor.content import SHIPPED

    if server is not None:
        return f"{server.model} of {server.base_url}"
    if checkpoint is not None:
        return str(checkpoint)
    model = getattr(plan.configs["algorithm"], "model", "")
    if model == SHIPPED and not Path(model).is_dir():
        return f"the shipped model {model}, trained for SQL (algorithm.model names another)"
    return f"algorithm.model = {model}" if model else f"the model of {plan.components['algorithm'].spec.name}"
