"""Watches an algorithm in a run: which of its keys it reads, and the ends of its steps."""

from __future__ import annotations

from typing import Any

import attrs


def watched(config: Any, read: set[str]) -> Any:
    """Return a config object with the same values that adds the name of each key that is read to `read`."""
    cls: Any = type(config)
    names = [f.name for f in attrs.fields(cls)]

    def get(self: Any, name: str) -> Any:
        if name in names:
            read.add(name)
        return cls.__getattribute__(self, name)

    def plain(self: Any) -> Any:
        return _rebuilt, (cls, {name: cls.__getattribute__(self, name) for name in names})

    made: Any = object.__new__(type(cls.__name__, (cls,), {"__getattribute__": get, "__reduce__": plain}))
    for name in names:
        object.__setattr__(made, name, getattr(config, name))
    return made


def _rebuilt(cls: type, values: dict[str, Any]) -> Any:
    """Return a config object with these values, for a process that gets a watched one."""
    made: Any = object.__new__(cls)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made


class WatchedSession:
    """A run's session that asks the algorithm to stop at the end of a step.

    Args:
        session: The run's own.
        stop_after: The step; 0 for never.
    """

    def __init__(self, session: Any, stop_after: int) -> None:
        self.__dict__.update(_session=session, _stop_after=stop_after)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._session, name, value)

    def end_step(self, step: int, **more: Any) -> None:
        """Close the step, and ask to stop, as Ctrl-C does."""
        self._session.end_step(step, **more)
        if step == self._stop_after:
            self._session.stopping = True


class WatchedAlgorithm:
    """An algorithm whose session is watched.

    Args:
        algorithm: The one under test.
        stop_after: See `WatchedSession`.
    """

    def __init__(self, algorithm: Any, stop_after: int) -> None:
        self._algorithm, self._stop_after = algorithm, stop_after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._algorithm, name)

    def run(self, session: Any) -> None:
        """Train."""
        self._algorithm.run(WatchedSession(session, self._stop_after))
