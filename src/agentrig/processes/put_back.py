"""What a plugin's code may leave behind in this process is put back: a directory, limits, functions, closed files."""

from __future__ import annotations

import builtins
import contextlib
import fcntl
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from agentrig.errors import PluginError
from agentrig.processes.ends import end_now, forks_ended, note_started, say
from agentrig.processes.locks import held_descriptors
from agentrig.processes.shared import Functions, Shared
from agentrig.processes.supervisor import children_of

log = logging.getLogger(__name__)

MARK = "AGENTRIG_RUNNER"
"""Environment variable that identifies the runner that started a process."""

TORCH = {
    "set_grad_enabled": "is_grad_enabled",
    "set_default_dtype": "get_default_dtype",
    "set_default_device": "get_default_device",
    "use_deterministic_algorithms": "are_deterministic_algorithms_enabled",
}
"""What sets a value of torch that all code shares, and what returns it."""

USED = (
    (builtins, ("open", "print", "len", "isinstance")),
    (json, ("dumps", "loads", "dump", "load")),
    (os, ("open", "close", "read", "write", "replace", "unlink", "stat", "fsync", "fork", "kill", "getpid")),
    (time, ("time", "monotonic", "perf_counter", "sleep")),
)
"""Module, and those of its functions without which no run goes on."""

_lock = threading.Lock()
_under_way = 0
_alone = 0
_used: dict[tuple[Any, str], Any] = {}  # the functions of `USED`, while blocks of `left_alone` are open
_told: set[tuple[str, str]] = set()
_shared: Shared | None = None
_owner = ""  # whose process this is, if it is a runner's
_restored: list[tuple[float, str, str]] = []  # when, who, and what had been done


@contextmanager
def put_back(who: str, *, processes: bool = False) -> Iterator[None]:
    """Run a plugin's code: afterwards the current directory is what it was, because paths of a run are relative to it.

    So are the umask, without which nobody could read the run's files, and what else `Shared` notes. Blocks may be open
    at once in several threads: what there was before the first of them counts. A runner is the agent's own process, so
    only `restored` puts something back there.

    Args:
        who: Whose code it is, for the message.
        processes: Whether processes that it starts, and that still run when the command ends, end with it.
    """
    if os.environ.get(MARK):
        with forks_ended(who):
            yield
        return
    name = who.partition(", ")[0].rstrip(",")  # each split of a task set does the same
    before = _children() if processes else set()
    _enter()
    try:
        with forks_ended(who):
            yield
    finally:
        if processes:
            note_started(_children() - before, name)
        _leave(name)


@contextmanager
def left_alone(who: str, cure: str, tell: Callable[[str], None] | None = None) -> Iterator[None]:
    """Run a plugin's code in this process; what it replaced is put back after it. See `put_back` for what else is.

    Blocks may be open at once in several threads: what there was before the first of them counts. In a runner what is
    replaced is left to `restored`, which says it: one that this put back would be found by nobody.

    Args:
        who: Whose code it is, for the message.
        cure: What to do.
        tell: Is given the words on replaced functions instead of the error: the code will run elsewhere.

    Raises:
        PluginError: It replaced a function, or closed a file of the run.
    """
    global _alone
    with _lock:
        if not _alone and not _owner:
            _used.update({(module, name): getattr(module, name) for module, names in USED for name in names})
        _alone += 1
    files, streams = _outputs() | held_descriptors(), _streams()
    screen = _copy_of_stderr() if 2 in files else None
    try:
        with put_back(who, processes=True):
            yield
    finally:
        with _lock:
            replaced = [each for each, function in _used.items() if getattr(*each, None) is not function]
            for module, name in replaced:
                setattr(module, name, _used[module, name])
            _alone -= 1
            if not _alone:
                _used.clear()
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


@contextmanager
def torch_put_back(who: str) -> Iterator[None]:
    """Run a task set's code: afterwards torch computes as before it, also if it was imported by this code.

    Not for code of a reward or an algorithm: others compute at the same time, and an algorithm may set these values.

    Args:
        who: Whose code it is, for the message.
    """
    before = _torch_values()
    try:
        yield
    finally:
        for name, value in _torch_values().items():
            torch: Any = sys.modules["torch"]
            at_first = dict(zip(TORCH, (True, torch.float32, torch.device("cpu"), False), strict=True))
            was = before.get(name, at_first[name])
            if value != was:
                getattr(torch, name)(None if was == torch.device("cpu") else was)  # no device computes on the CPU too
                tell([f"called torch.{name}({value})"], who.partition(", ")[0])


def _torch_values() -> dict[str, Any]:
    """Return what torch's values are now, by the function that sets them; empty if torch has not been imported."""
    torch = sys.modules.get("torch")
    return {name: getattr(torch, get)() for name, get in TORCH.items() if hasattr(torch, get)}


@contextmanager
def told_if_replaced(who: str) -> Iterator[None]:
    """Warn if a plugin's code replaces functions that all code of the command calls: others may count on them.

    They stay: some libraries do so on purpose, such as gevent.
    """
    if os.environ.get(MARK):
        yield
        return
    functions = Functions()
    try:
        yield
    finally:
        if replaced := functions.replaced(put_back=False):
            log.warning(
                "%s %s when it was imported: all code of this command uses it, the run's own too, and its results may "
                "be wrong. Call a function of your own instead",
                *(who, replaced),
            )


def note_shared(shared: Shared, owner: str) -> None:
    """Let `restored` put back what all code of this process shares; `owner` is whose runner it is."""
    global _shared, _owner
    _shared, _owner = shared, owner


def restored(who: str = "") -> None:
    """Put back at once what a plugin's code has broken for all other code of this process, and say so.

    Args:
        who: Whose code it is, where the process has no owner (see `note_shared`): whichever thread finds a change,
            one name is said.
    """
    who = _owner or who or "the agent"
    with _lock:
        did = _shared.restore() if _shared is not None else []
        _restored.extend((time.monotonic(), who, each) for each in did)
    tell(did, who)


def tell(did: Iterable[str], who: str = "") -> None:
    """Say, once each, what a plugin's code did to all other code of this process, and that it is put back."""
    who = _owner or who or "the agent"
    for each in did:
        kept = "which nothing can undo here" if _shared is not None and each == _shared.lasting else "put back"
        text = f"{who} {each}, and all code in its process shares that: {kept}"
        if (who, each) not in _told:
            _told.add((who, each))
            if os.environ.get(MARK):
                say(text)
            else:
                log.warning("%s", text)


def restored_since(moment: float) -> str:
    """Return what has been put back since then (on the monotonic clock), as the end of a failure's message, or ''."""
    found = [(who, did) for when, who, did in _restored if when >= moment]
    if not found:
        return ""
    did = " and ".join(dict.fromkeys(did for _, did in found))
    return f"; {found[0][0]} {did}, and all code in its process shares that"


def lasting() -> str:
    """Return what was done to this process that nothing can undo; '' for nothing."""
    return _shared.lasting if _shared is not None else ""


def _enter() -> None:
    global _under_way, _shared
    with _lock:
        if not _under_way:
            _shared = Shared()
        _under_way += 1


def _leave(who: str) -> None:
    global _under_way
    restored(who)
    with _lock:
        _under_way -= 1
        did = [*filter(None, (_shared.restored_folder(), _shared.restored_mask()))] if _shared is not None else []
    tell(did, who)


def _children() -> set[int]:
    return set(children_of(os.getpid())) if sys.platform == "linux" else set()


def _is_worker() -> bool:
    """Whether multiprocessing has made this process; every command imports this module, so it does not import that."""
    multi = sys.modules.get("multiprocessing")
    return multi is not None and multi.parent_process() is not None


def _outputs() -> dict[int, str]:
    """Return the descriptors of the command's output that are open; a process that it has started may close its own."""
    if _is_worker():
        return {}
    outputs = ((1, sys.__stdout__, "its standard output"), (2, sys.__stderr__, "its standard error"))
    return {at: name for at, stream, name in outputs if stream is not None and not _is_closed(at)}


def _streams() -> list[tuple[Any, str]]:
    """Return the open streams of the command's output: one can be closed, and its descriptor stay open."""
    if _is_worker():
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
