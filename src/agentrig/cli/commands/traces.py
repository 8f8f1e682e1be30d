"""`agentrig export`, `export-traces` and `import-traces`: what leaves a run, and what comes back from traces."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import click

from agentrig.cli.options import Number, RunPath, find_checkpoint, json_option, print_json, stdout_to_stderr
from agentrig.cli.progress import progress
from agentrig.errors import AgentrigError, CheckpointDamaged, ConfigError
from agentrig.text import amount


@click.command()
@click.argument("run", type=RunPath())
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--check/--no-check", default=True, help="Compare the exported model with the learner (on by default).")
def export(run: Path, target: Path, check: bool) -> None:
    """Copy a run's latest checkpoint as a Hugging Face directory that vLLM and transformers load, with LoRA merged.

    transformers loads the copy, and it must give the run's probe the log-probabilities that the learner gave; and the
    checkpoint must hold the weights of the step that it states, by the digest that the run recorded. Damage of the
    trainer's own files is only told: the model needs none of them. A killed export leaves `.TARGET.part` beside
    TARGET; the same command replaces it.

    \b
    agentrig export runs/mini-20260101-120000 my-model
    """
    import shutil

    from agentrig.audit.verdicts import CannotLook
    from agentrig.delivery.exported import SIGNATURE, check_export
    from agentrig.processes.scratch import temporary_files
    from agentrig.run.auditing import checkpoint_fault
    from agentrig.run.checkpoints import damaged_state, told_if_removed
    from agentrig.run.damage import writing
    from agentrig.run.files import flush_tree

    checkpoint = find_checkpoint(run)
    assert checkpoint is not None
    if target.exists():
        raise ConfigError(f"{target} exists already: name another target, or delete it")
    checked = ", then checking the copy against the learner" if check else ""
    click.echo(f"copying {checkpoint}{checked} …", err=True)
    part = target.with_name(f".{target.name}.part")  # half a model, or another one, must not be taken for the export
    try:
        with told_if_removed(checkpoint), writing(target, "another TARGET"), progress(0, "copying"):
            shutil.rmtree(part, ignore_errors=True)  # of an export that was killed
            _copy_model(checkpoint, part)
        # torch makes a folder for compiled kernels, whether it compiles any or not
        with temporary_files(), progress(0, "reading the trainer's files") as shown:
            damaged = damaged_state(checkpoint) if check else []
            shown.tell_what("loading the copy and comparing its log-probabilities with the learner's", 0.0)
            result = check_export(part, checkpoint) if check and str(SIGNATURE) not in damaged else ""
            shown.tell_what("comparing the checkpoint's weights with the run's record", 0.0)
            fault = unseen = ""
            try:
                fault = checkpoint_fault(checkpoint) if check and not damaged else ""
            except CannotLook as why:
                unseen = f"it is unknown whether {checkpoint} has the weights that the run made: {why}"
        if unseen:
            click.echo(f"agentrig: warning: {unseen}", err=True)
        if damaged:
            click.echo(
                f"agentrig: warning: {checkpoint}: {', '.join(damaged)} changed since it was saved. No training "
                "can resume from it, and its model, which is whole, is not compared with the learner's weights",
                err=True,
            )
        if fault:
            raise AgentrigError(fault)
        with writing(target, "another TARGET"):
            flush_tree(part)
            part.rename(target)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    click.echo(f"{checkpoint} -> {target}")
    if result:
        click.echo(result)
    if (target / "config.json").is_file():
        click.echo(_serving(target))


def _serving(target: Path) -> str:
    """Return the commands that serve an exported model to agents."""
    model = shlex.quote(str(target))
    return (
        f"next: serve it to agents at http://127.0.0.1:8000/v1, as the model {target}: vllm serve {model}\n"
        "      for agents with tools add --enable-auto-tool-choice --tool-call-parser hermes (Qwen's; others differ)\n"
        f"      without a GPU: pip install 'transformers[serving]', then transformers serve {model} --port 8000"
    )


def _copy_model(checkpoint: Path, target: Path) -> None:
    """Copy a checkpoint without the trainer's state; one of adapters is merged by the algorithm that it names."""
    import shutil

    from agentrig.plugins.loading import load
    from agentrig.run.checkpoints import STARTING_MODEL

    file = checkpoint / STARTING_MODEL
    if not file.is_file():
        shutil.copytree(str(checkpoint), target, ignore=shutil.ignore_patterns("trainer", "keep", ".files.json"))
        return
    try:
        name = str(json.loads(file.read_text("utf-8"))["algorithm"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointDamaged(checkpoint, f"{file.name} names no algorithm ({type(error).__name__})") from None
    with stdout_to_stderr():
        spec: Any = load().find("algorithm", name).spec
    if spec.export is None:
        raise ConfigError(f"{checkpoint} holds adapters, and algorithm {name} has no way to merge them")
    spec.export(checkpoint, target)


@click.command("export-traces")
@click.argument("run", type=RunPath())
@click.option("--otlp", "url", metavar="URL", help="The collector's OTLP/HTTP address: http://localhost:4318")
@click.option("--file", type=click.Path(path_type=Path, dir_okay=False), help="A new file, as lines of OTLP's JSON.")
@click.option("--content/--no-content", default=True, help="Messages, arguments and results too (on by default).")
def export_traces(run: Path, url: str | None, file: Path | None, content: bool) -> None:
    """Send a run's traces to OpenTelemetry, as `agentrig train --otlp URL` does while it runs, or write them to a file.

    Trace and span ids are the same in every export. A file has whole texts, and the exact token ids of calls.

    \b
    agentrig export-traces runs/mini-20260101-120000 --otlp http://localhost:4318
    agentrig export-traces runs/mini-20260101-120000 --file traces.jsonl
    """
    from contextlib import ExitStack

    from agentrig.otlp.exporting import BATCH, Exporter, ExportError, OtlpConfig, json_line, origin_of
    from agentrig.otlp.spans import spans_of
    from agentrig.run.damage import writing
    from agentrig.run.files import replacing
    from agentrig.run.past import recorded_in
    from agentrig.run.rows import stored_rollouts
    from agentrig.settings import structure
    from agentrig.view.reading import mapping, read_run

    if (url is None) == (file is None):
        what = "say where the traces go" if url is None else "the traces go to one place: give one of the two"
        raise ConfigError(f"{what}: --otlp URL, or --file FILE")
    with ExitStack() as stack:
        if url is not None:
            collector = structure(OtlpConfig, {"url": url}, owner="export-traces", section="--otlp")
            exporter = Exporter(collector.url, timeout_s=collector.timeout_s)
        data = read_run(run)
        if not data.files:
            raise AgentrigError("\n  ".join([f"{run} has no rollouts to export", *data.unread]))
        config = data.config or mapping(data.manifest.get("config"))
        if not config:
            click.echo(f"agentrig: warning: {'; '.join(data.unread)}: the traces do not name the run's agent", err=True)
        origin = origin_of(config, run.resolve().name, content=content, whole=file is not None)
        rollouts = spans = 0
        if file is not None:
            if file.exists():
                raise ConfigError(f"{file} exists already: name another file, or delete it")
            stack.enter_context(writing(file, "another --file"))
            part = stack.enter_context(replacing(file, file.with_name(f".{file.name}.part")))
            out = stack.enter_context(part.open("w", encoding="utf-8"))
        for batch in stored_rollouts(run / "rollouts", size=BATCH, recorded=recorded_in(run)):
            found = [span for rollout in batch for span in spans_of(rollout, origin)]
            if url is None:
                out.write(json_line(found) + "\n")
            else:
                try:
                    exporter.send(found)
                except ExportError as error:
                    raise AgentrigError(f"{error} {rollouts} rollouts were sent before") from None
            rollouts, spans = rollouts + len(batch), spans + len(found)
    done = "sent" if file is None else "wrote"
    click.echo(f"{done} the traces of {amount(rollouts, 'rollout')}, {amount(spans, 'span')}, to {url or file}")


@click.command("import-traces")
@click.argument("files", nargs=-1, required=True, metavar="FILE …", type=click.Path(path_type=Path, exists=True))
@click.option("--out", required=True, type=click.Path(path_type=Path, dir_okay=False), help="A new file: NAME.jsonl.")
@click.option("--format", "form", type=click.Choice(["otlp", "atif", "chat"]), help="Of the files; else recognised.")
@click.option("--min-reward", type=Number(), metavar="X", help="Only calls whose rollout has a reward of X or more.")
@json_option("Print the counts as JSON.")
def import_traces(
    files: tuple[Path, ...], out: Path, form: str | None, min_reward: float | None, as_json: bool
) -> None:
    """Make a file of demonstrations from traces of production, or from a run: one line for each call of a model.

    FILE holds OpenTelemetry's JSON (OTLP: spans or log records with gen_ai.*), trajectories of Harbor's agents (ATIF),
    or OpenAI's chat messages, as JSON Lines or as one document; or it is a run directory. Each call is written once.
    What can't be learned is left out, and counted by reason: failed calls, streams that were cut short, embeddings …

    Token ids are kept where they are known: in run directories, in files of export-traces, and in ATIF. A rollout that
    was judged incorrect, or measures on held-out tasks, is left out. --min-reward decides by the reward instead; it is
    the rollout's, the least evaluation of an OTLP trace, `extra.reward` of ATIF, or `reward` of a chat.

    \b
    agentrig import-traces spans.jsonl --out demonstrations.jsonl
    agentrig import-traces jobs/*/*/agent/trajectory.json --out demonstrations.jsonl
    agentrig import-traces runs/mini-20260101-120000 --min-reward 1 --out demonstrations.jsonl
    """
    from agentrig.demonstrations import write_demonstrations
    from agentrig.importing.collecting import import_traces as collect
    from agentrig.importing.collecting import lines

    if out.suffix != ".jsonl":
        raise ConfigError(f"{out}: a file of demonstrations is JSON Lines; name it {out.with_suffix('.jsonl')}")
    if out.exists():
        raise ConfigError(f"{out} exists already: name another file, or delete it")
    found = collect(files, form=form, min_reward=min_reward)
    write_demonstrations(out, found.turns)
    exact = sum(bool(turn.prompt_token_ids) for turn in found.turns)
    if as_json:
        counts = {"demonstrations": len(found.turns), "with_token_ids": exact, "calls": found.calls}
        counts |= {"duplicates": found.duplicates}
        print_json({**counts, "left_out": found.left_out, "file": str(out)})
        return
    made = amount(len(found.turns), "demonstration")
    click.echo(f"{amount(found.calls, 'call')} -> {made}, {exact} with exact token ids -> {out}")
    if found.duplicates:
        click.echo(f"{amount(found.duplicates, 'duplicate')}")
    if found.left_out:
        click.echo("\n".join([f"{sum(found.left_out.values())} left out:", *lines(found)]))
