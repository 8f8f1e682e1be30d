"""Options and arguments that several commands share."""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import click

from agentrig.cli.groups import Group
from agentrig.cli.progress import reading
from agentrig.errors import CheckpointDamaged, ConfigError, RunFileError
from agentrig.plugins.specs import PURPOSES, RUN_KINDS
from agentrig.prompting import PROMPTS_FILE, read_prompts
from agentrig.text import printable

if TYPE_CHECKING:
    from agentrig.plan import Plan


F = TypeVar("F", bound=Callable[..., Any])


class RunPath(click.Path):
    """A directory that is there: a run, or what else the command takes."""

    def __init__(self) -> None:
        super().__init__(path_type=Path, exists=True, file_okay=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path, or end the command with a message and exit status 2."""
        from agentrig.view.reading import no_run

        if os.path.lexists(value):
            return super().convert(value, param, ctx)
        click.echo(f"agentrig: {printable(no_run(Path(value)))}", err=True)
        raise click.exceptions.Exit(2)


class Number(click.FloatRange):
    """A finite number within bounds: `nan` passes any comparison, and no option has a meaning for `inf`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number, or end the command with a message about the option."""
        try:
            float(value)
        except ValueError:
            self.fail(f"{value!r} is no number.", param, ctx)
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{number} is not a finite number.", param, ctx)
        return number

    def _describe_range(self) -> str:
        """Return nothing for a number without bounds; click would say `x<=None`."""
        return "" if self.min is None and self.max is None else super()._describe_range()


def configured(command: F) -> F:
    """Add the arguments that select and change a configuration."""
    for kind in reversed(RUN_KINDS):
        purpose = f"{PURPOSES[kind][0].upper()}{PURPOSES[kind][1:]}."
        command = click.option(f"--{kind}", metavar="NAME", help=purpose)(command)
    command = click.option(
        "--observer", "observers", multiple=True, metavar="NAME", help="Is told what happens in a run; may be repeated."
    )(command)
    command = click.option(
        "--tracker",
        "trackers",
        multiple=True,
        metavar="NAME",
        help="Gets the curves (wandb …); may be repeated.",
    )(command)
    command = click.option(
        "--plugin", "files", multiple=True, metavar="FILE.py", help="A Python file that is a plugin too."
    )(command)
    command = click.option(
        "--prompts",
        type=click.Path(path_type=Path),
        metavar="RUN",
        help="Use the prompts that a run found: its directory, or a prompts.json.",
    )(command)
    command = click.option("--strict-plugins", is_flag=True, help="Stop if any plugin fails to load.")(command)
    command = click.option(
        "--active-agent",
        metavar="REGEX",
        help="Train only the calls in spans with such names; short for adapter.match=REGEX.",
    )(command)
    return click.argument("words", nargs=-1, metavar="[RECIPE | FILE.toml] [section.key=value …]")(command)


def asked(words: Sequence[str], options: dict[str, Any]) -> dict[str, Any]:
    """Convert a command's arguments and options to the arguments of `agentrig.plan.resolve`.

    Removes the options that `configured` added from `options`.

    Raises:
        ConfigError: A recipe, or a run file, comes after a setting.
    """
    from agentrig.plugins.selecting import SECTIONS

    for word, value in pairwise(words):
        if word.partition(".")[0] in SECTIONS and not {"="} & {*word, *value} and not word.endswith(".toml"):
            raise ConfigError(f'"{word}" has no value: write {word}={shlex.quote(value)}')
    source = words[0] if words and "=" not in words[0] else None
    for word in () if source else words:
        if word.endswith(".toml") or not {".", "="} & {*word}:
            raise ConfigError(f'"{word}" comes after a setting: write the recipe, or the run file, first')
    overrides = list(words[1:] if source else words)
    active = options.pop("active_agent")
    if active is not None:
        overrides.append(f"adapter.match={active}")
    uses = {kind: options.pop(kind) for kind in RUN_KINDS}
    return {
        "source": source,
        "overrides": overrides,
        "uses": uses,
        "observers": options.pop("observers", ()),
        "trackers": options.pop("trackers", ()),
        "files": options.pop("files"),
        "prompts": read_prompts(found) if (found := options.pop("prompts", None)) else None,
        "strict_plugins": options.pop("strict_plugins"),
    }


@contextmanager
def stdout_to_stderr() -> Iterator[TextIO]:
    """Redirect stdout to stderr, also for child processes, so that stdout has only the command's output.

    Yields:
        The true stdout, for what the command prints meanwhile.
    """
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with open(kept, "w", encoding=sys.stdout.encoding, closefd=False) as true:
            own = true if _number(sys.stdout) == 1 else sys.stdout
            with redirect_stdout(sys.stderr):
                yield own
    finally:
        sys.stderr.flush()
        os.dup2(kept, 1)
        os.close(kept)


JSON_OUTPUT = "agentrig.json"
"""In a context's `meta`: the true stdout of a command that was asked for JSON."""


def json_option(help: str) -> Callable[[F], F]:
    """Add `--json`: all that is printed meanwhile, by plugins too, goes to stderr; `print_json` prints to stdout.

    That holds from the parsing of the words until the process ends, whatever the command imports, loads or calls.
    """

    def begin(context: click.Context, _: click.Parameter, as_json: bool) -> bool:
        if as_json and JSON_OUTPUT not in context.meta:
            context.meta[JSON_OUTPUT] = context.with_resource(stdout_to_stderr())
            program = context.find_root().command
            if isinstance(program, Group):
                program.prints_json = True
        return as_json

    return click.option("--json", "as_json", is_flag=True, is_eager=True, callback=begin, help=help)


def print_json(value: Any, **options: Any) -> None:
    """Print the output of a command with `json_option`; `options` are those of `json.dumps`."""
    click.echo(json.dumps(value, **options), file=click.get_current_context().meta[JSON_OUTPUT])


def _number(file: TextIO) -> int | None:
    """Return a file's descriptor; None if it has none."""
    try:
        return file.fileno()
    except OSError:
        return None


def make_plan(words: Sequence[str], options: dict[str, Any]) -> Plan:
    """Resolve the configuration of a command; removes its options from `options`."""
    with stdout_to_stderr(), reading("the configuration and the plugins"):
        from agentrig.plan import resolve

        plan = resolve(**asked(words, options))
    for plugin in plan.registry.plugins:
        if plugin.status == "failed":
            click.echo(printable(f"agentrig: warning: plugin {plugin.name} failed to load: {plugin.error}"), err=True)
    return plan


def model_options(command: F) -> F:
    """Add the options that name a model: a checkpoint, or a server."""
    command = click.option("--endpoint", metavar="URL", help="An OpenAI-compatible server (…/v1).")(command)
    command = click.option("--model", metavar="NAME", help="The server's model; its first by default.")(command)
    return click.option(
        "--checkpoint",
        type=RunPath(),
        metavar="DIR",
        help="A checkpoint, or a run directory.",
    )(command)


def typed_again(words: Sequence[str], options: dict[str, Any]) -> str:
    """Return the words and options that select a configuration, to be typed again."""
    shown = [*words]
    for key, value in options.items():
        name = {"files": "plugin", "observers": "observer", "trackers": "tracker"}.get(key, key)
        values = value if isinstance(value, tuple) else [value] if isinstance(value, str | Path) and value else []
        shown += [part for each in values for part in (f"--{name.replace('_', '-')}", str(each))]
    return shlex.join(shown)


def newest_run(command: str) -> Path:
    """Return the newest run in the folder `runs`.

    Raises:
        click.UsageError: There is none: exit status 2.
    """
    began = {file.parent: file.stat().st_mtime for file in Path("runs").glob("*/manifest.json")}
    if not began:
        raise click.UsageError(f"there is no run in the folder runs: name one, agentrig {command} RUN")
    return max(began, key=began.__getitem__)


NAMES_MODEL = ("algorithm.model=", "algorithm.endpoint=", "server.")
"""Settings that, on the command line, name the model that answers."""


def names_model(words: Sequence[str], options: Mapping[str, Any]) -> bool:
    """Return whether the words and options of a command name the model: then the environment does not."""
    return bool(options.get("server")) or any(word.startswith(NAMES_MODEL) for word in words)


def measured_server(endpoint: str | None, model: str | None, checkpoint: Path | None, *, named: bool = False) -> Any:
    """Return the server from `model_options` or from the environment; None means the algorithm's own server.

    Args:
        named: See `names_model`.
    """
    from agentrig.endpoints import environment_endpoint

    if checkpoint is not None and (endpoint or model):
        raise ConfigError("the run's algorithm serves --checkpoint: don't combine it with --endpoint or --model")
    own = checkpoint is not None or (named and not endpoint and not model)
    server = None if own else environment_endpoint(endpoint, model=model)
    if model and server is None:
        raise ConfigError("--model needs a server: add --endpoint or set OPENAI_BASE_URL")
    return server


def server_origin(endpoint: str | None) -> str:
    """Return the variable that names a server in place of `--endpoint`, to stand behind its address; or ''."""
    from agentrig.endpoints import environment_address

    variable = "" if endpoint else environment_address()
    return f" (from ${variable})" if variable else ""


def find_checkpoint(path: Path | None) -> Path | None:
    """Return the checkpoint directory for a path: the path itself, or the latest checkpoint of a run directory.

    Raises:
        ConfigError: There is none.
        CheckpointDamaged: It has changed since the run saved it.
    """
    from agentrig.run.auditing import faults_of
    from agentrig.run.checkpoints import told_if_removed, verify
    from agentrig.run.directory import RunDirectory
    from agentrig.run.past import lost_checkpoints, with_cure

    if path is None:
        return None
    found: Path | None = path
    if not (path / "config.json").is_file():
        of = RunDirectory(path) if (path / "checkpoints").is_dir() else None
        found = of.checkpoints.latest()[0] if of else None
        for warning in lost_checkpoints(of.checkpoints, of.read_json("progress.json")) if of and found else ():
            click.echo(f"agentrig: warning: {warning}", err=True)
    if found is None:
        raise ConfigError(
            f"{path} is neither a Hugging Face directory (config.json) nor a run directory with a checkpoint"
        )
    if (found / PROMPTS_FILE).is_file():
        raise ConfigError(f"{path} is of a run that found prompts, and no model: use them with --prompts {path}")
    run = found.absolute().parents[1]
    ours = (run / "config.toml").is_file()
    if ours:
        with suppress(RunFileError):  # a damaged manifest says nothing of the checkpoint
            RunDirectory(run).manifest()
        if fault := faults_of(run):
            click.echo(f"agentrig: warning: {fault}", err=True)
    try:
        with told_if_removed(found):
            verify(found, trains=False)
    except CheckpointDamaged as error:
        raise (with_cure(error, RunDirectory(run), trains=False) if ours else error) from None
    return found
