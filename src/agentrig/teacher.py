"""The teacher of on-policy distillation: a model behind an OpenAI-compatible address that scores tokens, as vLLM does.

It gets the exact token ids of prompt and reply at `/completions`, with `prompt_logprobs`. So it must have the tokens of
the model that is trained, and nothing that it says is tokenized again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import httpx

from agentrig.credit import TeacherConfig, Worth, opd
from agentrig.delivery.asking import UNKNOWN, CannotAnswer, CannotScore, ask
from agentrig.endpoints import Endpoint, without_proxy
from agentrig.errors import ConfigError, RunStopped
from agentrig.rollouts import Rollout

WAITS_S = (1.0, 4.0, 15.0, 60.0)
"""How long a step waits before it asks a teacher again that did not answer."""

TRIAL = 'The quick brown fox, 12.5% of 3480?\n\tSELECT name FROM singer WHERE age > 40; {"é": [1, -2]} 你好'
"""What both models tokenize, so that their tokens can be compared: words, digits, code and other scripts."""

ROUNDING = 1e-3
"""A log-probability may be so far above 0: servers compute in 16 bits."""


class Distillation:
    """Implements `agentrig.credit.Teacher`, and is the credit `opd`."""

    def __init__(self, config: TeacherConfig) -> None:
        self.teacher = Endpoint.at(config.base_url, config.model, config.api_key, token_ids=True)
        self.heard: Mapping[tuple[str, str], Sequence[float]] = {}
        self._concurrency = config.concurrency

    def __call__(self, groups: Sequence[Sequence[Rollout]]) -> Iterator[list[Worth]]:
        """Ask the teacher about each trained call of a step's groups, then yield what the calls are worth."""
        calls = [(r.id, t) for group in groups for r in group if r.value is not None for t in r.triplets]
        with ThreadPoolExecutor(self._concurrency, thread_name_prefix="teacher") as pool:
            replies = pool.map(lambda call: self._patient(call[1].prompt_ids, call[1].response_ids), calls)
            self.heard = {(name, t.span_id): reply for (name, t), reply in zip(calls, replies, strict=True)}
        yield from opd(groups, self.heard)

    def ready(self, student: Endpoint) -> None:
        """Check that the teacher answers, has the student's tokens, and that its answers are log-probabilities."""
        try:
            ids, theirs = _tokens(student), _tokens(self.teacher)
            if ids != theirs:
                place = next((i for i, pair in enumerate(zip(ids, theirs, strict=False)) if len(set(pair)) > 1), None)
                raise CannotScore(
                    f"it has another tokenizer than the model that is trained: a trial text has {len(theirs)} "
                    f"tokens there and {len(ids)} here"
                    + ("" if place is None else f", and they differ from token {place} on")
                )
            found = self._score(ids[:1], ids[1:])
            if len(set(found)) == 1:
                raise CannotScore(f"its answer has the log-probability {found[0]:g} for each of {len(found)} tokens")
        except (CannotScore, CannotAnswer) as error:
            raise ConfigError(
                f"[credit] opd: the teacher {self.teacher.model} at {self.teacher.base_url} can't be used: {error}"
            ) from None

    def _patient(self, prompt: Sequence[int], reply: Sequence[int]) -> Sequence[float]:
        """Return what the teacher says of a reply; one that does not answer is asked again for about 80 seconds."""
        for wait in (*WAITS_S, None):
            try:
                return self._score(prompt, reply)
            except (CannotScore, CannotAnswer) as error:
                if isinstance(error, CannotScore) or wait is None:
                    cure = "See to its answers" if isinstance(error, CannotScore) else "Start it again"
                    raise RunStopped(
                        f"the teacher {self.teacher.model} at {self.teacher.base_url} can't be used any more: "
                        f"{str(error).splitlines()[0]}. The step is lost. {cure}, then resume the run",
                        cause="teacher-failed",
                    ) from None
                time.sleep(wait)
        raise AssertionError

    def _score(self, prompt: Sequence[int], reply: Sequence[int]) -> Sequence[float]:
        """Return the log-probability of each token of a reply under the teacher."""
        found = ask(self.teacher, [*prompt, *reply]).logprobs[len(prompt) - 1 :]
        if strange := [value for value in found if not -math.inf < value <= ROUNDING]:
            raise CannotScore(f"its answer has the log-probability {strange[0]}, which is none")
        return found


def _tokens(endpoint: Endpoint) -> Sequence[int]:
    """Return the token ids of `TRIAL`."""
    body = {"model": endpoint.model, "prompt": TRIAL, "add_special_tokens": False}
    url = f"{endpoint.base_url.removesuffix('/v1')}/tokenize"
    without_proxy(url)
    try:
        headers = {"Authorization": f"Bearer {endpoint.api_key}", **endpoint.headers}
        reply = httpx.post(url, json=body, headers=headers, timeout=60)
        if reply.status_code in UNKNOWN:
            raise CannotScore(f"tokens can't be compared: POST {url} answers {reply.status_code} {reply.text[:200]}")
        found = [int(token) for token in reply.raise_for_status().json()["tokens"]]
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise CannotAnswer(f"{url} does not answer: {type(error).__name__}: {error}") from None
    if len(found) < 2:
        raise CannotScore(f"tokens can't be compared: {url} makes {len(found)} of a text of {len(TRIAL)} characters")
    return found
