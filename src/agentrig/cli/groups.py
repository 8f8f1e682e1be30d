"""Command groups: they suggest the nearest command, and import a command when it is used."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import click

from agentrig import end_at_once
from agentrig.background import Background, late
from agentrig.errors import AgentrigError, RunStopped, exhausted, little_memory, nearest
from agentrig.processes.ends import Interrupted, end_left, end_started, handling, interrupt, leave, no_silent_end

LATE_S = 2.0
"""Seconds that the exit handlers may take after a run has stopped waiting for a tracker."""


class NearestGroup(click.Group):
    """Suggests the nearest command for an unknown name."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Look a command up."""
        known = self.list_commands(ctx)
        if args and not args[0].startswith("-") and args[0] not in known:
            ctx.fail(f'there is no command "{args[0]}".{nearest(args[0], known)} Commands: {", ".join(known)}')
        ctx.meta["agentrig.words"] = tuple(args[1:])
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None and not isinstance(command, click.Group):
            check_given_once(command, ctx, rest)
        return name, command, rest


def check_given_once(command: click.Command, ctx: click.Context, words: Sequence[str]) -> None:
    """End the command if an option that takes one value is given twice: click would use the last, in silence."""
    try:
        given = command.make_parser(click.Context(command, parent=ctx)).parse_args([*words])[2]
    except click.UsageError:
        return  # the command itself says what is wrong
    for param, times in Counter(given).items():
        if times > 1 and isinstance(param, click.Option) and not (param.multiple or param.is_flag or param.count):
            ctx.fail(f"{param.opts[-1]} is given {times} times, and takes one value: leave all but one out")


class Group(NearestGroup):
    """Prints agentrig's own errors without a traceback, and imports a command when it is used."""

    sections: ClassVar[dict[str, dict[str, tuple[str, str]]]] = {
        "Start": {
            "train": ("train:train", "Train by a recipe (a complete configuration) or a run file."),
            "dev": ("dev:dev", "Run an agent on a few tasks and show every span; nothing is learned."),
            "eval": ("eval:eval_", "Measure a model through an agent."),
            "warmup": ("warmup:warmup", "Make a small starting model for your own tasks."),
            "forecast": ("forecast:forecast", "Say whether a run would learn, and how long it would take."),
        },
        "Look": {
            "watch": ("look:watch", "Show runs in a browser while they go on: curves, and every trace."),
            "report": ("look:report", "Rebuild the report of a run."),
            "compare": ("look:compare", "Compare runs in one table: method, held-out accuracy, tokens, time, cost."),
            "why": ("look:why", "Say what held a run's learning back, and what to change."),
            "audit": ("look:audit", "Check a recorded step with code that shares nothing with the trainer."),
            "export": ("traces:export", "Copy a run's latest checkpoint as a Hugging Face directory."),
            "export-traces": ("traces:export_traces", "Send a run's traces to OpenTelemetry, or into a file."),
            "import-traces": ("traces:import_traces", "Make demonstrations from traces of production or a run."),
        },
        "Extend": {
            "new": ("new:new", "Start an agent, tasks, a reward … of your own, from a template."),
            "validate": ("validate:validate", "Check what a plugin brings, and play its agent on a dozen tasks."),
            "plugins": ("plugins:plugins_", "List the plugins and what each brings."),
            "doctor": ("doctor:doctor", "Find what would keep a recipe from running here."),
            "data": ("data:data", "Make or check the files of a task set."),
        },
        "Operate": {
            "runner": ("agentrig_lightning.commands:runner", "Join a running training from another machine."),
            "run": (
                "agentrig_lightning.commands:run",
                "Run a script written for Agent Lightning's Trainer, unchanged.",
            ),
        },
    }
    """The commands by section of the list: name to `module:attribute` in `commands/`, or in a plugin, and its line."""

    lazy: ClassVar[dict[str, tuple[str, str]]] = {
        name: command for section in sections.values() for name, command in section.items()
    }
    """All of them."""

    prints_json = False
    """Whether a command prints JSON to stdout, and all else goes to stderr."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands."""
        return list(self.lazy)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Return a command, importing its module."""
        if name in self.lazy and name not in self.commands:
            module, _, attribute = self.lazy[name][0].partition(":")
            plugin = module.partition(".")[0] if "." in module else ""
            try:
                found = import_module(module if plugin else f"agentrig.cli.commands.{module}")
            except ModuleNotFoundError as error:
                if not plugin or (error.name or "").partition(".")[0] != plugin:
                    raise
                needed = plugin.replace("_", "-")
                raise click.ClickException(f"agentrig {name} needs {needed}: pip install {needed}") from None
            self.add_command(getattr(found, attribute), name)
        return super().get_command(ctx, name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        width = max(map(len, self.lazy))
        for section, commands in self.sections.items():
            with formatter.section(section):
                formatter.write_dl([(name.ljust(width), line) for name, (_, line) in commands.items()])

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Run the command line as the program of this process, which ends with it, whatever plugins have left."""
        status = 1
        atexit.register(end_started)  # the first, so that it runs last: trackers and pools end their own before
        try:
            return super().__call__(*args, **options)
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
            raise
        finally:
            if self.prints_json:  # what plugins print at exit is no JSON
                with contextlib.suppress(OSError):
                    os.dup2(2, 1)
            end_left(status)

    def main(self, *args: Any, **options: Any) -> Any:
        """Run the command line; a machine that lacks something gives one message and exit status 1."""
        if signal.getsignal(signal.SIGINT) is end_at_once:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if sys.stdout is None:
            os.open(os.devnull, os.O_WRONLY)  # on its number, which a file of the command would get otherwise
            _fail("standard output is closed. Send it to a file, or away: agentrig … > /dev/null")
        if sys.stderr is None:
            _discard_messages()
        try:
            os.getcwd()
        except FileNotFoundError:
            _fail("the current directory was deleted. Change to another one: cd DIR")
        try:
            with no_silent_end():
                result = super().main(*args, **options)
            _flush()
            return result
        except SystemExit as end:
            try:
                _flush()
            except OSError as error:
                _fail(_unprintable(error), status=end.code if isinstance(end.code, int) and end.code else 1)
            raise
        except KeyboardInterrupt:  # before the command itself
            _fail("interrupted by Ctrl-C", status=130)
        except Exception as error:
            wrong = _unprintable(error) if isinstance(error, OSError) and _printing(error) else exhausted(error)
            if not wrong:
                raise
            _fail(wrong)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; errors that a user can fix give exit status 1, signals 128 plus their number."""
        before = late()  # of an earlier command in this process
        try:
            with handling(interrupt):
                result = super().invoke(ctx)
            _leave_the_late(0, before)
            return result
        except AgentrigError as error:
            from agentrig.text import message_lines

            text = str(error)
            if isinstance(error, RunStopped) and error.run is not None:
                from agentrig.view.terminal import run_error

                text = run_error(error)
            _tell(f"agentrig: {message_lines(text)}")
            if "ulimit -v" not in str(error) and (memory := little_memory()):
                _tell(f"  {memory}")
            if error.abandoned:
                leave(1)
            _leave_the_late(1, before)
            ctx.exit(1)
        except KeyboardInterrupt as error:
            _tell(f"agentrig: {str(error) or 'interrupted'}")
            status = error.exit_status if isinstance(error, Interrupted) else 130
            if isinstance(error, Interrupted):
                error.told = True
                if error.abandoned:
                    leave(status)
            _leave_the_late(status, before)
            ctx.exit(status)
        except click.NoSuchOption as error:
            if keys := _keys_of(error, ctx.meta.get("agentrig.words", ())):
                said = f"No such option '{error.option_name}'. A setting is written without dashes: {keys}"
                raise click.UsageError(said, error.ctx) from None
            raise
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception:
            if late() - before:
                sys.excepthook(*sys.exc_info())
                _leave_the_late(1, before)
            raise


def _keys_of(error: click.NoSuchOption, words: Sequence[str]) -> str:
    """Return the settings that an unknown option may mean, as `section.key=value`, or ''. Also of `--set KEY=VALUE`."""
    if error.ctx is None or not any("section.key" in str(p.metavar) for p in error.ctx.command.params):
        return ""
    from agentrig.plan import keys_called

    value = "VALUE"
    for word, following in zip(words, [*words[1:], ""], strict=True):
        option, equals, rest = word.partition("=")
        if option == error.option_name:
            value = rest if equals else following if following and not following.startswith("-") else value
    name = error.option_name.lstrip("-").replace("-", "_")
    if "=" in value:
        name, _, value = value.partition("=")
    keys = [name] if "." in name else keys_called(name)
    if not (keys or any(option.startswith(str(error.option_name)) for option in error.possibilities or ())):
        keys = keys_called(name, begun=True)
    return " or ".join(f"{key}={value}" for key in keys)


def _printing(error: OSError) -> bool:
    """Whether an error is that of writing to the terminal, or to what stands in for it."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return any(Path(file).parent.name in ("click", "rich") for file in files[-2:])


def _flush() -> None:
    """Write what was printed."""
    if sys.stdout is None:
        _fail("the output is lost: code of a plugin, such as the agent or the reward, has set sys.stdout to None")
    sys.stdout.flush()


def _discard_messages() -> None:
    """Give a command whose standard error is closed one that discards what it gets, for its child processes too."""
    away = os.open(os.devnull, os.O_WRONLY)
    try:
        os.fstat(2)
    except OSError:  # else this is the file, or another one has that number by now
        os.dup2(away, 2)
    if away == 2:
        os.set_inheritable(2, True)
    sys.stderr = os.fdopen(away, "w", encoding="utf-8", errors="backslashreplace")


def _unprintable(error: OSError) -> str:
    return f"the output cannot be written: {error.strerror}. Send it elsewhere: agentrig … > FILE"


def _tell(text: str) -> None:
    """Print to standard error. The exit status still tells how the command ended when the terminal is gone."""
    file = sys.stderr or sys.__stderr__  # code of a plugin may have set the first to None
    if file is not None:
        with contextlib.suppress(OSError):
            click.echo(text, file=file)


def _fail(wrong: str, *, status: int = 1) -> NoReturn:
    """Print why the command ends, and end it; what is left of its output goes nowhere."""
    _tell(f"agentrig: {wrong}")
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(status)


def _leave_the_late(status: int, before: set[Background]) -> None:
    """End this process if a run has stopped waiting for a tracker: its client might wait for ever at exit."""
    if late() - before:
        leave(status, within_s=LATE_S)
