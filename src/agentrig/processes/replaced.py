"""Notices that a plugin's code replaced functions which the run itself uses, or closed the run's files."""

from __future__ import annotations

import builtins
import contextlib
import fcntl
import json
import logging
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from agentrig.errors import PluginError
from agentrig.processes.ends import end_now
from agentrig.processes.locks import held_descriptors
from agentrig.processes.put_back import put_back

log = logging.getLogger(__name__)

USED = (
    (builtins, ("open", "print", "len", "isinstance")),
    (json, ("dumps", "loads", "dump", "load")),
    (os, ("open", "close", "read", "write", "replace", "unlink", "stat", "fsync", "fork", "kill", "getpid")),
    (time, ("time", "monotonic", "perf_counter", "sleep")),
)
"""Module, and those of its functions without which no run goes on."""

_changes = threading.Lock()
_under_way = 0
_before: dict[tuple[Any, str], Any] = {}


@contextmanager
def left_alone(who: str, cure: str, tell: Callable[[str], None] | None = None) -> Iterator[None]:
    """Run a plugin's code in this process; what it replaced is put back after it. See `put_back` for what else is.

    Blocks may be open at once in several threads: what there was before the first of them counts.

    Args:
        who: Whose code it is, for the message.
        cure: What to do.
        tell: Is given the words on replaced functions instead of the error: the code will run elsewhere.

    Raises:
        PluginError: It replaced a function, or closed a file of the run.
    """
    global _under_way
    with _changes:
        if not _under_way:
            _before.update({(module, name): getattr(module, name) for module, names in USED for name in names})
        _under_way += 1
    files, streams = _outputs() | held_descriptors(), _streams()
    screen = _copy_of_stderr() if 2 in files else None
    try:
        with put_back(who, processes=True):
            yield
    finally:
        with _changes:
            replaced = [each for each, function in _before.items() if getattr(*each, None) is not function]
            for module, name in replaced:
                setattr(module, name, _before[module, name])
            _under_way -= 1
            if not _under_way:
                _before.clear()
        closed = [name for descriptor, name in files.items() if _is_closed(descriptor)]
        closed += [name for stream, name in streams if stream.closed]
        if screen is not None:
            with contextlib.suppress(OSError):  # it is closed too
                if _is_closed(2):
                    os.dup2(screen, 2)
                os.close(screen)
        if any(stream.closed for stream, _ in streams):
            _open_streams_again()
        did = []
        if replaced:
            did.append(f"replaced {_listed([f'{module.__name__}.{name}' for module, name in replaced])}")
        if closed:
            did.append(f"closed files and connections of this command, such as {closed[0]}")
        text = f"{who} {' and '.join(did)}, which this command needs itself"
        if did and tell is not None and not closed:
            tell(f"{text}: put back")
        elif did:
            if closed:  # other threads use what is gone: they would hang, or print tracebacks
                log.error("%s.\n  %s", text, cure)
                end_now(1)
            raise PluginError(f"{text}.\n  {cure}")


def _outputs() -> dict[int, str]:
    """Return the descriptors of the command's output that are open; a process that it has started may close its own."""
    if multiprocessing.parent_process() is not None:
        return {}
    outputs = ((1, sys.__stdout__, "its standard output"), (2, sys.__stderr__, "its standard error"))
    return {at: name for at, stream, name in outputs if stream is not None and not _is_closed(at)}


def _streams() -> list[tuple[Any, str]]:
    """Return the open streams of the command's output: one can be closed, and its descriptor stay open."""
    if multiprocessing.parent_process() is not None:
        return []
    named = (("its standard output", sys.stdout, sys.__stdout__), ("its standard error", sys.stderr, sys.__stderr__))
    return [(stream, name) for name, *each in named for stream in each if stream is not None and not stream.closed]


def _open_streams_again() -> None:
    """Replace the streams of output that are closed, also those of log handlers: they are needed for the message."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name, None) is not None and getattr(sys, name).closed:
            if _is_closed(number):
                os.dup2(os.open(os.devnull, os.O_WRONLY), number)
            setattr(sys, name, os.fdopen(number, "w", encoding="utf-8", errors="backslashreplace", closefd=False))
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and getattr(handler.stream, "closed", False):
            handler.stream = sys.stderr  # `setStream` would flush the closed one


def _copy_of_stderr() -> int | None:
    """Return a copy of standard error, for messages on code that closes it; of a number that such code seldom has."""
    try:
        return fcntl.fcntl(2, fcntl.F_DUPFD_CLOEXEC, 500)
    except OSError:  # this process may open fewer files
        return None


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _is_closed(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return True
    return False
