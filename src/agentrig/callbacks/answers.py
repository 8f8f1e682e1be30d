"""An answer as JSON, and the address at which one rollout's answer is taken."""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
from collections.abc import Mapping
from concurrent.futures import Future, InvalidStateError
from typing import Any

import attrs

from agentrig.agents import Judged
from agentrig.callbacks.listener import Listener
from agentrig.errors import AgentFailure, nearest
from agentrig.text import cut, json_text

KEYS = ("answer", "reward", "failure", "message")

FORM = (
    'an answer is {"answer": …}, {"answer": …, "reward": NUMBER} or {"failure": "KIND", "message": "…"}; KIND has '
    "letters, digits, -, _ and ., at most 40"
)

KIND = re.compile(r"[A-Za-z0-9_.-]{1,40}")

ANOTHER = 409, {"error": "the rollout has another answer already; only the first one counts"}
"""The reply to a second answer that differs from the first."""


@attrs.frozen(kw_only=True)
class Answer:
    """What an agent outside of the runner said at its end.

    Attributes:
        answer: Its answer, a JSON value; None if it has none.
        reward: The reward that it computed itself; None if it computed none.
        failure: The kind of its failure; None if it answered.
        message: Describes the failure.
    """

    answer: Any = None
    reward: float | None = None
    failure: str | None = None
    message: str = ""

    @classmethod
    def read(cls, value: Any) -> Answer:
        """Return the answer that a JSON value states.

        Raises:
            ValueError: It states none; the message says what is wrong and what an answer looks like.
        """
        if not isinstance(value, Mapping):
            raise ValueError(f"this is no object: {cut(json_text(value), 200)}; {FORM}")
        unknown = [key for key in value if key not in KEYS]
        if unknown:
            raise ValueError(f'an answer has no key "{unknown[0]}".{nearest(str(unknown[0]), KEYS)} {FORM}')
        failure, reward = value.get("failure"), value.get("reward")
        if failure is not None:
            if not isinstance(failure, str) or not KIND.fullmatch(failure) or {"answer", "reward"} & value.keys():
                raise ValueError(f"this is no failure: {cut(json_text(value), 200)}; {FORM}")
            return cls(failure=failure, message=str(value.get("message", "")))
        if "answer" not in value and reward is None:
            raise ValueError(f"there is no answer; {FORM}")
        if reward is not None and (
            isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward)
        ):
            raise ValueError(f"the reward {cut(json_text(reward), 80)} is no number; {FORM}")
        return cls(answer=value.get("answer"), reward=None if reward is None else float(reward))

    def judged(self) -> Judged:
        """Return it as an agent of this process would.

        Raises:
            AgentFailure: It is a failure, with its kind.
        """
        if self.failure is not None:
            raise AgentFailure(self.message or "the agent says no more than that", kind=self.failure)
        return Judged(answer=self.answer, reward=self.reward)


class Callback:
    """One rollout's address: the first answer that arrives with its key counts.

    The same answer again is accepted, also after the rollout's end, because its sender may not know that it arrived;
    another one is refused.

    Example:
        ```python
        with Callback("r1", attempt=1) as callback:
            start(callback.url, callback.key)
            answer = callback.wait(60.0)
        ```

    Args:
        rollout_id: The rollout's id.
        attempt: The number of its attempt.
        listener: Where it listens; None for this process's listener on loopback.
        path: The address's path; empty for one of the rollout's and the attempt's.
        key: The key; empty for a new one.

    Attributes:
        url: Where the answer is to be posted.
        key: The bearer token that comes with it; random, and dead when the rollout has ended.
        refused: Why the last thing that was posted is no answer; '' if everything was one.
        repeated: How many further answers differed from the first.
    """

    def __init__(
        self, rollout_id: str, *, attempt: int = 1, listener: Listener | None = None, path: str = "", key: str = ""
    ) -> None:
        self._first: Future[Answer] = Future()
        self._door = (listener or Listener.shared()).open(
            path or f"rollouts/{rollout_id}/attempts/{attempt}/answer", self._take, key
        )
        self.url, self.key = self._door.url, self._door.key
        self.refused = ""
        self.repeated = 0

    def wait(self, timeout_s: float) -> Answer | None:
        """Return the answer as soon as it is here, or None after so many seconds."""
        try:
            return self._first.result(timeout_s)
        except TimeoutError:
            return None

    async def answer(self) -> Answer:
        """Return the answer as soon as it is here."""
        return await asyncio.shield(asyncio.wrap_future(self._first))

    @property
    def arrived(self) -> Answer | None:
        """The answer; None as long as there is none."""
        return self._first.result() if self._first.done() else None

    def close(self) -> None:
        """Take no more answers."""
        if not self._first.done():
            self._door.close()
            return
        taken = _digest(self._first.result())  # not the answer itself, which may be large

        def late(value: Any) -> tuple[int, Mapping[str, Any]]:
            try:
                same = _digest(Answer.read(value)) == taken
            except ValueError as error:
                return 400, {"error": str(error)}
            return (200, {"accepted": True}) if same else ANOTHER

        self._door.close(late)

    def __enter__(self) -> Callback:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _take(self, value: Any) -> tuple[int, Mapping[str, Any]]:
        try:
            answer = Answer.read(value)
        except ValueError as error:
            self.refused = str(error)  # a message of the rollout may say it, if no answer follows
            return 400, {"error": str(error)}
        try:
            self._first.set_result(answer)
        except InvalidStateError:
            if answer != self._first.result():
                self.repeated += 1
                return ANOTHER
        return 200, {"accepted": True}


def _digest(answer: Answer) -> bytes:
    return hashlib.sha256(json_text(attrs.astuple(answer, recurse=False)).encode()).digest()
