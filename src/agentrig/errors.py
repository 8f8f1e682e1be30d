"""Every error that agentrig raises on purpose; each message names the cure."""

from __future__ import annotations

import difflib
import os
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path


class AgentrigError(Exception):
    """Base of all errors that a user can mend. The command line prints it without a traceback."""


class ConfigError(AgentrigError):
    """A run file, recipe or override is wrong: unknown key, wrong type, value out of range."""


class PluginError(AgentrigError):
    """A plugin is broken: it fails to import, misspells a hook or claims a taken name."""


class LookupFailed(AgentrigError):
    """A component was asked for by a name that no loaded plugin brings."""


class RunStopped(AgentrigError):
    """A run was ended on purpose because going on would learn nothing or learn from failures."""


class RunInUse(AgentrigError):
    """A living process works in the run directory already."""


class RunFileError(AgentrigError):
    """A file of a run directory cannot be read or written; the message says which, why, and what to do."""


class CheckpointDamaged(AgentrigError):
    """A checkpoint cannot be read; a run that goes on from it is told which one came before.

    Args:
        checkpoint: Its directory.
        reason: Which file, and what is wrong with it.
    """

    def __init__(self, checkpoint: Path, reason: str) -> None:
        super().__init__(f"the checkpoint {checkpoint} is damaged: {reason}")
        self.checkpoint = checkpoint


class AgentFailure(AgentrigError):
    """Raise it in an agent to end a rollout as a typed failure.

    Args:
        message: What went wrong, for the report.
        kind: The failure's kind; it is counted under this name: letters, digits, `-`, `_` and `.`, at most 40 of
            them. Anything else is counted as `agent-error`, and the message says so.
    """

    def __init__(self, message: str, *, kind: str = "agent-error") -> None:
        super().__init__(message)
        self.kind = kind


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `` Did you mean "x"?`` for the known name closest to `name`, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f' Did you mean "{close[0]}"?' if close else ""


def place_of(error: BaseException) -> str:
    """Return ` (FILE:LINE in FUNCTION)`: the last place in the user's own code that an exception came from, or ''."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith(_OTHERS)]
    return f" ({os.path.basename(own[-1].filename)}:{own[-1].lineno} in {own[-1].name})" if own else ""


_OTHERS = (*{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}, os.path.dirname(__file__), "<")
"""Where code lies that is not the user's: Python's, installed packages and agentrig itself."""
