"""The command line: `commands/` has one file per command; `options` and `groups` have the code that they share."""

from agentrig._moved import former
from agentrig.cli.entry import main

__all__ = ["main"]

__getattr__ = former(__name__)
