"""The chat model behind an OpenAI-compatible endpoint, reached through langchain-openai."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import attrs
from langchain_openai import ChatOpenAI
from openai import DefaultHttpxClient  # noqa: TID253  (only imported when the agent is built)

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
        chat = _chat(os.getpid(), self.base_url, self.model, self.api_key, self.timeout_s, self.max_retries)
        options: dict[str, Any] = {"extra_body": dict(self.sampling)}
        if self.headers:
            options["extra_headers"] = dict(self.headers)
        try:
            reply = chat.invoke(list(messages), **options)
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            # langchain-openai raises these for a body without choices or messages, or one that is not JSON.
            raise LLMError(
                f"the response of {self.base_url} is not a chat completion ({type(error).__name__}: {error});"
                " check that the address ends in /v1 and belongs to an OpenAI-compatible server"
            ) from error
        return reply.content if isinstance(reply.content, str) else str(reply.text)


class _Chat(ChatOpenAI):
    """`ChatOpenAI` that sends the messages and sampling fields as they are.

    All of them travel in `extra_body`, which the openai package merges into the request's body.
    This keeps the name `max_tokens` (`ChatOpenAI` renames it to one that not all servers know), passes
    fields that the package does not know, and avoids a loop over every message that
    takes a third of a call's CPU time.
    """

    def _get_request_payload(self, input_: Any, *, stop: list[str] | None = None, **kwargs: Any) -> dict[str, Any]:
        payload: dict[str, Any] = super()._get_request_payload(input_, stop=stop, **kwargs)
        body = {**payload.pop("extra_body", {}), "messages": payload["messages"]}
        return {**payload, "messages": [], "extra_body": body}


class _Client(DefaultHttpxClient):
    """An `httpx.Client` that closes its connections when it is no longer referenced."""

    def __del__(self) -> None:
        if not self.is_closed:
            self.close()


# langchain-openai's own socket options, where it knows them, come with a warning on every host that has a proxy. They
# concern clients that it makes itself, so not ours.
_SOCKETS: dict[str, Any] = {"http_socket_options": ()} if "http_socket_options" in ChatOpenAI.model_fields else {}


# One client a server is shared by all threads (httpx's may be), so that rollouts reuse its connections. The process is
# part of the key: a forked runner must neither use its parent's connections, as langchain-openai's own cache would
# have it do, nor close them.
@lru_cache(maxsize=64)
def _chat(_process: int, base_url: str, model: str, api_key: str, timeout_s: float, max_retries: int) -> ChatOpenAI:
    return _Chat(
        base_url=base_url,
        model=model,
        api_key=api_key,  # type: ignore[arg-type]  # a plain str is made a SecretStr
        timeout=timeout_s,
        max_retries=max_retries,
        http_client=_Client(),
        **_SOCKETS,
        use_responses_api=False,
        disable_streaming=True,
        cache=False,
    )
