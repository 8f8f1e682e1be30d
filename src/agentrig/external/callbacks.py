"""Callbacks: an HTTP address of a runner for each rollout, at which an agent outside of it leaves its answer."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from functools import partial
from typing import Any
from urllib.parse import quote

import attrs

from agentrig.agents import Judged, Outcome
from agentrig.endpoints import address_of
from agentrig.errors import FAILURE_KIND, AgentFailure, AgentrigError, nearest
from agentrig.http_server import (
    Access,
    Receive,
    Refused,
    Scope,
    Send,
    ServerThread,
    bearer,
    headers_of,
    listen,
    not_json,
    reply,
    same,
)
from agentrig.text import check_characters, cut, json_text

BODY_LIMIT = 16 << 20
"""Most bytes of a request's body."""

NO_SETTING = "no setting raises it: a run takes no answer of more than 10,000,000 characters"
"""What the refusal of a longer one says: it is `agentrig.runners.attempt.ANSWER_LIMIT`."""

MOST = 1024
"""Most connections, and most rollouts that have ended whose answer is still known."""

KEYS = ("answer", "reward", "failure", "message")

FORM = (
    'an answer is {"answer": …}, {"answer": …, "reward": NUMBER} or {"failure": "KIND", "message": "…"}; KIND has '
    "letters, digits, -, _ and ., at most 40"
)

ANOTHER = 409, {"error": "the rollout has another answer already; only the first one counts"}
"""The reply to a second answer that differs from the first."""

FAILED_BY_IT = 409, {"error": "the rollout has another answer already; with two that differ it fails (answered-twice)"}
"""The same, to a program of which a second answer is a fault."""


def read_answer(value: Any) -> Outcome:
    """Return the outcome that an agent outside of the runner states, as a JSON value.

    Raises:
        ValueError: It states none; the message says what is wrong and what an answer looks like.
    """
    if not isinstance(value, Mapping):
        raise ValueError(f"this is no object: {cut(json_text(value), 200)}; {FORM}")
    unknown = [key for key in value if key not in KEYS]
    if unknown:
        raise ValueError(f'an answer has no key "{unknown[0]}".{nearest(str(unknown[0]), KEYS)} {FORM}')
    check_characters(value, "it")
    failure, reward = value.get("failure"), value.get("reward")
    if failure is not None:
        kind = isinstance(failure, str) and FAILURE_KIND.fullmatch(failure)
        if not kind or {"answer", "reward"} & value.keys():
            raise ValueError(f"this is no failure: {cut(json_text(value), 200)}; {FORM}")
        return Outcome(failure=failure, message=str(value.get("message", "")))
    if "answer" not in value and reward is None:
        raise ValueError(f"there is no answer; {FORM}")
    if reward is not None and (
        isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward)
    ):
        raise ValueError(f"the reward {cut(json_text(reward), 80)} is no number; {FORM}")
    return Outcome(answer=value.get("answer"), own_reward=None if reward is None else float(reward))


def returned(outcome: Outcome) -> Judged:
    """Return an outcome as an agent of this process returns it; a failure is raised."""
    if outcome.failure is not None:
        raise AgentFailure(outcome.message or "the agent says no more than that", kind=outcome.failure)
    return Judged(answer=outcome.answer, reward=outcome.own_reward)


class Callback:
    """One rollout's address: the first answer that arrives with its key counts.

    The same answer again is accepted, also after the rollout's end, because its sender may not know that it arrived;
    another one is refused.

    Args:
        listener: Where it listens; None for this process's listener on loopback.
        path: The address's path; empty for one of the rollout's and the attempt's.
        key: The key; empty for a new one.
        one_answer: Whether the rollout fails with a second answer that differs, as its sender is then told.

    Attributes:
        url: Where the answer is to be posted.
        key: The bearer token that comes with it; random, and dead when the rollout has ended.
        refused: Why the last post was refused, one with the key if there is one; '' if none was.
        malformed: Whether that one came with the key: what it holds is no answer.
        repeated: How many further answers differed from the first.
    """

    def __init__(
        self,
        rollout_id: str,
        *,
        attempt: int = 1,
        listener: Listener | None = None,
        path: str = "",
        key: str = "",
        one_answer: bool = False,
    ) -> None:
        self._first: Future[Outcome] = Future()
        self._listener = listener or Listener.shared()
        self._path = path or f"rollouts/{rollout_id}/attempts/{attempt}/answer"
        self.url, self.key = f"{self._listener.url}/{quote(self._path)}", key or secrets.token_urlsafe(24)
        self._listener.open(self._path, self)
        self.refused, self.malformed = "", False
        self.repeated = 0
        self._another = FAILED_BY_IT if one_answer else ANOTHER

    async def answer(self) -> Outcome:
        """Return the answer as soon as it is here."""
        return await asyncio.shield(asyncio.wrap_future(self._first))

    @property
    def arrived(self) -> Outcome | None:
        """The answer; None as long as there is none."""
        return self._first.result() if self._first.done() else None

    def close(self) -> None:
        """Take no more answers."""
        self._listener.end(self._path, self)

    def __enter__(self) -> Callback:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def take(self, value: Any) -> tuple[int, Mapping[str, Any]]:
        """Take what was posted, in the listener's thread; return the reply's status and JSON object.

        Raises:
            Refused: It is no answer.
        """
        answer = _read(value)
        try:
            self._first.set_result(answer)
        except InvalidStateError:
            if answer != self._first.result():
                self.repeated += 1
                return self._another
        return 200, {"accepted": True}

    def note(self, refusal: str, *, malformed: bool) -> None:
        """Note a refusal: a message of the rollout says it if no answer follows."""
        if malformed or not self.malformed:
            self.refused, self.malformed = refusal, malformed


def _read(value: Any) -> Outcome:
    try:
        return read_answer(value)
    except ValueError as error:
        raise Refused(str(error)) from None


def _late(digest: bytes, value: Any) -> tuple[int, Mapping[str, Any]]:
    """Take what was posted after the end of a rollout that has answered."""
    return (200, {"accepted": True}) if _digest(_read(value)) == digest else ANOTHER


def _digest(answer: Outcome) -> bytes:
    return hashlib.sha256(json_text(attrs.astuple(answer, recurse=False)).encode()).digest()


class Listener:
    """Takes JSON that is posted to open addresses; everything else is refused, with a reply that says why.

    Args:
        host: The address to listen on.
        name: The host's name in URLs, for clients that reach it by another one; empty for `host`.
    """

    _shared: dict[tuple[int, str, str], Listener] = {}  # noqa: RUF012  (by process too: a fork inherits no thread)
    _starting = threading.Lock()

    def __init__(self, host: str = "127.0.0.1", name: str = "") -> None:
        try:
            listener = listen(host)
        except OSError as error:
            raise AgentrigError(
                f"no callbacks can be taken: this machine cannot listen on {host} ({error.strerror or error}); name "
                "an address of this machine"
            ) from None
        port = listener.getsockname()[1]
        self.url = address_of(host, port, name)
        self._open: dict[str, Callback] = {}
        self._ended: OrderedDict[str, tuple[str, bytes]] = OrderedDict()  # the key, and the digest of the answer
        app = Access(
            self._app,
            self._admit,
            host=host,
            port=port,
            name=name,
            limit=BODY_LIMIT,
            setting=NO_SETTING,
            form=self._refusal,
        )
        self._server = ServerThread(app, listener, "callbacks", most=MOST)

    @classmethod
    def shared(cls, host: str = "127.0.0.1", name: str = "") -> Listener:
        """Return this process's listener for a host; the first call starts it, and it ends with the process."""
        with cls._starting:
            place = (os.getpid(), host, name)
            if place not in cls._shared:
                cls._shared[place] = cls(host, name)
            return cls._shared[place]

    def open(self, path: str, callback: Callback) -> None:
        """Open a callback's address."""
        if path in self._open:
            raise ValueError(f"the callback {path} is open already")
        self._ended.pop(path, None)
        self._open[path] = callback

    def end(self, path: str, callback: Callback) -> None:
        """Close a callback's address; the answer that it has got is known for as long as few others end after it."""
        if self._open.pop(path, None) is not None and (answer := callback.arrived) is not None:
            self._ended[path] = callback.key, _digest(answer)
            while len(self._ended) > MOST:
                self._ended.popitem(last=False)

    def close(self) -> None:
        """Stop listening."""
        self._server.stop()

    def _refusal(self, refused: Refused, scope: Scope) -> Mapping[str, Any]:
        """Return the reply to a post that is refused; the rollout under way at its address learns of it."""
        if (callback := self._open.get(scope["path"].removeprefix("/"))) is not None:
            callback.note(str(refused), malformed="agentrig.take" in scope)
        return {"error": str(refused)}

    def _admit(self, scope: Scope) -> bool:
        if scope["method"] != "POST":
            raise Refused("an answer is posted: send POST", status=405)
        path = scope["path"].removeprefix("/")
        take: Callable[[Any], tuple[int, Mapping[str, Any]]]
        if (callback := self._open.get(path)) is not None:
            key, take = callback.key, callback.take
        elif (ended := self._ended.get(path)) is not None:
            key, take = ended[0], partial(_late, ended[1])
        else:
            text = "no rollout is under way at this address: it has ended, or the address is wrong"
            raise Refused(text, status=410)
        if not same(bearer(scope), key):
            raise Refused("this address asks for its own key: send `Authorization: Bearer KEY`", status=401)
        scope["agentrig.take"] = take
        return True

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            value = json.loads((await receive())["body"], parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise not_json(error, headers_of(scope)) from None
        status, answer = scope["agentrig.take"](value)
        await reply(send, status, dict(answer), {"connection": "close"} if status >= 400 else None)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no value of JSON")
