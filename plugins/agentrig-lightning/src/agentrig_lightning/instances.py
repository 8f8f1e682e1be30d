"""Instances of a `LitAgent`: from what they are made, and one for each rollout that runs at the same time."""

from __future__ import annotations

import copy
import inspect
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs

from agentrig.errors import AgentrigError
from agentrig.text import words_of

log = logging.getLogger(__name__)

Factory = Callable[[], Any]

FORMS = "a LitAgent class, an instance, a function for agl.rollout, or a function without parameters that makes one"


def is_instance(source: Any) -> bool:
    """Return whether something is a `LitAgent`; imports nothing."""
    return not isinstance(source, type) and hasattr(type(source), "training_rollout")


def check_form(source: Any) -> None:
    """Raise `TypeError` if no agents can be made from something, without making one."""
    if not is_instance(source) and not callable(source):
        raise TypeError(f"lightning.agent takes {FORMS}; this is {source!r:.100}")


def factory(source: Any) -> tuple[Factory, bool]:
    """Return what makes agents, and whether it makes a new one with every call.

    An instance is copied, so that every copy starts from its state: Agent Lightning's runners get such copies when
    they are forked. If it can't be copied, it is used itself.
    """
    if isinstance(source, type):
        return source, True
    if not is_instance(source):
        if not parameters_of(source, required=True):
            made: Factory = source
            return made, True
        from agentlightning import rollout

        source = rollout(source)
    return copies(source, f"the agent {type(source).__name__}", "its class, or a function that makes a new one")


def copies(source: Any, what: str, instead: str) -> tuple[Factory, bool]:
    """Return what makes copies of an object as it is now, and True; if it can't be copied, what returns it, and False.

    The warning calls it `what`, and says to give `instead` to `lightning.agent`.
    """
    try:
        kept = copy.deepcopy(source)
    except Exception as error:  # whatever its parts raise
        log.warning(
            "%s can't be copied (%s), so rollouts run one at a time in each runner process: give lightning.agent %s",
            what,
            words_of(error),
            instead,
        )
        return lambda: source, False
    return lambda: copy.deepcopy(kept), True


def parameters_of(source: Any, *, required: bool = False) -> list[str]:
    """Return the names of a callable's parameters, or of those without a default; none if it has no signature."""
    try:
        parameters = inspect.signature(source).parameters.values()
    except (TypeError, ValueError):  # for example a built-in one
        return []
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if not required or (p.default is p.empty and p.kind not in several)]


@attrs.define(eq=False)
class AgentSlot:
    """What one runner of Agent Lightning has: an agent, its hooks, and the object that the agent sees as its runner."""

    agent: Any
    hooks: Sequence[Any]
    host: Any


class AgentSlots:
    """Gives every rollout an agent that no other rollout uses at the same time.

    A thread keeps its own, so that objects of the agent that belong to a thread work. The rollouts of an `async` agent
    share one thread; each takes one that is free.
    """

    def __init__(self, make: Callable[[], AgentSlot]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self.first = make()
        self._free: list[AgentSlot] = [self.first]
        self._threads: dict[int, AgentSlot] = {}

    def of_thread(self) -> AgentSlot:
        """Return this thread's slot."""
        me = threading.get_ident()
        with self._lock:
            if me not in self._threads:
                self._threads[me] = self._taken()
            return self._threads[me]

    @contextmanager
    def borrowed(self) -> Iterator[AgentSlot]:
        """Yield a slot that is free."""
        with self._lock:
            slot = self._taken()
        try:
            yield slot
        finally:
            with self._lock:
                self._free.append(slot)

    def _taken(self) -> AgentSlot:
        if self._free:
            return self._free.pop()
        slot = self._make()  # under the lock: imports and clients of two agents are not made at once
        if slot.agent is self.first.agent:
            raise AgentrigError(
                "the function given to lightning.agent returned the same agent twice, and two rollouts must not share "
                "one: let it make a new agent, or give lightning.agent the agent itself, which it copies"
            )
        return slot
