"""`agentrig export`."""

from __future__ import annotations

from pathlib import Path

import click

from agentrig.cli.options import RunPath, find_checkpoint


@click.command()
@click.argument("run", type=RunPath())
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--check/--no-check", default=True, help="Compare the exported model with the learner (on by default).")
def export(run: Path, target: Path, check: bool) -> None:
    """Copy a run's latest checkpoint as a Hugging Face directory that vLLM and transformers load.

    transformers loads the copy, and it must give the run's probe the log-probabilities that the learner gave; and the
    checkpoint must hold the weights of the step that it states, by the digest that the run recorded. A killed
    export leaves `.TARGET.part` beside TARGET; the same command replaces it.

    \b
    agentrig export runs/mini-20260101-120000 my-model
    """
    import shutil

    from agentrig.delivery.exported import check_export
    from agentrig.errors import AgentrigError, ConfigError
    from agentrig.processes.scratch import temporary_files
    from agentrig.run.auditing import checkpoint_fault
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
        with writing(target, "another TARGET"):
            shutil.rmtree(part, ignore_errors=True)  # of an export that was killed
            shutil.copytree(str(checkpoint), part, ignore=shutil.ignore_patterns("trainer", "keep", ".files.json"))
        with temporary_files():  # torch makes a folder for compiled kernels, whether it compiles any or not
            result = check_export(part, checkpoint) if check else ""
            if check and (fault := checkpoint_fault(checkpoint)):
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
