"""What the rollouts of a runner share in its interpreter: notices which functions of it an agent has replaced."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import is_
from typing import Any

import attrs

MODULES = (
    *("asyncio", "base64", "builtins", "copy", "datetime", "functools", "hashlib", "http.client", "io"),
    *("itertools", "json", "json.decoder", "json.encoder", "math", "os", "pathlib", "posixpath", "queue"),
    *("random", "re", "shutil", "socket", "subprocess", "tempfile", "threading", "time"),
    *("urllib.parse", "urllib.request", "uuid"),
)
"""Modules of the standard library whose functions and classes are compared."""

WITH_METHODS = ("json.decoder", "json.encoder", "http.client", "queue", "random", "threading")
"""Those whose classes are compared too."""

CLIENTS: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("httpx", "httpx2"), ("Client", "AsyncClient", "HTTPTransport", "AsyncHTTPTransport", "Response")),
    **dict.fromkeys(("openai", "anthropic"), ("OpenAI", "AsyncOpenAI", "Anthropic", "AsyncAnthropic")),
    "requests": ("Session", "Response"),
}
"""Packages of clients, and their classes that are compared, if they are imported when the agent is built."""

CURE = (
    "the rollouts of a runner share it, so their answers can't be trusted. Leave it as it is, or replace it while the "
    "agent is built; or give each rollout a process of its own: runners.threads=1, or a program (agent command)"
)
"""What to do about it."""


SHOWN = 5
"""So many replaced functions are named."""


class InterpreterChanged(Exception):
    """Rollouts that were under way together can't be trusted; `replaced` are the names of what one of them replaced."""

    def __init__(self, replaced: Sequence[str]) -> None:
        super().__init__(listed(replaced))
        self.replaced = replaced


def listed(names: Sequence[str]) -> str:
    """Return the first names as text, and how many more there are."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more}"


@attrs.frozen(kw_only=True)
class _Part:
    """A module or a class: its attributes, and what they were."""

    name: str
    owner: Any
    names: tuple[str, ...]
    values: tuple[Any, ...]

    @classmethod
    def of(cls, name: str, owner: Any) -> _Part:
        inside = isinstance(owner, type)
        kept = {
            key: value
            for key, value in dict(vars(owner)).items()
            if (not key.startswith("_") or (inside and key in ("__init__", "__call__")))
            # `isinstance` would make some objects of a client's module import a part of it
            and (callable(value) or type(value) in (classmethod, staticmethod, property))
        }
        if owner is os:
            kept["environ"] = os.environ
        return cls(name=name, owner=owner, names=tuple(kept), values=tuple(kept.values()))

    def changed(self) -> list[tuple[str, Any]]:
        """Return the attributes that are others now, with what they were."""
        get = vars(self.owner).get
        if all(map(is_, map(get, self.names), self.values)):
            return []
        return [(name, was) for name, was in zip(self.names, self.values, strict=True) if get(name) is not was]


@attrs.define(eq=False)
class Turn:
    """A rollout under way; `beside` is whether another one was under way with it."""

    beside: bool = False


class SharedInterpreter:
    """Compares, after each rollout, what a runner's rollouts share with what it was when the agent had been built.

    Args:
        several: Whether several rollouts may be under way at once.
    """

    def __init__(self, *, several: bool) -> None:
        self.several = several
        self._lock = threading.Lock()
        self._turns: set[Turn] = set()
        self._parts = [_Part.of(name, owner) for name, owner in _owners()]

    def begin(self) -> Turn:
        """Begin a rollout."""
        with self._lock:
            turn = Turn(bool(self._turns))
            for other in self._turns:
                other.beside = True
            self._turns.add(turn)
        return turn

    def end(self, turn: Turn) -> list[str]:
        """End a rollout; put back what was replaced since the last one ended, and return its names: `json.loads`."""
        with self._lock:
            self._turns.discard(turn)
            found = []
            for i, part in enumerate(self._parts):
                for name, was in part.changed():
                    now = vars(part.owner).get(name)
                    if _instruments(now, was):
                        self._parts[i] = _Part.of(part.name, part.owner)
                        continue
                    found.append(f"{part.name}.{name}".removeprefix("builtins."))
                    setattr(part.owner, name, was)
            return found


def _owners() -> Iterator[tuple[str, Any]]:
    for name in MODULES:
        if (module := sys.modules.get(name)) is not None:
            yield name, module
            if name in WITH_METHODS:
                own = {key: value for key, value in vars(module).items() if getattr(value, "__module__", "") == name}
                yield from ((f"{name}.{key}", value) for key, value in own.items() if isinstance(value, type))
    for name, classes in CLIENTS.items():
        if (module := sys.modules.get(name)) is not None:
            yield name, module
            found = ((each, vars(module).get(each)) for each in classes)
            yield from ((f"{name}.{each}", made) for each, made in found if isinstance(made, type))


def _instruments(now: Any, was: Any) -> bool:
    """Whether an installed library has wrapped a function, and says so, as those do that record calls."""
    wrapper: Callable[..., Any] | None = now
    code = getattr(getattr(now, "_self_wrapper", now), "__code__", None)
    if code is None or f"{os.sep}site-packages{os.sep}" not in code.co_filename:
        return False
    while (wrapper := getattr(wrapper, "__wrapped__", None)) is not None:
        if wrapper is was:
            return True
    return False
