"""What a plugin's code may leave behind in this process: another directory, lower limits, processes that go on."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from agentrig.processes.ends import forks_ended, note_started, say
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

_lock = threading.Lock()
_under_way = 0
_told: set[tuple[str, str]] = set()
_shared: Shared | None = None
_owner = "the agent"
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
    """Put back at once what a plugin's code has broken for all other code of this process, and say so."""
    who = who or _owner
    with _lock:
        did = _shared.restore() if _shared is not None else []
        _restored.extend((time.monotonic(), who, each) for each in did)
    tell(did, who)


def tell(did: Iterable[str], who: str = "") -> None:
    """Say, once each, what a plugin's code did to all other code of this process, and that it is put back."""
    who = who or _owner
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
