"""`agentrig`: the top of the command line."""

from __future__ import annotations

import atexit
import faulthandler
import gc
import io
import logging
import sys

import click

from agentrig.cli.groups import Group


class Printable(logging.Formatter):
    """Formats a line of the log for a terminal: what an agent or a task wrote must not control it."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        from agentrig.text import message_lines

        return message_lines(super().format(record))


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="agentrig", prog_name="agentrig")
@click.option("-v", "--verbose", is_flag=True, help="Log more.")
def main(verbose: bool) -> None:
    """Train the model inside an LLM agent by reinforcement learning.

    \b
    agentrig train                    train the reference agent on this machine
    agentrig train mini --reward my-reward algorithm.lr=1e-4
    agentrig plugins                  list the components that you can choose from
    """
    if not faulthandler.is_enabled():
        faulthandler.enable(2, all_threads=False)  # a crash in native code, or kill -ABRT, prints Python's stack
    # Torch and what it needs make a million objects that stay: search them for cycles seldom, and not at the exit.
    gc.set_threshold(10_000)
    atexit.register(gc.freeze)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a model's output can be printed in any terminal encoding
        sys.stdout.reconfigure(errors="backslashreplace")
    handler = logging.StreamHandler()
    handler.setFormatter(Printable("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.DEBUG if verbose else logging.WARNING, handlers=[handler])
    logging.getLogger("agentrig").setLevel(logging.DEBUG if verbose else logging.INFO)
    for noisy in ("httpx", "httpcore", "matplotlib", "asyncio", "openai", "PIL"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
