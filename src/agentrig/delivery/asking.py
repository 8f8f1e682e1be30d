"""Requests to a server: it scores given tokens, and samples some after them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import attrs

from agentrig.endpoints import Endpoint, without_proxy
from agentrig.traces import weights_version

if TYPE_CHECKING:
    import httpx

UNKNOWN = frozenset({400, 404, 405, 422, 501})
"""HTTP statuses of a server that does not support the request or one of its fields."""

TIMEOUT_S = 300.0


class CannotScore(Exception):
    """The server cannot score given tokens, or its answer lacks a field."""


class CannotAnswer(Exception):
    """The server did not answer."""


@attrs.frozen(kw_only=True)
class Answer:
    """A server's answer.

    Attributes:
        version: The version of its weights; None if it does not report it.
        logprobs: The log-probabilities of all given tokens except the first, at temperature 1; empty if only sampled.
        sampled: The log-probabilities that it returned with them.
        digests: Name to digest of the tensors that it uses; empty if it does not report them.
        dtype: The dtype in which it computes; '' if it does not report it.
    """

    version: int | None
    logprobs: tuple[float, ...] = ()
    tokens: tuple[int, ...] = ()
    sampled: tuple[float, ...] = ()
    digests: Mapping[str, str] = attrs.field(factory=dict)
    dtype: str = ""


def ask(endpoint: Endpoint, ids: Sequence[int], *, score: bool = True, n: int = 0, temperature: float = 0.0) -> Answer:
    """Let a server score tokens, or sample after them, or both in one request over a connection of its own.

    Without scores, the keys and values of the given tokens, two or more, may come from the server's prefix cache.
    """
    fields: dict[str, Any] = {"model": endpoint.model, "prompt": list(ids), "max_tokens": n or 1}
    fields |= {"temperature": temperature, **({"prompt_logprobs": 1} if score else {})}
    if n:
        fields |= {"top_p": 1.0, "top_k": -1, "seed": 1, "logprobs": 1, "return_token_ids": True}
    import httpx

    # A load balancer may choose another server for each connection.
    headers = {"Authorization": f"Bearer {endpoint.api_key}", **endpoint.headers, "Connection": "close"}
    url = f"{endpoint.base_url}/completions"
    try:
        reply = _http(endpoint.base_url).post(url, json=fields, headers=headers)
        if reply.status_code in UNKNOWN:
            raise CannotScore(f"POST {url}: {reply.status_code} {reply.text[:200]}")
        reply.raise_for_status()
        body = reply.json()
    except (httpx.HTTPError, ValueError) as error:
        raise CannotAnswer(f"{url} does not answer: {type(error).__name__}: {error}") from error
    lacks, found = "choices", dict[str, tuple[Any, ...]]()
    try:
        (choice,) = body["choices"]
        if score:
            lacks = f"prompt_logprobs of {len(ids)} tokens"
            places = list(zip(choice["prompt_logprobs"], ids, strict=True))[1:]
            found["logprobs"] = tuple(float(place[str(token)]["logprob"]) for place, token in places)
        if n:
            lacks = "token_ids or no token_logprobs"
            found["tokens"] = tuple(map(int, choice["token_ids"]))
            found["sampled"] = tuple(map(float, choice["logprobs"]["token_logprobs"]))
        lacks = "valid weights"
        weights = body.get("weights") or {}
        digests, dtype = dict(weights.get("digests") or {}), str(weights.get("dtype") or "")
    except (AttributeError, KeyError, IndexError, TypeError, ValueError):
        raise CannotScore(f"its answer has no {lacks}") from None
    return Answer(version=weights_version(body), digests=digests, dtype=dtype, **found)


@cache
def _http(base_url: str) -> httpx.Client:
    import httpx

    without_proxy(base_url)
    return httpx.Client(timeout=TIMEOUT_S)
