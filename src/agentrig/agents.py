"""Agents: code that turns a task's input and an LLM endpoint into an outcome."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import attrs


@attrs.frozen(kw_only=True)
class Endpoint:
    """An OpenAI-compatible server and how to sample from it.

    Attributes:
        base_url: Ends in `/v1`.
        model: The model name to send.
        api_key: Sent as the bearer token; never logged.
        sampling: Request fields as the OpenAI API names them: `temperature`, `top_p`,
            `max_tokens`, `stop`, `seed`. An agent passes all of them on with every call.
        headers: Extra HTTP headers to send with every call.
        token_ids: Whether the server takes the request field `return_token_ids`, as vLLM and
            agentrig's own server do. The tracer then asks for ids and log-probabilities with every
            call; without them nothing can be trained.
    """

    base_url: str
    model: str
    api_key: str = attrs.field(default="none", repr=False)
    sampling: Mapping[str, Any] = attrs.field(factory=dict)
    headers: Mapping[str, str] = attrs.field(factory=dict)
    token_ids: bool = False

    def with_sampling(self, **fields: Any) -> Endpoint:
        """Return the same endpoint with these sampling fields set over its own."""
        return attrs.evolve(self, sampling={**self.sampling, **fields})


def without_proxy(url: str) -> None:
    """Let this process's HTTP clients reach a server at a private address without the host's proxy.

    Where `HTTP_PROXY` is set, calls to a model server of the run's own would else go to a proxy that cannot reach it.
    Names other than localhost and public addresses are left to the user's `NO_PROXY`. Without a proxy it does nothing.
    """
    if not getproxies().keys() & {"http", "https", "all"}:
        return
    host = urlsplit(url).hostname or ""
    try:
        private = host == "localhost" or ipaddress.ip_address(host).is_private
    except ValueError:
        private = False
    listed = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    known = [name.strip() for name in listed.split(",") if name.strip()]
    if private and host not in known and "*" not in known:
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join([*known, host])


@attrs.frozen(kw_only=True)
class Outcome:
    """What an agent answered, or how it failed.

    Attributes:
        answer: The agent's return value (JSON values only); None when it failed.
        failure: None, or the failure's kind: `agent-error` (the agent raised), `llm-error` (a call
            to the model failed), `deadline` (the rollout ran past its time), `runner-died` (the
            process was lost), or a kind of the agent's own (`AgentFailure(kind=…)`).
        message: The failure in words.
    """

    answer: Any = None
    failure: str | None = None
    message: str = ""


Agent = Callable[[Mapping[str, Any], Endpoint], Any] | Callable[[Mapping[str, Any], Endpoint], Awaitable[Any]]
"""What `AgentSpec.build` returns: called as `agent(task_input, endpoint)`, returns the answer.

Plain or `async` function, or an object with `__call__`. Exceptions become typed failures: those of
the `openai` package and of `httpx` count as `llm-error`, all others as `agent-error`.
"""
