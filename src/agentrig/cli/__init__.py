"""The command line: `commands/` has one file per command; `options` and `groups` have the code that they share."""

from agentrig.cli.entry import main

__all__ = ["main"]
