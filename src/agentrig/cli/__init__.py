"""The command line: one file a command, and what they share in `options` and `groups`."""

from agentrig._moved import former
from agentrig.cli.entry import main

__all__ = ["main"]

__getattr__ = former(__name__)
