"""Algorithms of Agent Lightning from what a user has: a class, an instance, or a function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentrig.errors import AgentrigError

PARTS = ("store", "adapter", "llm_proxy", "initial_resources", "train_dataset", "val_dataset")
"""The parameters that a function for `agl.algo` may have."""

FORMS = "an Algorithm class, an instance, a function for agl.algo, or a function without parameters that makes one"


def check_form(source: Any) -> None:
    """Check that an algorithm can be made from something, without making one.

    Raises:
        TypeError: It can't; the message lists what can be given, and names parameters that no algorithm gets.
    """
    if is_algorithm(source) or isinstance(source, type):
        return
    if not callable(source):
        raise TypeError(f"lightning.algorithm takes {FORMS}; this is {source!r:.100}")
    odd = [name for name in _required(source) if name not in PARTS]
    if odd:
        raise TypeError(
            f"lightning.algorithm: the function {getattr(source, '__name__', source)} has the parameter "
            f"{', '.join(odd)}, which no algorithm gets; it can have {', '.join(PARTS)}"
        )


def is_algorithm(source: Any) -> bool:
    """Return whether something is an `Algorithm`; imports nothing."""
    return not isinstance(source, type) and hasattr(type(source), "set_initial_resources")


def is_fast(algorithm: Any) -> bool:
    """Return whether an algorithm is a `FastAlgorithm`, as `Baseline` is: it looks at triplets and learns nothing."""
    from agentlightning.algorithm import FastAlgorithm

    return isinstance(algorithm, FastAlgorithm)


def algorithm_of(source: Any) -> Any:
    """Return the `Algorithm`: an instance is used itself.

    Raises:
        AgentrigError: The function made something else.
    """
    if is_algorithm(source):
        return source
    if not isinstance(source, type) and any(name in PARTS for name in _parameters(source)):
        from agentlightning import algo

        return algo(source)
    made = source()
    if not is_algorithm(made):
        raise AgentrigError(f"lightning.algorithm takes {FORMS}; this one made {made!r:.100}, which is no Algorithm")
    return made


def datasets_for(run: Callable[..., Any], train: Sequence[Any], validation: Sequence[Any]) -> Mapping[str, Any]:
    """Return the datasets that an algorithm's `run` takes, by its parameters' names."""
    parameters = inspect.signature(_function(run)).parameters
    every = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    given = {"train_dataset": train, "val_dataset": validation}
    return {name: rows for name, rows in given.items() if every or name in parameters}


def _function(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function whose parameters count: that of `agl.algo`, which refuses a dataset that it does not take."""
    inner: Callable[..., Any] = getattr(getattr(run, "__self__", None), "_algorithm_func", run)
    return inner


def _parameters(source: Any) -> list[str]:
    try:
        return list(inspect.signature(source).parameters)
    except (TypeError, ValueError):  # a callable without a signature, for example a built-in one
        return []


def _required(source: Any) -> list[str]:
    """Return the parameters without a default, by name."""
    try:
        parameters = inspect.signature(source).parameters.values()
    except (TypeError, ValueError):
        return []
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in several]
