"""Requests to a server: score these tokens, and sample some tokens after them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import attrs
import httpx

from agentrig.delivery.probe import SAMPLED
from agentrig.endpoints import Endpoint, without_proxy
from agentrig.traces import weights_version

UNKNOWN = frozenset({400, 404, 405, 422, 501})
"""HTTP statuses of a server that does not support the request or one of its fields."""

TIMEOUT_S = 300.0

ASKED = 4
"""Requests to each address in a proof: there may be several servers behind one address."""

MOST = 16
"""Most servers that are asked at the same time."""

T = TypeVar("T")


class CannotScore(Exception):
    """The server cannot score given tokens."""


class CannotAnswer(Exception):
    """The server did not answer."""


@attrs.frozen(kw_only=True)
class Answer:
    """A server's answer to a probe.

    Attributes:
        version: The version of its weights; None if it does not report it.
        logprobs: The log-probabilities of all tokens of the probe except the first, at temperature 1; empty for a
            request that only samples.
        tokens: The tokens that it sampled.
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


@attrs.frozen(kw_only=True)
class Asked:
    """The answers of an address in a proof.

    Attributes:
        answer: The scores of the probe, and the tokens sampled after it.
        fresh: The server's own scores of the sampled tokens, without its prefix cache; empty if not requested.
        others: The answers to further requests for samples.
        versions: The version of the weights in each answer.
    """

    answer: Answer
    fresh: tuple[float, ...] = ()
    others: tuple[Answer, ...] = ()
    versions: tuple[int | None, ...] = ()


def at_once(ask: Callable[[Endpoint], T], servers: Sequence[Endpoint]) -> list[T]:
    """Return the answers of servers that are asked at the same time; the error of one is raised."""
    with ThreadPoolExecutor(max(1, min(MOST, len(servers))), thread_name_prefix="delivery") as threads:
        return list(threads.map(ask, servers))


class Client:
    """Sends requests to servers, each over a new connection: a load balancer may choose another replica each time."""

    def __init__(self) -> None:
        self._http: httpx.Client | None = None
        self._making = threading.Lock()

    def ask(self, endpoint: Endpoint, ids: Sequence[int], *, fresh: bool = False) -> Asked:
        """Send all requests of a proof to an address.

        Args:
            endpoint: The address, with the temperature of training.
            ids: The probe.
            fresh: Let the server score the tokens that it sampled too, for a learner that cannot score them; at
                temperature 1 only.

        Raises:
            CannotScore: The server does not support it, or its answer lacks a field.
            CannotAnswer: The server does not answer.
        """
        temperature = float(endpoint.sampling.get("temperature", 1.0))
        if fresh:
            sampled = self.sample(endpoint, ids, n=SAMPLED, temperature=temperature)
            scored = self.score(endpoint, [*ids, *sampled.tokens])
            own, versions = scored.logprobs[len(ids) - 1 :], [sampled.version, scored.version]
            answer = attrs.evolve(scored, logprobs=scored.logprobs[: len(ids) - 1])
            answer = attrs.evolve(answer, tokens=sampled.tokens, sampled=sampled.sampled)
        else:
            answer = self._answer(endpoint, ids, score=True, n=SAMPLED, temperature=temperature)
            own, versions = (), [answer.version]
        others = [self.sample(endpoint, ids, n=1, temperature=temperature) for _ in range(ASKED - len(versions))]
        versions += [each.version for each in others]
        return Asked(answer=answer, fresh=own, others=tuple(others), versions=tuple(versions))

    def score(self, endpoint: Endpoint, ids: Sequence[int]) -> Answer:
        """Let a server score tokens; see `ask` for the errors."""
        return self._answer(endpoint, ids, score=True)

    def sample(self, endpoint: Endpoint, ids: Sequence[int], *, n: int, temperature: float) -> Answer:
        """Let a server sample n tokens after the given ones, which may be in its prefix cache; see `ask` for errors."""
        return self._answer(endpoint, ids, n=n, temperature=temperature)

    def _answer(
        self, endpoint: Endpoint, ids: Sequence[int], *, score: bool = False, n: int = 0, temperature: float = 0.0
    ) -> Answer:
        """Let a server score tokens, or sample n after them, or both in one request."""
        fields: dict[str, Any] = {"prompt": list(ids), "max_tokens": n or 1, "temperature": temperature}
        if n:
            fields |= {"top_p": 1.0, "top_k": -1, "seed": 1, "logprobs": 1, "return_token_ids": True}
        body = self._post(endpoint, {**fields, "prompt_logprobs": 1} if score else fields)
        found = Answer(version=weights_version(body))
        if score:
            found = attrs.evolve(found, logprobs=_scores(body, ids), **_weights(body))
        return attrs.evolve(found, **_samples(body)) if n else found

    def _post(self, endpoint: Endpoint, fields: Mapping[str, Any]) -> dict[str, Any]:
        with self._making:
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
            raise CannotScore(f"POST {url}: the answer is not a JSON object")
        return body


def _scores(body: Mapping[str, Any], ids: Sequence[int]) -> tuple[float, ...]:
    """Return the log-probability of each token except the first."""
    try:
        places = zip(body["choices"][0]["prompt_logprobs"], ids, strict=True)
        found = tuple(float(place[str(token)]["logprob"]) for place, token in places if place)
    except (KeyError, IndexError, TypeError, ValueError):
        raise CannotScore("its answer has no prompt_logprobs") from None
    if len(found) != len(ids) - 1:
        raise CannotScore(f"it returned {len(found)} log-probabilities for {len(ids)} tokens")
    return found


def _weights(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a server reports about the weights that it uses."""
    held = body.get("weights") or {}
    return {"digests": held.get("digests") or {}, "dtype": held.get("dtype") or ""}


def _samples(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampled tokens and their log-probabilities."""
    try:
        choice = body["choices"][0]
        tokens = tuple(map(int, choice["token_ids"]))
        return {"tokens": tokens, "sampled": tuple(map(float, choice["logprobs"]["token_logprobs"]))}
    except (KeyError, IndexError, TypeError, ValueError):
        raise CannotScore("its answer has no token_ids or no token_logprobs") from None


class Background(Future[tuple[T, float]]):
    """A call in a separate thread; `result` returns its result and its seconds, or raises its error.

    The thread does not keep the process alive: a run that is stopped does not wait for a server.
    """

    def __init__(self, call: Callable[[], T], *, name: str = "delivery") -> None:
        super().__init__()
        self._call = call
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        start = time.perf_counter()
        try:
            found = self._call()
        except BaseException as error:
            self.set_exception(error)
        else:
            self.set_result((found, time.perf_counter() - start))
