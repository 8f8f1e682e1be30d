"""The chat model behind an OpenAI-compatible endpoint, reached through the openai package.

Bodies go out and come back as plain JSON. LangChain's `ChatOpenAI`, and the package's typed requests and responses,
would add as much CPU time as the rest of a call takes, tracing included.
"""

from __future__ import annotations

import os
import ssl
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import attrs
import httpx
from openai import DefaultHttpxClient, OpenAI  # noqa: TID253  (only imported when the agent is built)

from agentrig_langgraph_sql.prompts import Message


class LLMError(Exception):
    """The endpoint's response is not a chat completion."""


@attrs.frozen(kw_only=True)
class LLM:
    """Where the model is and how to sample from it.

    Attributes:
        base_url: Ends in `/v1`.
        model: The model name to send.
        api_key: Sent as the bearer token.
        sampling: Fields of the request, sent as they are: `temperature`, `top_p`, `max_tokens`,
            `stop`, `seed`, and any other that the endpoint knows.
        headers: Extra HTTP headers of every call.
        timeout_s: Each attempt of a call fails after this many seconds.
        max_retries: Most further attempts of a call that failed to connect, or got status 408, 409, 429 or 5xx.
    """

    base_url: str
    model: str
    api_key: str = attrs.field(default="none", repr=False)
    sampling: Mapping[str, Any] = attrs.field(factory=dict)
    headers: Mapping[str, str] = attrs.field(factory=dict)
    timeout_s: float = 600.0
    max_retries: int = 2

    def ask(self, messages: Sequence[Message]) -> str:
        """Return the model's reply; it may be empty.

        Raises:
            openai.OpenAIError: The endpoint can't be reached or refused the call.
            LLMError: Its response is not a chat completion.
        """
        client = _here.client(self.base_url, self.api_key, self.timeout_s, self.max_retries)
        body = {"model": self.model, **self.sampling, "messages": list(messages)}
        response = client.post(
            "/chat/completions", cast_to=httpx.Response, body=body, options={"headers": dict(self.headers)}
        )
        try:
            return _content(response.json())
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise LLMError(
                f"the response of {self.base_url} is not a chat completion ({type(error).__name__}: {error});"
                " check that the address ends in /v1 and belongs to an OpenAI-compatible server"
            ) from error


def _content(completion: Mapping[str, Any]) -> str:
    """Return the text of a completion's first choice; a list of parts is joined, and null is empty."""
    if completion.get("error"):
        raise ValueError(completion["error"])
    content = completion["choices"][0]["message"].get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if part["type"] == "text")


class _Client(DefaultHttpxClient):
    """An `httpx.Client` that closes its connections when it is no longer referenced."""

    def __del__(self) -> None:
        if not self.is_closed:
            self.close()


class _Thread(threading.local):
    """The clients of one thread, for all of its rollouts, whose addresses and keys may differ.

    httpx's connections may be shared by threads, but each call then goes through all of them under one lock: with 40
    threads a call waited as long for that lock as for the model.
    """

    def __init__(self) -> None:
        self.process = 0

    def client(self, base_url: str, api_key: str, timeout_s: float, max_retries: int) -> OpenAI:
        """Return the client for an address."""
        if self.process != os.getpid():  # a forked runner must neither use its parent's connections nor close them
            self.process, self._connections = os.getpid(), _Client(verify=_certificates())
            self._made = lru_cache(maxsize=8)(self._make)
        return self._made(base_url, api_key, timeout_s, max_retries)

    def _make(self, base_url: str, api_key: str, timeout_s: float, max_retries: int) -> OpenAI:
        return OpenAI(
            base_url=base_url,
            api_key=api_key,
            timeout=timeout_s,
            max_retries=max_retries,
            http_client=self._connections,
        )


_here = _Thread()


@lru_cache(maxsize=1)
def _certificates() -> ssl.SSLContext:
    """Return httpx's usual checks of certificates: to read them takes 20 ms of CPU."""
    return httpx.create_ssl_context()
