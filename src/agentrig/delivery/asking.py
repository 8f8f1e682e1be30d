"""Asks a server: what are the log-probabilities of these tokens, and what do you sample after them?"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import httpx

from agentrig.endpoints import Endpoint, without_proxy

VERSION = re.compile(r"v(\d+)")
"""How agentrig's own server states the version of its weights, as the field `system_fingerprint`."""

UNKNOWN = frozenset({400, 404, 405, 422, 501})
"""The statuses of a server that does not know the request, or a field of it."""

TIMEOUT_S = 300.0


class CannotScore(Exception):
    """The server has no way to score given tokens."""


class CannotAnswer(Exception):
    """The server did not answer."""


@attrs.frozen(kw_only=True)
class Answer:
    """What a server said of a probe.

    Attributes:
        version: Of its weights; None where it does not say.
        logprobs: Of the probe's tokens but the first, untempered; empty when only sampled.
        tokens: What it sampled.
        sampled: The log-probabilities that it gave with them.
        digests: Name to digest of the tensors that it computes with; empty where it does not say.
        dtype: What it computes in; '' where it does not say.
    """

    version: int | None
    logprobs: tuple[float, ...] = ()
    tokens: tuple[int, ...] = ()
    sampled: tuple[float, ...] = ()
    digests: Mapping[str, str] = attrs.field(factory=dict)
    dtype: str = ""


class Client:
    """Asks servers, each time over a new connection: a balancer may pass each one on to another replica."""

    def __init__(self) -> None:
        self._http: httpx.Client | None = None

    def score(self, endpoint: Endpoint, ids: Sequence[int]) -> Answer:
        """Let a server score tokens.

        Raises:
            CannotScore: It does not know how.
            CannotAnswer: It does not answer.
        """
        body = self._ask(endpoint, {"prompt": list(ids), "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 1})
        try:
            found = body["choices"][0]["prompt_logprobs"]
            places = zip(found, ids, strict=True)
            logprobs = tuple(float(place[str(token)]["logprob"]) for place, token in places if place)
        except (KeyError, IndexError, TypeError, ValueError):
            raise CannotScore("its answer holds no prompt_logprobs") from None
        if len(logprobs) != len(ids) - 1:
            raise CannotScore(f"it returned {len(logprobs)} log-probabilities for {len(ids)} tokens")
        held = body.get("weights") or {}
        return Answer(
            version=_version(body), logprobs=logprobs, digests=held.get("digests") or {}, dtype=held.get("dtype") or ""
        )

    def sample(self, endpoint: Endpoint, ids: Sequence[int], *, n: int, temperature: float) -> Answer:
        """Let a server sample n tokens after others, which it may have in its prefix cache.

        Raises:
            CannotScore: It does not know how, or returns neither ids nor log-probabilities.
            CannotAnswer: It does not answer.
        """
        fields = {"max_tokens": n, "temperature": temperature, "top_p": 1.0, "top_k": -1, "seed": 1, "logprobs": 1}
        body = self._ask(endpoint, {"prompt": list(ids), "return_token_ids": True, **fields})
        try:
            choice = body["choices"][0]
            tokens = tuple(map(int, choice["token_ids"]))
            sampled = tuple(map(float, choice["logprobs"]["token_logprobs"]))
        except (KeyError, IndexError, TypeError, ValueError):
            raise CannotScore("its answer holds no token_ids or no token_logprobs") from None
        return Answer(version=_version(body), tokens=tokens, sampled=sampled)

    def _ask(self, endpoint: Endpoint, fields: Mapping[str, Any]) -> dict[str, Any]:
        if self._http is None:
            without_proxy(endpoint.base_url)
            self._http = httpx.Client(timeout=TIMEOUT_S)
        headers = {"Authorization": f"Bearer {endpoint.api_key}", **endpoint.headers, "Connection": "close"}
        url = f"{endpoint.base_url}/completions"
        try:
            reply = self._http.post(url, json={"model": endpoint.model, **fields}, headers=headers)
            if reply.status_code in UNKNOWN:
                raise CannotScore(f"POST {url}: {reply.status_code} {reply.text[:200]}")
            reply.raise_for_status()
            body = reply.json()
        except (httpx.HTTPError, ValueError) as error:
            raise CannotAnswer(f"{url} does not answer: {type(error).__name__}: {error}") from error
        if not isinstance(body, dict):
            raise CannotScore(f"POST {url}: the answer is no JSON object")
        return body


def _version(body: Mapping[str, Any]) -> int | None:
    found = VERSION.fullmatch(str(body.get("system_fingerprint")))
    return int(found[1]) if found else None
