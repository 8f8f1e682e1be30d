"""Agents: code that turns a task's input and an LLM endpoint into an outcome."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import attrs

from agentrig.endpoints import Endpoint


@attrs.frozen(kw_only=True)
class Outcome:
    """What an agent answered, or how it failed.

    Attributes:
        answer: The agent's return value (JSON values only); None when it failed.
        failure: None, or the failure's kind: `agent-error` (the agent raised), `llm-error` (a call
            to the model failed), `deadline` (the rollout exceeded its time limit), `runner-died` (the
            process died), `infrastructure` (agentrig or the machine failed), or the agent's own kind
            (`AgentFailure(kind=…)`).
        message: Describes the failure.
        own_reward: The reward that the agent itself computed, beside its answer; None if it computes none, or if its
            answer is that number. The reward `own` uses it. If there is no answer, no other reward can judge it.
    """

    answer: Any = None
    failure: str | None = None
    message: str = ""
    own_reward: float | None = None


@attrs.frozen(kw_only=True)
class Judged:
    """What an agent returns that computes its own reward: `Outcome` has both.

    Attributes:
        answer: What other rewards judge, a JSON value; None if there is nothing to judge.
        reward: Its own reward; None if it has computed none.
    """

    answer: Any = None
    reward: float | None = None


Agent = Callable[[Mapping[str, Any], Endpoint], Any] | Callable[[Mapping[str, Any], Endpoint], Awaitable[Any]]
"""What `AgentSpec.build` returns: called as `agent(task_input, endpoint)`, returns the answer.

Plain or `async` function, or an object with `__call__`. Exceptions become typed failures: those of
the `openai` package and of `httpx` count as `llm-error`, all others as `agent-error`.
"""
