"""Deep read-only copies: observers get these, so that they cannot change a run.

They are still `dict`s, `list`s and attrs objects, so `json.dumps` and experiment trackers read them as usual.
`copy.deepcopy` gives a copy that you can change.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import attrs

from agentrig.rollouts import Rollout

PLAIN: frozenset[type] = frozenset((str, int, float, bool, type(None), bytes))
"""Immutable types without content; checked first, because most values have one of them."""


def frozen(value: Any) -> Any:
    """Return a read-only copy of a value that does not change with the original.

    Mappings become `FrozenDict`, lists `FrozenList`; attrs objects keep their class. Anything else is deep-copied, or
    replaced by its `repr()` if it cannot be copied.
    """
    kind = type(value)
    if kind in PLAIN or kind in (FrozenDict, FrozenList, FrozenRollout):
        return value
    if isinstance(value, Mapping):
        return FrozenDict({key: item if type(item) in PLAIN else frozen(item) for key, item in value.items()})
    if isinstance(value, list) or kind is tuple:
        items = value if set(map(type, value)) <= PLAIN else map(frozen, value)  # token ids are copied all at once
        return tuple(items) if kind is tuple else FrozenList(items)
    if isinstance(value, Rollout):
        return FrozenRollout.of(value)
    if attrs.has(kind):
        return attrs.evolve(value, **{f.alias: frozen(getattr(value, f.name)) for f in attrs.fields(kind) if f.init})
    try:
        return _error(value) if isinstance(value, BaseException) else copy.deepcopy(value)
    except Exception:  # a lock, a socket, a tensor with a graph
        return Exception(f"{kind.__name__}: {value}") if isinstance(value, BaseException) else repr(value)


def _error(error: BaseException) -> BaseException:
    """Return an exception of the same class, message and traceback; its constructor is not called."""
    copied = type(error).__new__(type(error), *error.args)
    copied.__dict__.update(error.__dict__)
    copied.__cause__, copied.__context__ = error.__cause__, error.__context__
    copied.__suppress_context__ = error.__suppress_context__
    return copied.with_traceback(error.__traceback__)


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
    """A rollout whose parts are copied when somebody reads them: a whole copy takes longer than most observers."""

    _rollout: Rollout

    @classmethod
    def of(cls, rollout: Rollout) -> FrozenRollout:
        """Return the frozen copy of a rollout."""
        made = cls.__new__(cls)
        object.__setattr__(made, "_rollout", rollout)
        return made

    def __getattr__(self, name: str) -> Any:
        """Return a part that nobody has read yet."""
        if name not in attrs.fields_dict(Rollout):
            raise AttributeError(name)
        object.__setattr__(self, name, frozen(getattr(self._rollout, name)))
        return getattr(self, name)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Let `copy` and `pickle` make a plain rollout."""
        return attrs.evolve, (self._rollout,)
