"""The commands `agentrig runner` and `agentrig run`."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click


@click.command()
@click.option("--store", required=True, metavar="URL", help="The run's store, as `agentrig train --store` printed it.")
@click.option("--agent", metavar="NAME", help="The agent; the run's own by default.")
@click.option("--plugin", "files", multiple=True, metavar="FILE.py", help="A Python file that is a plugin too.")
@click.option("--token-file", type=click.Path(path_type=Path), metavar="FILE", help="A file with the store's token.")
@click.option("-n", type=click.IntRange(1, 1024), default=2, show_default=True, help="Runner processes.")
@click.option("--threads", type=click.IntRange(1, 1024), default=8, show_default=True, help="Rollouts at once in each.")
@click.argument("words", nargs=-1, metavar="[agent.key=value …]")
def runner(
    store: str,
    agent: str | None,
    files: Sequence[str],
    token_file: Path | None,
    n: int,
    threads: int,
    words: Sequence[str],
) -> None:
    """Join a running training from this machine, and run its agent until it ends.

    The token is read from AGL_STORE_TOKEN, from --token-file, or from the URL. Ctrl-C leaves the run: rollouts get
    ten seconds to end, the others start again elsewhere.

    \b
    AGL_STORE_TOKEN=… agentrig runner --store http://10.0.0.5:4747
    agentrig runner --store http://127.0.0.1:4747 --token-file token.txt --plugin my_agent.py --agent ask
    """
    from agentrig.errors import ConfigError
    from agentrig.processes.ends import handling
    from agentrig.processes.scratch import temporary_files
    from agentrig.runners.processes import Pool
    from agentrig_lightning.remote import RemoteRunner, StoreAddress, join, worker_id

    token = None
    if token_file is not None:
        try:
            token = token_file.read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--token-file {token_file} cannot be read: {error}") from None
        if not token:
            raise ConfigError(f"--token-file {token_file} is empty: write the token that the run printed into it")
    address, worker = StoreAddress.read(store, token), worker_id()
    offer = asyncio.run(join(address, worker))
    plan, preload = _agent_plan(offer["agent"], agent, files, words)
    with temporary_files():
        pool = Pool(
            plan,
            n=n,
            threads=threads,
            deadline_s=float(offer["deadline_s"]),
            retries=int(offer["retries"]),
            preload=preload,
        )
        click.echo(f"agentrig: {worker} joined the run at {address.url} with agent {plan.name}", err=True)
        remote = RemoteRunner(address, pool, worker)
        with handling(remote.leave):
            remote.run()
    click.echo(f"agentrig: the run has ended; rollouts that were run here: {remote.done}", err=True)


def _agent_plan(
    offered: Mapping[str, Any], name: str | None, files: Sequence[str], words: Sequence[str]
) -> tuple[Any, Sequence[str]]:
    """Return how this machine builds the agent, and what its runners import in advance."""
    import attrs

    from agentrig.errors import ConfigError, LookupFailed
    from agentrig.plan import parse_override
    from agentrig.plugins.loading import load
    from agentrig.runners.jobs import AgentPlan
    from agentrig.settings import structure

    keys: dict[str, Any] = dict(offered["config"]) if name in (None, offered["name"].rpartition(":")[2]) else {}
    for word in words:
        section, key, value = parse_override(word)
        if section != "agent":
            raise ConfigError(f"{word}: a runner has settings of its agent only, agent.key=value")
        keys[key] = value
    registry = load(files=files)
    wanted = name or str(offered["name"])
    try:
        component = registry.find("agent", wanted)
    except LookupFailed as error:
        if not offered["plugins"]:
            raise
        raise LookupFailed(
            f"{error}\n  The run has plugin files: {', '.join(offered['plugins'])}; give them with --plugin FILE.py"
        ) from None
    spec: Any = component.spec
    config = structure(spec.config, keys, owner=wanted, section="agent")
    plan = AgentPlan(
        name=registry.reference(component),
        config=attrs.asdict(config),
        files=tuple(str(Path(f).resolve()) for f in files),
        environment=spec.environment,
    )
    return plan, spec.preload


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("script", type=click.Path(path_type=Path), metavar="FILE.py")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS …]")
@click.option("--algorithm", default="", metavar="NAME", help="Train by this algorithm, instead of agl.VERL: grpo.")
@click.option("--model", default="", metavar="DIR", help="Short for --set algorithm.model=DIR.")
@click.option("--set", "settings", multiple=True, metavar="SECTION.KEY=VALUE", help="A setting of the run; repeatable.")
@click.option("--resume", type=click.Path(path_type=Path), metavar="RUN", help="Resume a run of this script.")
def run(
    script: Path,
    arguments: Sequence[str],
    algorithm: str,
    model: str,
    settings: Sequence[str],
    resume: Path | None,
) -> None:
    """Run a script written for Agent Lightning's Trainer, unchanged.

    Everything that is no option of this command goes to the script, and so does all that follows `--`.

    \b
    agentrig run train_sql_agent.py qwen
    agentrig run train_sql_agent.py fast --algorithm grpo --model DIR
    agentrig run --resume runs/train-sql-agent-20260101-120000 train_sql_agent.py fast
    agentrig run my_script.py --set runners.deadline_s=600 -- --model of-the-script
    """
    from agentrig_lightning.trainer import launch

    if resume is not None and script.is_file():
        algorithm = resumed_algorithm(resume, script, algorithm)
    named = [f"algorithm.model={model}"] if model else []
    launch(script, arguments, algorithm=algorithm, settings=[*named, *settings], resumed=resume)


def resumed_algorithm(directory: Path, script: Path, named: str) -> str:
    """Return the `--algorithm` that a script's run was started with; '' for the script's own.

    A run of another script, or with another algorithm than the one that is named, is refused.
    """
    from agentrig.errors import ConfigError
    from agentrig.plan import script_of

    if not (directory / "config.toml").is_file():
        raise ConfigError(f"{directory} is not a run directory: it has no config.toml")
    again = script_of(directory)
    if not again:
        raise ConfigError(f"{directory} is not the run of a script: agentrig train --resume {directory}")
    options = run.make_context("run", shlex.split(again.replace(str(directory), "RUN"))[2:]).params
    if options["script"].name != script.name:
        raise ConfigError(f"{directory} is a run of {options['script']}, not of {script}; it resumes with: {again}")
    used = str(options["algorithm"])
    if named and named != used:
        raise ConfigError(
            f"--algorithm {named}: {directory} was started "
            f"{f'with --algorithm {used}' if used else 'without --algorithm'}, and keeps its algorithm; it resumes "
            f"with: {again}"
        )
    return used
