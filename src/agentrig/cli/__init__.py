"""The command line: `commands/` has the commands; `options` and `groups` have the code that they share."""

from agentrig.cli.entry import main

__all__ = ["main"]
