"""Agents: code that turns a task's input and an LLM endpoint into an outcome."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import attrs

from agentrig._moved import former
from agentrig.endpoints import Endpoint


@attrs.frozen(kw_only=True)
class Outcome:
    """What an agent answered, or how it failed.

    Attributes:
        answer: The agent's return value (JSON values only); None when it failed.
        failure: None, or the failure's kind: `agent-error` (the agent raised), `llm-error` (a call
            to the model failed), `deadline` (the rollout exceeded its time limit), `runner-died` (the
            process died), or the agent's own kind (`AgentFailure(kind=…)`).
        message: Describes the failure.
    """

    answer: Any = None
    failure: str | None = None
    message: str = ""


Agent = Callable[[Mapping[str, Any], Endpoint], Any] | Callable[[Mapping[str, Any], Endpoint], Awaitable[Any]]
"""What `AgentSpec.build` returns: called as `agent(task_input, endpoint)`, returns the answer.

Plain or `async` function, or an object with `__call__`. Exceptions become typed failures: those of
the `openai` package and of `httpx` count as `llm-error`, all others as `agent-error`.
"""

__getattr__ = former(__name__)
