"""Builds components, and turns a plugin's exception or wrong return value into a clear error message."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from agentrig.errors import AgentrigError, PluginError, place_of, short_path
from agentrig.plugins.registry import noun_of
from agentrig.processes.put_back import put_back
from agentrig.text import words_of

if TYPE_CHECKING:
    from agentrig.plugins.registry import Component


def _has(*names: str) -> Callable[[Any], bool]:
    return lambda made: all(callable(getattr(made, name, None)) for name in names)


def hooks_of(made: Any) -> list[str]:
    """Return the names of an object's methods that begin with `on_`: of an observer, the hooks that it has."""
    if made is None or isinstance(made, type):
        return []
    return [name for name in dir(made) if name.startswith("on_") and callable(getattr(made, name))]


MADE: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "tasks": ("a task set, with `splits`, `roles` and a method `load(split)`", _has("load")),
    "agent": ("a callable: agent(task_input, endpoint) -> answer", callable),
    "reward": (
        "a callable: reward(task, outcome, budget_s) -> Score",
        lambda made: callable(made) or _has("score_many")(made),
    ),
    "adapter": ("a callable: adapter(trace) -> triplets", callable),
    "algorithm": (
        "an algorithm, with a method `run(session)`, or `serving` and `learner`",
        lambda made: _has("run")(made) or _has("serving", "learner")(made),
    ),
    "credit": ("a callable: credit(groups) -> a list of worths for each group", callable),
    "server": ("a callable: server(plan) -> agentrig.servers.Server", callable),
    "runners": ("a callable: make(plan, n=…, threads=…, …) -> agentrig.pools.RunnerPool", callable),
    "hardware": ("an agentrig.hardware.Hardware", _has("probe", "environment")),
    "observer": ("an object with a method such as `on_step_end(event)`", lambda made: bool(hooks_of(made))),
}
"""What `build` must return for each kind: a description and a check."""


def built(component: Component, config: Any, **more: Any) -> Any:
    """Build a component; `more` are further arguments of its `build`.

    Raises:
        PluginError: `build` raised, or returned the wrong thing; the message names plugin, file and line.
    """
    spec: Any = component.spec
    who = f"the {noun_of(component.kind)} {spec.name}"
    plugin = f"\n  it comes from plugin {component.plugin} ({component.source})"
    try:
        with put_back(who):
            made = spec.build(config, **more)
    except AgentrigError:
        raise
    except (Exception, SystemExit) as error:
        where = place_of(error, installed=True) or defined_at(spec.build)
        where += "" if more or _takes(spec.build, config) else "; write build(config)"
        raise PluginError(f"{who} cannot be built: {words_of(error)}{where}{plugin}") from error
    wanted, right = MADE[component.kind]
    if not right(made):
        got = "None" if made is None else f"{made!r:.80} ({type(made).__name__})"
        hint = " Is a `return` missing?" if made is None else ""
        where = defined_at(spec.build)
        raise PluginError(
            f"{who} cannot be built: `build`{where} returned {got}; it must return {wanted}.{hint}{plugin}"
        )
    return made


def _takes(build: Callable[..., Any], config: Any) -> bool:
    """Whether `build` can be called with the config; True too if its signature is not known."""
    try:
        inspect.signature(build).bind(config)
    except ValueError:
        return True
    except TypeError:
        return False
    return True


def defined_at(function: Any) -> str:
    """Return ` (FILE:LINE)`, where a function or class is defined; '' if it is not defined in Python."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function) if callable(function) else function
    code = getattr(function, "__code__", None)
    if code is not None:
        return f" ({short_path(code.co_filename)}:{code.co_firstlineno})"
    try:
        file, (_, line) = inspect.getsourcefile(function), inspect.getsourcelines(function)
    except (TypeError, OSError):
        return ""
    return f" ({short_path(file)}:{line})" if file else ""
