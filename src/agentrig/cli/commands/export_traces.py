"""`agentrig export-traces`."""

from __future__ import annotations

from pathlib import Path

import click

from agentrig.cli.options import RunPath
from agentrig.text import amount


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

    from agentrig.errors import AgentrigError, ConfigError
    from agentrig.otlp.exporting import BATCH, Exporter, ExportError, OtlpConfig, json_line, origin_of
    from agentrig.otlp.spans import spans_of
    from agentrig.run.damage import writing
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
            part = file.with_name(f".{file.name}.part")
            stack.callback(lambda: part.unlink(missing_ok=True))  # a killed export's is written over
            out = stack.enter_context(part.open("w", encoding="utf-8"))
        for batch in stored_rollouts(run / "rollouts", size=BATCH):
            found = [span for rollout in batch for span in spans_of(rollout, origin)]
            if url is None:
                out.write(json_line(found) + "\n")
            else:
                try:
                    exporter.send(found)
                except ExportError as error:
                    raise AgentrigError(f"{error} {rollouts} rollouts were sent before") from None
            rollouts, spans = rollouts + len(batch), spans + len(found)
        if file is not None:
            out.close()
            part.rename(file)
    click.echo(f"{amount(rollouts, 'rollout')}, {amount(spans, 'span')} -> {url or file}")
