"""`agentrig eval`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from agentrig.cli.options import (
    Number,
    configured,
    find_checkpoint,
    json_option,
    make_plan,
    measured_server,
    model_options,
    names_model,
    print_json,
    server_origin,
)
from agentrig.cli.progress import STARTING, progress
from agentrig.errors import AgentrigError
from agentrig.text import amount, json_text, one_line, printable

if TYPE_CHECKING:
    from agentrig.run.evaluate import Evaluation


@click.command("eval")
@configured
@model_options
@click.option("--split", metavar="NAME", help="The split to measure; the report split by default.")
@click.option(
    "--limit", type=click.IntRange(min=0), help="Only the first n tasks; 0 for all. By default run.report_tasks."
)
@click.option("--temperature", type=Number(min=0), help="Sampling temperature; by default the run's, or 0.")
@click.option(
    "--save",
    type=click.Path(path_type=Path),
    metavar="FILE.jsonl",
    help="Write each task, its replies, answer and score there.",
)
@json_option("Print the figures as JSON.")
def eval_(
    words: Sequence[str],
    endpoint: str | None,
    model: str | None,
    checkpoint: Path | None,
    split: str | None,
    limit: int | None,
    temperature: float | None,
    save: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Measure a model through an agent: accuracy, its 95% interval, mean reward, a table per slice (`tasks.slices`).

    Exit status 1 if every rollout failed: then nothing was measured.

    \b
    agentrig eval mini --checkpoint runs/mini-20260101-120000
    agentrig eval spider --endpoint http://127.0.0.1:8000/v1 --save predictions.jsonl --json
    """
    from agentrig.run.evaluate import eval_tasks, evaluate
    from agentrig.run.metrics import failure_lines
    from agentrig.run.splits import labels_among
    from agentrig.view.figures import held_out_labels

    prompts = options["prompts"]
    named = names_model(words, options)
    plan = make_plan(words, options)
    server = measured_server(endpoint, model, checkpoint, named=named)
    checkpoint = find_checkpoint(checkpoint)
    name, tasks = eval_tasks(plan.tasks(), plan.run, split, limit, who=plan.whose_tasks)
    serving = server or plan.configs["server"]
    measured = str(checkpoint) if checkpoint is not None else _model(serving)
    measured += server_origin(endpoint) if server is not None else ""
    where = f"model: {measured}{f', prompts: {prompts}' if prompts else ''}"
    if limit is None and len(tasks) == plan.run.report_tasks:
        where += "; run.report_tasks limits it, --limit 0 measures all"
    click.echo(f"{amount(len(tasks), 'task')} of split {name}, {where}", err=True)
    start: object = checkpoint or ("" if _is_elsewhere(serving) else getattr(plan.configs["algorithm"], "model", ""))
    if start and (said := held_out_labels(labels_among(tasks, start), len(tasks), of="task")):
        click.echo(said, err=True)
    predictions = Predictions(save)
    with predictions, progress(len(tasks), STARTING if server is None else "starting the agent") as shown:
        found = evaluate(
            plan,
            tasks=tasks,
            endpoint=server,
            checkpoint=checkpoint,
            temperature=temperature,
            each=predictions.write,
            ended=shown,
            begun=shown.begin,
        )
    for line in failure_lines(found.reasons):
        click.echo(printable(line), err=True)
    if as_json:
        print_json(found.as_dict())
    else:
        _show(found)
    if found.accuracy is None:
        raise AgentrigError(f"no rollout has a reward: all {len(tasks)} failed, so nothing was measured")
    if predictions.error is not None:
        raise AgentrigError(
            f"--save {save} cannot be written: {predictions.error.strerror}. "
            f"{'It' if predictions.kept == save else predictions.kept} has {predictions.written} of {len(tasks)} "
            "predictions; the figures above are of all"
        )


def _is_elsewhere(server: Any) -> bool:
    """Whether a model is served already, so that nothing is known of its start."""
    from agentrig.endpoints import Endpoint
    from agentrig.external.config import EndpointConfig

    return isinstance(server, Endpoint | EndpointConfig)


def _model(server: Any) -> str:
    """Return the name and address of a model that is served already, or that it is the starting model."""
    return f"{server.model} at {server.base_url}" if _is_elsewhere(server) else "the starting model"


class Predictions:
    """The file of `--save`. An error of writing ends the writing, and not the measurement.

    A file that is there already is replaced once the measurement has ended: until then predictions go beside it.

    Attributes:
        written: How many predictions were written.
        kept: The file that has them, once all is closed.
        error: Why no more are written.
    """

    def __init__(self, path: Path | None) -> None:
        self.written, self.kept = 0, path
        self.error: OSError | None = None
        self._beside = path.with_name(f".{path.name}.part") if path and path.is_file() else path
        try:
            self._file = self._beside.open("w", encoding="utf-8") if self._beside else None
        except OSError as error:
            raise AgentrigError(f"--save {path} cannot be written: {error.strerror}; nothing was measured") from None

    def write(self, rollout: Any) -> None:
        """Add a rollout's answer and score."""
        from agentrig.run.evaluate import prediction

        if self._file is None or self.error is not None:
            return
        try:
            self._file.write(json_text(prediction(rollout)) + "\n")
            self._file.flush()
            self.written += 1
        except OSError as error:
            self.error = error

    def __enter__(self) -> Predictions:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Close the file; without a prediction there is none. An earlier one is replaced by a whole one only."""
        if self._file is None or self.kept is None or self._beside is None:
            return
        with suppress(OSError):  # what was not flushed
            self._file.close()
        if not self.written:
            if self._beside.is_file():
                self._beside.unlink()
        elif self._beside != self.kept:
            if kind is None and self.error is None:
                self._beside.replace(self.kept)
            else:
                click.echo(
                    f"{self.kept} is as it was; the predictions of this measurement are in {self._beside}", err=True
                )
                self.kept = self._beside


def _show(found: Evaluation) -> None:
    from agentrig.figures import figure
    from agentrig.view.tables import PARTS, slice_name

    for name, parts in found.slices.items():
        click.echo(one_line(slice_name(name)))
        for part, (right, n) in parts.items():
            click.echo(f"  {one_line(part):<38} {right:>4} of {n:<4} {right / n:7.1%}")
    if found.by_turn:
        click.echo("by turn: " + ", ".join(f"{count} {turn}" for turn, count in found.by_turn.items()))
    if found.wrong:
        click.echo("wrong answers: " + ", ".join(f"{count} {one_line(kind)}" for kind, count in found.wrong.items()))
    if found.accuracy is not None and found.ci95 is not None:
        click.echo(f"accuracy {found.accuracy:.1%}  (95%: {found.ci95[0]:.1%} to {found.ci95[1]:.1%}, n = {found.n})")
        click.echo(f"mean reward {found.reward:.4g}")
    if found.components:
        means = [f"{one_line(name)} {figure(value)}" for name, value in found.components.items()]
        click.echo(f"parts of the reward: {', '.join(means[:PARTS])}")
    if found.calls:
        click.echo(f"calls scored below 1: {found.calls['wrong']} of {found.calls['scored']}")
    failures = ", ".join(f"{count} x {kind}" for kind, count in found.failures.items())
    click.echo(f"failures: {failures or 'none'}; {found.wall_s:.1f} s, {found.rollouts_per_s:.1f} rollouts/s")
