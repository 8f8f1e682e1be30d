"""What all code in a process shares: limits, modules, functions, a directory. A plugin that breaks one breaks all."""

from __future__ import annotations

import builtins
import importlib
import logging
import os
import re
import resource
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from operator import is_
from types import CodeType
from typing import Any

import attrs

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

MODULES = (
    *("asyncio", "base64", "builtins", "copy", "datetime", "functools", "hashlib", "http.client", "io"),
    *("itertools", "json", "json.decoder", "json.encoder", "math", "os", "pathlib", "posixpath", "queue"),
    *("random", "re", "shutil", "socket", "subprocess", "tempfile", "threading", "time"),
    *("urllib.parse", "urllib.request", "uuid"),
)
"""Modules of the standard library whose functions and classes are compared."""

WITH_METHODS = ("json.decoder", "json.encoder", "http.client", "queue", "random", "threading")
"""Those whose classes are compared too."""

OWN = (
    *(f"agentrig.{name}" for name in ("errors", "pools", "text", "traces")),
    *(f"agentrig.processes.{name}" for name in ("ends", "put_back", "shared")),
    *(f"agentrig.runners.{name}" for name in ("attempt", "loops", "processes")),
    *(f"agentrig.tracing.{name}" for name in ("httpx_tap", "recorder", "recording")),
)
"""Modules of agentrig that a rollout runs through: all their functions are compared, for this comparison needs them."""

CLIENTS: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("httpx", "httpx2"), ("Client", "AsyncClient", "HTTPTransport", "AsyncHTTPTransport", "Response")),
    "requests": ("Session", "Response"),
    "openai": ("OpenAI", "AsyncOpenAI"),
    "openai._base_client": ("SyncAPIClient", "AsyncAPIClient"),
    "openai.resources.chat.completions": ("Completions", "AsyncCompletions"),
    "openai.resources.responses": ("Responses", "AsyncResponses"),
    "anthropic": ("Anthropic", "AsyncAnthropic"),
    "anthropic._base_client": ("SyncAPIClient", "AsyncAPIClient"),
    "anthropic.resources.messages": ("Messages", "AsyncMessages"),
}
"""Packages of clients, or their modules, and the classes there that are compared, from when they are imported."""

INSTALLED = tuple(f"{os.sep}{folder}{os.sep}" for folder in ("site-packages", "dist-packages"))
"""What the path of an installed package has in it; Debian's own Python has the second."""

CURE = (
    "the rollouts of a runner share it, so their answers can't be trusted. Leave it as it is, or change it while the "
    "agent is built; or give each rollout a process of its own: runners.threads=1, or a program (agent command)"
)
"""What to do about it."""

SHOWN = 5
"""So many replaced functions are named."""

LAYERS = 20
"""So many functions in one another are looked at; a loop of them has no end."""


class InterpreterChanged(Exception):
    """Rollouts that were under way together can't be trusted; the text says what one of them did."""


class Shared:
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
        self._paths = {name: list(getattr(sys, name)) for name in ("argv", "path", "meta_path", "path_hooks")}
        self._streams = {name: getattr(sys, name) for name in ("stdout", "stderr")}
        self._folder, self._mask = current_folder(), umask()

    def restore(self) -> list[str]:
        """Put back what is broken; return what had been done: `removed all modules from sys.modules`."""
        return [*self._restored_limits(), *self._restored_modules(), *self._restored_python()]

    def restored_folder(self) -> str:
        """Put the current directory back; return what had been done, or ''."""
        now = current_folder()
        if not self._folder or now == self._folder:
            return ""
        did = f"changed the current directory to {now or 'one that was deleted'}"
        try:
            os.chdir(self._folder)
        except OSError as error:
            self.lasting = f"{did}, and {self._folder} is gone ({error.strerror})"
            return self.lasting
        return did

    def restored_mask(self) -> str:
        """Put the umask back; return what had been done, or ''."""
        now = umask()
        if self._mask is None or now is None or now == self._mask:
            return ""
        os.umask(self._mask)
        return f"changed the umask from {self._mask:03o} to {now:03o}"

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
            if entries and not getattr(sys, name, None):
                setattr(sys, name, list(entries))
                yield f"emptied sys.{name}"
        for name, stream in self._streams.items():
            if stream is not None and not _takes_text(getattr(sys, name, None)):
                setattr(sys, name, stream)
                yield f"broke sys.{name}"


class Functions:
    """The functions and classes that all code of this process calls, as they are now.

    Tracing libraries wrap the functions of clients to record calls, some only in the first rollout, and take their
    wrappers off again. That is no replacement: each function between the new one and a known one is an installed
    package's. The same holds for a client that is imported later, whose functions are not known from before: each must
    be an installed package's.

    Attributes:
        lasting: Whether a function was replaced that cannot be put back, because nobody has seen the original; or one
            of agentrig, which has more of them than are compared.
    """

    def __init__(self) -> None:
        self.lasting = False
        self._awaited = list(CLIENTS)
        self._parts = [
            (name, owner, _compared(owner)) for name, owner in (*_owners((*OWN, *MODULES)), *self._imported())
        ]

    def replaced(self, *, put_back: bool) -> str:
        """Say which are others now: `replaced json.loads of the interpreter`; '' for none.

        Args:
            put_back: Whether to put them back; only then, clients that have been imported since are looked at too.
        """
        found = []
        for part, owner, before in self._parts:
            get = vars(owner).get
            if all(map(is_, map(get, before), before.values())):
                continue
            for name, was in [*before.items()]:
                if (now := get(name)) is was:
                    continue
                if part not in OWN and _instruments(now, was):  # what this calls is one of them
                    before[name] = now
                    continue
                found.append(f"{part}.{name}".removeprefix("builtins."))
                self.lasting = self.lasting or part in OWN
                if put_back:
                    setattr(owner, name, was)
        for part, owner in self._imported() if put_back else ():
            known = _compared(owner)
            foreign = [name for name, now in known.items() if isinstance(owner, type) and _is_foreign(now)]
            found += [f"{part}.{name}" for name in foreign]
            self.lasting = self.lasting or bool(foreign)
            self._parts.append((part, owner, known))
        more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        return f"replaced {', '.join(found[:SHOWN])}{more} of the interpreter" if found else ""

    def _imported(self) -> list[tuple[str, Any]]:
        """Return the owners in the clients that have been imported since the last call."""
        names = [name for name in self._awaited if _is_imported(name)]
        if names:
            self._awaited = [name for name in self._awaited if name not in names]
        return [*_owners(names)]


@attrs.define(eq=False)
class Turn:
    """A rollout under way; `beside` is whether another one was under way with it."""

    beside: bool = False


class SharedByRollouts(Shared):
    """Compares, after each rollout of a runner, what they share with what it was when the agent had been built.

    Args:
        several: Whether several rollouts may be under way at once.
    """

    def __init__(self, *, several: bool) -> None:
        super().__init__()
        self.several = several
        self._lock = threading.Lock()
        self._turns: set[Turn] = set()
        self._told: set[str] = set()
        self._functions = Functions()
        self._variables = dict(os.environ)

    def begin(self) -> Turn:
        """Begin a rollout."""
        with self._lock:
            turn = Turn(bool(self._turns))
            for other in self._turns:
                other.beside = True
            self._turns.add(turn)
        return turn

    def end(self, turn: Turn) -> tuple[str, list[str]]:
        """End a rollout, and put back what was changed since the last one ended.

        Returns:
            What `Functions.replaced` says; and what else had been done, each kind of it only once.

        Raises:
            InterpreterChanged: Other rollouts were under way with this one, and may have met a change.
        """
        with self._lock:
            self._turns.discard(turn)
            replaced = self._functions.replaced(put_back=True)
            if self._functions.lasting:
                self.lasting = self.lasting or replaced
            moved = {"directory": self.restored_folder(), "variables": self._restored_variables()}
            if turn.beside and (met := [did for did in (replaced, *moved.values()) if did]):
                block = " (contextlib.chdir does so for all threads, too)" if moved["directory"] else ""
                raise InterpreterChanged(" and ".join(met) + block)
            done = {kind: did for kind, did in (*moved.items(), ("umask", self.restored_mask())) if did}
            told, self._told = self._told, self._told | done.keys()
            return replaced, [did for kind, did in done.items() if kind not in told]

    def _restored_variables(self) -> str:
        if self._variables.keys() <= set(self._environment):  # faster than to ask for each
            return ""
        gone = [name for name in self._variables if name not in self._environment]
        self._environment.update({name: self._variables[name] for name in gone})
        more = f" and {len(gone) - 1} more variables" if len(gone) > 1 else ""
        return f"removed {gone[0]}{more} from os.environ"


class SharedByScores(Shared):
    """Puts back what a reward has replaced, too, after each of its calls: other code reads and sends its scores."""

    def __init__(self) -> None:
        super().__init__()
        self._functions = Functions()

    def restore(self) -> list[str]:
        """Put back what is broken or replaced; return what had been done."""
        did, replaced = super().restore(), self._functions.replaced(put_back=True)
        if self._functions.lasting:
            self.lasting = self.lasting or replaced
        return [*did, replaced] if replaced else did


def _compared(owner: Any) -> dict[str, Any]:
    """Return the functions, classes and the like that a module or a class has now."""
    own = getattr(owner, "__name__", "") in OWN
    return {
        name: value
        for name, value in dict(vars(owner)).items()
        if (name[:1] != "_" or name in ("__init__", "__call__") or (name[1:2] != "_" and own))
        # `isinstance` would make some objects of a client's module import a part of it
        and (callable(value) or type(value) in (classmethod, staticmethod, property))
    }


def current_folder() -> str:
    """Return the current directory; '' if it was deleted."""
    try:
        return os.getcwd()
    except OSError:
        return ""


def umask() -> int | None:
    """Return this process's umask without changing it; None where the system does not say it."""
    try:
        file = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)
        try:
            found = re.search(rb"^Umask:\s*([0-7]+)", os.read(file, 200), re.MULTILINE)  # it is the second line
        finally:
            os.close(file)
    except OSError:
        return None
    return int(found[1], 8) if found else None


def import_clients() -> None:
    """Import what the packages of clients that are imported leave for the first call.

    So their functions are known before a rollout can replace them, and no two rollouts import them at once.
    """
    for name in CLIENTS:
        if name.partition(".")[0] in sys.modules:
            with suppress(ImportError):  # an older release
                importlib.import_module(name)


def _is_imported(name: str) -> bool:
    """Whether a module has been imported to its end: another thread may be about to."""
    module = sys.modules.get(name)
    return module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False)


def _owners(names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    for name in names:
        if (module := sys.modules.get(name)) is None:
            continue
        has = vars(module)
        classes = CLIENTS.get(name, ())
        if not classes or "." not in name:
            yield name, module
        if name in WITH_METHODS:
            classes = [key for key, value in has.items() if getattr(value, "__module__", "") == name]
        yield from ((f"{name}.{key}", has[key]) for key in classes if isinstance(has.get(key), type))


def _instruments(now: Any, was: Any) -> bool:
    """Whether an installed library has wrapped a function, or taken a wrapper off it, as those do that record calls."""
    known = {id(layer) for layer in _layers(was)}
    for layer in _layers(now):
        if id(layer) in known:
            return True
        if not any(folder in _file_of(layer) for folder in INSTALLED):
            return False
    return False


def _is_foreign(function: Any) -> bool:
    """Whether a function of a client's class, or one in it, is no installed package's."""
    return any(file and not any(folder in file for folder in INSTALLED) for file in map(_file_of, _layers(function)))


def _layers(function: Any) -> Iterator[Any]:
    """Yield a function, and those that are wrapped in it, as `functools.wraps` and wrapt say it."""
    for _ in range(LAYERS):
        if function is None:
            return
        yield function
        function = getattr(function, "__wrapped__", None)


def _file_of(function: Any) -> str:
    """Return the file of a function's code, or of an object's that is called; '' for what is not written in Python."""
    called = getattr(function, "_self_wrapper", function)  # wrapt's: the function that it wraps has another file
    for each in (called, getattr(type(called), "__call__", None)):  # noqa: B004
        if type(code := getattr(each, "__code__", None)) is CodeType:
            return code.co_filename
    return ""


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
