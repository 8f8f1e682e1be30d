"""The chat model behind an OpenAI-compatible endpoint.

Bodies go out and come back as plain JSON over httpx. The openai package, and still more LangChain's `ChatOpenAI`, would
add a large part to the CPU time of a call, tracing included.
"""

from __future__ import annotations

import os
import ssl
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import attrs
import httpx
from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from agentrig_langgraph_sql.prompts import Message

TEMPORARY = frozenset({408, 409, 429, *range(500, 600)})
"""Status codes after which the same call may succeed."""

LONGEST_PAUSE_S = 60.0
"""Longest pause before another attempt that a server may ask for."""

SHOWN = 1000
"""Most characters of a response that a message has."""


class LLMError(Exception):
    """The endpoint refused the call, or its response is not a chat completion.

    Attributes:
        status: The HTTP status of a refusal, else None.
        pause_s: Seconds after which the server wants the next attempt; None if it says nothing.
    """

    def __init__(self, message: str, *, status: int | None = None, pause_s: float | None = None) -> None:
        super().__init__(message)
        self.status, self.pause_s = status, pause_s


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
            httpx.HTTPError: The endpoint can't be reached, or takes too long.
            LLMError: It refused the call, or its response is not a chat completion.
        """
        client = _here.client()
        headers = httpx.Headers({"Authorization": f"Bearer {self.api_key}"})
        headers.update(self.headers)
        body = {"model": self.model, **self.sampling, "messages": list(messages)}
        url = _completions(self.base_url)
        request = client.build_request("POST", url, json=body, headers=headers, timeout=self.timeout_s)
        response = _attempts(1 + self.max_retries)(_send, client, request)
        try:
            return _content(response.json())
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise LLMError(
                f"the response of {self.base_url} is not a chat completion ({type(error).__name__}: {error});"
                " check that the address ends in /v1 and belongs to an OpenAI-compatible server"
            ) from error


@lru_cache(maxsize=64)
def _completions(base_url: str) -> httpx.URL:
    return httpx.URL(f"{base_url.rstrip('/')}/chat/completions")


def _send(client: httpx.Client, request: httpx.Request) -> httpx.Response:
    """Return the response of one attempt.

    Raises:
        LLMError: It is a refusal.
    """
    response = client.send(request)
    if not response.is_success:
        said = " ".join(response.text.split())[:SHOWN]
        asked = response.headers.get("retry-after", "")
        pause_s = float(asked) if asked.isdecimal() else None
        server = request.url.netloc.decode()  # without a password that the address may have
        message = f"{server} answered with HTTP {response.status_code}{': ' if said else ''}{said}"
        raise LLMError(message, status=response.status_code, pause_s=pause_s)
    return response


def _may_pass(error: BaseException) -> bool:
    """Return whether another attempt may succeed."""
    return isinstance(error, httpx.TransportError) or (isinstance(error, LLMError) and error.status in TEMPORARY)


@lru_cache(maxsize=64)
def _attempts(most: int) -> Retrying:
    """Return what calls a function again after a failure that may pass."""
    return Retrying(retry=retry_if_exception(_may_pass), stop=stop_after_attempt(most), wait=_pause, reraise=True)


_growing = wait_random_exponential(multiplier=1.0, max=8.0)


def _pause(attempt: RetryCallState) -> float:
    """Return the seconds before the next attempt: what the server asks for, or more each time."""
    error = attempt.outcome.exception() if attempt.outcome is not None else None
    asked = error.pause_s if isinstance(error, LLMError) else None
    return asked if asked is not None and asked <= LONGEST_PAUSE_S else _growing(attempt)


def _content(completion: Mapping[str, Any]) -> str:
    """Return the text of a completion's first choice; a list of parts is joined, and null is empty."""
    if completion.get("error"):
        raise ValueError(completion["error"])
    content = completion["choices"][0]["message"].get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if part["type"] == "text")


class _Client(httpx.Client):
    """A client that closes its connections when it is no longer referenced."""

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not ending() and not self.is_closed:  # at the exit httpx no longer has the modules that it needs
            self.close()


class _Thread(threading.local):
    """The client of one thread, for all of its rollouts, whose addresses and keys may differ.

    httpx's connections may be shared by threads, but each call then goes through all of them under one lock: with 40
    threads a call waited as long for that lock as for the model.
    """

    def __init__(self) -> None:
        self.process = 0

    def client(self) -> httpx.Client:
        """Return the client."""
        if self.process != os.getpid():  # a forked runner must neither use its parent's connections nor close them
            self.process, self._client = os.getpid(), _Client(verify=_certificates(), follow_redirects=True)
        return self._client


_here = _Thread()


@lru_cache(maxsize=1)
def _certificates() -> ssl.SSLContext:
    """Return httpx's usual checks of certificates: to read them takes 20 ms of CPU."""
    return httpx.create_ssl_context()
