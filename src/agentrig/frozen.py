"""Deep read-only copies: observers get these, so that they cannot change a run.

They are still `dict`s, `list`s and attrs objects, so `json.dumps` and experiment trackers read them as usual.
`copy.deepcopy` gives a copy that you can change.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any, NoReturn

import attrs

from agentrig.rollouts import Rollout

PLAIN: frozenset[type] = frozenset((str, int, float, bool, type(None), bytes))
"""Immutable types without content; checked first, because most values have one of them."""


def frozen(value: Any) -> Any:
    """Return a read-only copy of a value that does not change with the original.

    Mappings become `FrozenDict`, lists `FrozenList`; attrs objects keep their class. The parts of a rollout are
    copied on access, so that an observer pays only for what it reads. Anything else is deep-copied, or replaced by
    its `repr()` if it cannot be copied.
    """
    kind = type(value)
    if kind in PLAIN or kind is FrozenDict or kind is FrozenList:
        return value
    if isinstance(value, Mapping):
        return FrozenDict({key: item if type(item) in PLAIN else frozen(item) for key, item in value.items()})
    if isinstance(value, list):
        return FrozenList(_items(value))
    if kind is tuple:
        return tuple(_items(value))
    if isinstance(value, set | frozenset):
        return frozenset(frozen(item) for item in value)
    if isinstance(value, Enum | PurePath | type):
        return value
    if isinstance(value, BaseException):
        return _error(value)
    if isinstance(value, Rollout):
        return value if kind is FrozenRollout else FrozenRollout.of(value)
    if attrs.has(kind):
        return _attrs(value)
    return _other(value)


def _items(values: Any) -> Any:
    """Return a sequence's items, frozen; long lists of token ids are not copied item by item."""
    return values if set(map(type, values)) <= PLAIN else [frozen(item) for item in values]


def _attrs(value: Any) -> Any:
    """Return an attrs object with frozen fields; fields with `init=False` are computed again."""
    changes = {}
    for field in attrs.fields(type(value)):
        if field.init:
            changes[field.alias] = frozen(getattr(value, field.name))
    return type(value)(**changes)


def _error(error: BaseException) -> BaseException:
    """Return an exception of the same class, message and traceback."""
    try:
        copied = copy.copy(error)
    except Exception:  # its class cannot be constructed from its arguments
        copied = Exception(f"{type(error).__name__}: {error}")
    copied.__cause__, copied.__context__ = error.__cause__, error.__context__
    copied.__suppress_context__ = error.__suppress_context__
    return copied.with_traceback(error.__traceback__)


def _other(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:  # a lock, a socket, a tensor with a graph
        return repr(value)


def _refused(self: Any, *args: Any, **more: Any) -> NoReturn:
    raise TypeError("observers get read-only copies; copy.deepcopy gives one that you may change")


class FrozenDict(dict[Any, Any]):
    """A dict that cannot be changed."""

    __setitem__ = __delitem__ = __ior__ = _refused
    clear = pop = popitem = setdefault = update = _refused

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Let `copy` and `pickle` make a plain dict."""
        return dict, (dict(self),)


class FrozenList(list[Any]):
    """A list that cannot be changed."""

    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refused
    append = extend = insert = remove = pop = clear = sort = reverse = _refused

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Let `copy` and `pickle` make a plain list."""
        return list, (list(self),)


class FrozenRollout(Rollout):
    """A rollout whose parts are copied on access."""

    _rollout: Rollout
    _copied: dict[str, Any]

    @classmethod
    def of(cls, rollout: Rollout) -> FrozenRollout:
        """Return the frozen copy of a rollout."""
        made = cls.__new__(cls)
        object.__setattr__(made, "_rollout", rollout)
        object.__setattr__(made, "_copied", {})
        return made

    @property
    def failure(self) -> str | None:
        """See `Rollout.failure`."""
        return self._rollout.failure

    @property
    def value(self) -> float | None:
        """See `Rollout.value`."""
        return self._rollout.value

    @property
    def correct(self) -> bool | None:
        """See `Rollout.correct`."""
        return self._rollout.correct

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Let `copy` and `pickle` make a plain rollout."""
        fields = {field.name: getattr(self._rollout, field.name) for field in attrs.fields(Rollout)}
        return _rollout_of, (fields,)


def _rollout_of(fields: dict[str, Any]) -> Rollout:
    return Rollout(**fields)


def _part(name: str) -> property:
    """Return the property of a rollout's field."""

    def get(self: FrozenRollout) -> Any:
        if name not in self._copied:
            self._copied[name] = frozen(getattr(self._rollout, name))
        return self._copied[name]

    return property(get)


for _field in attrs.fields(Rollout):
    setattr(FrozenRollout, _field.name, _part(_field.name))
