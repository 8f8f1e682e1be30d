"""What all code in a process shares: limits, modules, Python's own hooks. A plugin that breaks one breaks the rest."""

from __future__ import annotations

import builtins
import logging
import os
import resource
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from operator import is_
from typing import Any

LIMITS: Mapping[str, str] = {
    "RLIMIT_NOFILE": "ulimit -n",
    "RLIMIT_AS": "ulimit -v",
    "RLIMIT_DATA": "ulimit -d",
    "RLIMIT_FSIZE": "ulimit -f",
    "RLIMIT_NPROC": "ulimit -u",
    "RLIMIT_CPU": "ulimit -t",
    "RLIMIT_STACK": "ulimit -s",
    "RLIMIT_MEMLOCK": "ulimit -l",
}
"""Limits without which other code of the process fails, and what a shell calls them."""

NEEDED = frozenset(("agentrig", *sys.stdlib_module_names))
"""Packages whose modules every process of a run goes on to import by name."""

OURS = ("agentrig", "builtins", "sys")
"""Packages of which there may be only one in a process."""

CALLED: Sequence[tuple[Any, str]] = ((sys, "excepthook"), (threading, "excepthook"), (builtins, "__import__"))
"""What Python itself calls: each may be another function, but must be one."""


class SharedState:
    """Notes what all code of this process shares, so that `restore` can undo what breaks other code.

    A higher limit, or a module that was added or replaced, does no harm and is left alone.

    Attributes:
        lasting: What was done that nothing can undo in this process; '' for nothing.
    """

    def __init__(self) -> None:
        self.lasting = ""
        self._limits = {name: resource.getrlimit(number) for name, number in _limits().items()}
        self._modules, self._table = dict(sys.modules), sys.modules
        self._timed = signal.getitimer(signal.ITIMER_REAL)[0] > 0
        self._environment, self._user = os.environ, os.geteuid()
        self._recursion = sys.getrecursionlimit()
        self._traced, self._profiled = threading.gettrace(), threading.getprofile()
        self._disabled = logging.root.manager.disable
        self._called = {each: getattr(*each) for each in CALLED}
        self._paths = {name: list(getattr(sys, name)) for name in ("path", "meta_path", "path_hooks")}
        self._streams = {name: getattr(sys, name) for name in ("stdout", "stderr")}

    def restore(self) -> list[str]:
        """Put back what is broken; return what had been done: `removed all modules from sys.modules`."""
        return [*self._restored_limits(), *self._restored_modules(), *self._restored_python()]

    def _restored_limits(self) -> Iterator[str]:
        for name, number in _limits().items():
            before, now = self._limits[name], resource.getrlimit(number)
            if not any(map(_lower, now, before)):
                continue
            did = f"set the limit {name} ({LIMITS[name]}) from {_shown(before)} to {_shown(now)}"
            try:
                resource.setrlimit(number, before)
            except (OSError, ValueError):  # only root may raise a hard limit again
                self._limits[name] = now
                self.lasting = did
            yield did

    def _restored_modules(self) -> Iterator[str]:
        if sys.modules is not self._table:
            sys.modules = self._table
            yield "replaced sys.modules"
        if all(map(is_, map(sys.modules.get, self._modules), self._modules.values())):
            return
        gone = [name for name, module in self._modules.items() if self._is_gone(name, module)]
        needed = [name for name in gone if name.partition(".")[0] in NEEDED]
        if "sys" in needed:
            sys.modules.update(self._modules)
            yield "removed all modules from sys.modules"
        elif needed:
            sys.modules.update({name: self._modules[name] for name in gone})
            more = f" and {len(needed) - 1} more modules" if len(needed) > 1 else ""
            yield f"removed {min(needed, key=len)}{more} from sys.modules"

    @staticmethod
    def _is_gone(name: str, module: Any) -> bool:
        now = sys.modules.get(name)
        return now is not module and (now is None or name.partition(".")[0] in OURS)

    def _restored_python(self) -> Iterator[str]:
        if not self._timed and signal.getitimer(signal.ITIMER_REAL)[0]:
            signal.setitimer(signal.ITIMER_REAL, 0)
            yield "set a timer by signal.alarm or setitimer, which would end its process"
        if os.environ is not self._environment:
            setattr(os, "environ", self._environment)  # noqa: B010 (the object itself, not what it holds)
            yield "replaced os.environ"
        if (user := os.geteuid()) != self._user:
            os.seteuid(self._user)
            yield f"set the effective user to {user}"
        if (most := sys.getrecursionlimit()) < self._recursion:
            sys.setrecursionlimit(self._recursion)
            yield f"set Python's recursion limit to {most}"
        if threading.gettrace() is not self._traced:
            threading.settrace(self._traced)
            yield "called threading.settrace"
        if threading.getprofile() is not self._profiled:
            threading.setprofile(self._profiled)
            yield "called threading.setprofile"
        if logging.root.manager.disable > self._disabled:
            logging.disable(self._disabled)
            yield "called logging.disable"
        for (module, name), function in self._called.items():
            if not callable(getattr(module, name, None)):
                setattr(module, name, function)
                yield f"removed {module.__name__}.{name}"
        for name, entries in self._paths.items():
            if not getattr(sys, name, None):
                setattr(sys, name, list(entries))
                yield f"emptied sys.{name}"
        for name, stream in self._streams.items():
            if stream is not None and not _takes_text(getattr(sys, name, None)):
                setattr(sys, name, stream)
                yield f"broke sys.{name}"


def _limits() -> dict[str, int]:
    return {name: getattr(resource, name) for name in LIMITS if hasattr(resource, name)}


def _lower(now: int, before: int) -> bool:
    return now >= 0 and (before < 0 or now < before)


def _shown(limit: tuple[int, int]) -> str:
    """Show a limit as its soft part, and the hard one where that differs."""
    soft, hard = ("unlimited" if part < 0 else str(part) for part in limit)
    return soft if soft == hard else f"{soft} (hard {hard})"


def _takes_text(stream: Any) -> bool:
    """Whether a stream can be written to. A closed one counts: `left_alone` tells of it."""
    try:
        if not stream.closed:
            stream.write("")
    except (OSError, ValueError):
        return True
    except Exception:
        return False
    return True
