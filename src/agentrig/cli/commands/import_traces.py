"""`agentrig import-traces`."""

from __future__ import annotations

from pathlib import Path

import click

from agentrig.cli.options import Number
from agentrig.text import amount


@click.command("import-traces")
@click.argument("files", nargs=-1, required=True, metavar="FILE …", type=click.Path(path_type=Path, exists=True))
@click.option("--out", required=True, type=click.Path(path_type=Path, dir_okay=False), help="A new file: NAME.jsonl.")
@click.option("--format", "form", type=click.Choice(["otlp", "atif", "chat"]), help="Of the files; else recognised.")
@click.option("--min-reward", type=Number(), metavar="X", help="Only calls whose rollout has a reward of X or more.")
@click.option("--json", "as_json", is_flag=True, help="Print the counts as JSON.")
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
    import json

    from agentrig.demonstrations import write_demonstrations
    from agentrig.errors import ConfigError
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
        click.echo(json.dumps({**counts, "left_out": found.left_out, "file": str(out)}))
        return
    made = amount(len(found.turns), "demonstration")
    click.echo(f"{amount(found.calls, 'call')} -> {made}, {exact} with exact token ids -> {out}")
    if found.duplicates:
        click.echo(f"{amount(found.duplicates, 'duplicate')}")
    if found.left_out:
        click.echo("\n".join([f"{sum(found.left_out.values())} left out:", *lines(found)]))
