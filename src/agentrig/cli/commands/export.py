"""`agentrig export`."""

from __future__ import annotations

from pathlib import Path

import click

from agentrig.cli.options import find_checkpoint


@click.command()
@click.argument("run", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--check/--no-check", default=True, help="Compare the exported model with the learner (on by default).")
def export(run: Path, target: Path, check: bool) -> None:
    """Copy a run's latest checkpoint as a Hugging Face directory that vLLM and transformers load.

    transformers loads the copy, and it must give the run's probe the log-probabilities that the learner gave.

    \b
    agentrig export runs/mini-20260101-120000 my-model
    """
    import shutil

    from agentrig.delivery.exported import check_export
    from agentrig.errors import ConfigError
    from agentrig.run.damage import writing

    checkpoint = find_checkpoint(run)
    assert checkpoint is not None
    if target.exists():
        raise ConfigError(f"{target} exists already: name another target, or delete it")
    try:
        with writing(target, "another TARGET"):
            shutil.copytree(str(checkpoint), target, ignore=shutil.ignore_patterns("trainer", "keep", ".files.json"))
        result = check_export(target, checkpoint) if check else ""
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)  # half a model, or another one, must not be taken for the export
        raise
    click.echo(f"{checkpoint} -> {target}")
    if result:
        click.echo(result)
