"""The httpx tap: sees every call to the model, requests token ids, and keeps the exact ids that were sampled.

The SDKs of OpenAI, Anthropic and others share httpx, so an agent needs no wrapper around its client. Calls to the run's
own server get the run's key, headers and sampling fields, so an agent that knows none of them needs no change either.
"""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import attrs
import orjson

from agentrig.endpoints import sampled_as
from agentrig.text import parsed, words_of
from agentrig.traces import ABORTED, ASKED, HANDED, LLM_CALL, PARENT, SENT, SERVER, message_digest
from agentrig.tracing.connections import marked
from agentrig.tracing.recorder import Recorder, active, server_of
from agentrig.tracing.streams import Streamed, is_abort, joined, tee
from agentrig.tracing.tokens import sampled_calls, token_attributes

CLOSED_EARLY = "the agent closed the stream before its end, and before its token ids: read it to the end"
"""The error of such a call, if the run needs the ids."""

ENDED = "the rollout has ended: a thread that makes calls must end before its rollout does"
"""What is answered to a call that comes later; the gateway refuses it too."""


def install() -> None:
    """Patch each installed library of the httpx family."""
    for library in ("httpx", "httpx2"):
        try:
            module = importlib.import_module(library)
        except ImportError:
            continue
        _tap(module, is_async=False)
        _tap(module, is_async=True)
        _keep_connections(module.HTTPTransport)
        _keep_connections(module.AsyncHTTPTransport)
        core = library.replace("httpx", "httpcore")
        _hold_connections(importlib.import_module(f"{core}._sync.connection_pool").PoolRequest)
        _hold_connections(importlib.import_module(f"{core}._async.connection_pool").AsyncPoolRequest)


def _keep_connections(transport: Any) -> None:
    """Let a client's transport keep as many idle connections as it may open, until they expire.

    Where there are more than `max_keepalive_connections` (20 by default), httpcore 1.0 closes idle ones, and sometimes
    one that a thread has just got for its call (https://github.com/encode/httpcore/issues/1110). That call fails with
    "Bad file descriptor", or waits for its timeout: seen in one of some 7,000 rollouts that share a client among 32
    threads. A client that keeps none (0) is left as it is.
    """
    make = transport.__init__

    def made(self: Any, *args: Any, **options: Any) -> None:
        limits = options.get("limits")
        if limits is not None and limits.max_keepalive_connections:
            kept = {"max_keepalive_connections": limits.max_connections, "keepalive_expiry": limits.keepalive_expiry}
            options["limits"] = type(limits)(max_connections=limits.max_connections, **kept)
        make(self, *args, **options)

    transport.__init__ = made


def _hold_connections(pool_request: Any) -> None:
    """Let no connection that a call has just got expire before the call is sent on it.

    Otherwise the pool closes it for another thread, with the errors of `_keep_connections`: seen in 4 of some 5,000
    rollouts whose clients had been idle for `keepalive_expiry` (5 s by default) when a step began.
    """
    assign = pool_request.assign_to_connection

    def assigned(self: Any, connection: Any) -> None:
        held = connection
        while held is not None:
            if hasattr(held, "_expire_at"):
                held._expire_at = None  # as the connection itself does when it sends
            held = getattr(held, "_connection", None)
        assign(self, connection)

    pool_request.assign_to_connection = assigned


def _tap(library: Any, *, is_async: bool) -> None:
    client = library.AsyncClient if is_async else library.Client
    copied = tee(library.AsyncByteStream if is_async else library.SyncByteStream)
    send: Any = marked(client.send) if is_async else client.send

    def late(request: Any) -> Any:
        """Return the refusal of a call to the run's server by what goes on after its rollout, or None."""
        recorder = active.get()
        if recorder is None or not recorder.ended or server_of(request.url) != recorder.server:
            return None
        recorder.refuse()
        error = {"message": ENDED, "type": "invalid_request_error", "param": None, "code": "rollout_ended"}
        return library.Response(410, json={"error": error}, request=request)

    def prepare(request: Any) -> tuple[_Call, Any] | None:
        recorder = active.get()
        if recorder is None:
            return None
        server = server_of(request.url)
        if server == recorder.server:  # the client drops the key if it is redirected elsewhere
            request.headers.update(recorder.headers)
        if request.method != "POST":
            return None
        if recorder.gateway and server == recorder.server:
            request.headers[PARENT] = recorder.parent()  # the gateway records the call under this span
            return None
        if not request.url.path.endswith("/chat/completions"):
            if server == recorder.server and request.url.path.endswith(("/completions", "/messages", "/responses")):
                recorder.miss(f"POST {request.url.path}")
            return None
        try:
            body = json.loads(request.content)
        except library.StreamError:  # a body that is sent while it is made
            if server == recorder.server:
                recorder.miss(f"POST {request.url.path} with a streamed body")
            return None
        except (ValueError, RecursionError):
            return None
        if not isinstance(body, dict):  # the server refuses it
            return None
        foreign = f"{server[0]}:{server[1]}" if recorder.server not in (None, server) else None
        own = "logprobs" in body or "return_token_ids" in body
        asked: dict[str, Any] = {}
        if foreign is None and (recorder.token_ids or recorder.sampling):
            body, asked = sampled_as(body, recorder.sampling, replace=recorder.replace)
            body |= {"return_token_ids": True, "logprobs": True} if recorder.token_ids else {}
            content = json.dumps(body).encode()
            headers = library.Headers(request.headers)
            headers["content-length"] = str(len(content))
            # Not the client's build_request, which would merge its URL, cookies and headers in once more.
            request = library.Request(
                *(request.method, request.url),
                headers=headers,
                stream=library.ByteStream(content),
                extensions=request.extensions,
            )
            request.read()
        call = _Call(recorder, time.time(), body, own, foreign, recorder.parent(), asked)
        recorder.under_way.add(id(call))
        return call, request

    if is_async:

        async def asend(self: Any, request: Any, **options: Any) -> Any:
            content = getattr(request, "_content", b"")
            if (refused := late(request)) is not None:
                return refused
            prepared = prepare(request)
            if prepared is None:
                return await send(self, request, **options)
            call, request = prepared
            call.sent(content)
            try:
                response = await send(self, request, **options)
            except BaseException as error:
                call.record({}, error=words_of(error), aborted=is_abort(error))
                raise
            if options.get("stream") and call.streams(response):
                return call.follow(response, copied)
            await response.aread()
            call.answer(response)
            call.handed(response.content)
            return response

        client.send = asend
        return

    def ssend(self: Any, request: Any, **options: Any) -> Any:
        content = getattr(request, "_content", b"")
        if (refused := late(request)) is not None:
            return refused
        prepared = prepare(request)
        if prepared is None:
            return send(self, request, **options)
        call, request = prepared
        call.sent(content)
        try:
            response = send(self, request, **options)
        except BaseException as error:
            call.record({}, error=words_of(error), aborted=is_abort(error))
            raise
        if options.get("stream") and call.streams(response):
            return call.follow(response, copied)
        response.read()
        call.answer(response)
        call.handed(response.content)
        return response

    client.send = ssend


@attrs.frozen
class _Call:
    """A call to a model that has not ended.

    Attributes:
        recorder: The rollout's recorder.
        start: When the call began.
        request: Its body.
        own: Whether the agent itself requested ids or log-probabilities.
        foreign: The server, if it is not the endpoint's.
        parent: The span in which the call was made; a stream can be read after that span has ended.
        asked: The agent's own sampling fields that the run's have replaced.
        digests: Of what the client sent; see `SENT`.
        recorded: The attributes of the spans of a call without an error.
    """

    recorder: Recorder
    start: float
    request: dict[str, Any]
    own: bool
    foreign: str | None
    parent: str | None
    asked: dict[str, Any]
    digests: dict[str, str] = attrs.field(factory=dict)
    recorded: list[dict[str, Any]] = attrs.field(factory=list)

    def sent(self, content: bytes) -> None:
        """Keep a digest of the messages that the client sent, as it sent them."""
        with suppress(ValueError, LookupError, TypeError):
            if self.foreign is None and (digest := message_digest(orjson.loads(content)["messages"])):
                self.digests[SENT] = digest

    def handed(self, content: bytes) -> None:
        """Add to the recorded spans a digest of the message that the client gets, one for each choice."""
        with suppress(ValueError, LookupError, TypeError):
            if self.foreign is None and self.recorded:
                for found, choice in zip(self.recorded, orjson.loads(content)["choices"], strict=True):
                    if digest := message_digest(choice["message"]):
                        found[HANDED] = digest

    def streams(self, answer: Any) -> bool:
        """Return whether the response is to be read piece by piece; the reason of a refusal is read at once."""
        return bool(self.request.get("stream")) and answer.status_code < 400

    def record(self, attributes: dict[str, Any], *, error: str | None = None, aborted: bool = False) -> None:
        """Record the span of the call; if another tracer does, only what it does not see."""
        told = {SERVER: self.foreign, ASKED: self.asked, ABORTED: aborted}
        more = {key: value for key, value in told.items() if value}
        found = {"request": self.request, **more, **self.digests, **attributes}
        self.recorder.under_way.discard(id(self))
        if error is None:
            self.recorded.append(found)
        if self.recorder.muted:
            self.recorder.hear(found)
        else:
            self.recorder.add(LLM_CALL, self.start, found, error=error, parent=self.parent)

    def answer(self, answer: Any) -> None:
        """Record the call with its response.

        If the agent did not request ids and log-probabilities, they are removed from its copy of the response. The
        SDKs would create an object per token; for a few hundred tokens that takes more CPU time than all the rest.
        """
        content, status = answer.content, answer.status_code
        if self.streams(answer) and answer.headers.get("content-type", "").startswith("text/event-stream"):
            self._streamed(content, whole=True, error=None)  # the agent read all of it at once
            return
        error = None if status < 400 else f"HTTP {status}: {content[:500].decode('utf-8', 'replace')}"
        try:
            completion, _ = parsed(content)
            calls = self._calls(completion)
        except (ValueError, LookupError, AttributeError, TypeError, RecursionError):
            # no JSON, or no completion: the agent handles it
            self.record({"response": {"text": content[:2000].decode("utf-8", "replace")}}, error=error)
            return
        rewrites = self.recorder.token_ids and not self.recorder.muted  # another tracer reads the ids in the response
        if rewrites and not self.own and calls[0][2].get("response_token_ids"):
            choices = [choice for _, response, _ in calls for choice in response["choices"]]
            answer._content = json.dumps({**calls[0][1], "choices": choices}).encode()
        for request, response, tokens in calls:
            self.record({"request": request, "response": response, **self._trainable(tokens)}, error=error)

    def follow(self, answer: Any, copied: Any) -> Any:
        """Return the response with a stream that is recorded when it is closed, or when the rollout ends."""
        answer.stream = copied(answer.stream, partial(self.stream, answer))
        self.recorder.streams.append(answer.stream.kept)
        return answer

    def stream(self, answer: Any, passed: Streamed) -> None:
        """Record the call with the streamed content; an error in it goes into the span, never to the agent."""
        try:
            headers = {"content-encoding": answer.headers.get("content-encoding", "identity")}
            content = type(answer)(200, headers=headers, content=passed.raw).content
            error = passed.error
        except Exception as broken:  # the library's own error, for bytes that are not valid in that encoding
            content, error = b"", passed.error or f"the stream cannot be decoded: {type(broken).__name__}: {broken}"
        self._streamed(content, whole=passed.whole, error=error, aborted=passed.aborted)

    def _streamed(self, content: bytes, *, whole: bool, error: str | None, aborted: bool = False) -> None:
        """Record the call with the events that were read, all of them or the first ones."""
        response, wrong = joined(content.decode("utf-8", "replace"), whole=whole)
        try:
            calls = self._calls(response)
        except (LookupError, AttributeError, TypeError) as broken:
            calls = [(self.request, response, {})]
            wrong = wrong or f"the stream's tokens cannot be read: {type(broken).__name__}: {broken}"
        for request, response, tokens in calls:
            early = not whole and not tokens.keys() & {"response_token_ids", "finish_reason"}
            if early and self.recorder.token_ids and self.foreign is None:
                wrong = wrong or CLOSED_EARLY
            self.record(
                {"request": request, "response": response, **self._trainable(tokens)},
                error=error or wrong,
                aborted=aborted or (error or wrong) == CLOSED_EARLY,
            )

    def _calls(self, completion: dict[str, Any]) -> list[tuple[Mapping[str, Any], dict[str, Any], dict[str, Any]]]:
        """Return the calls that it stands for; another tracer records one, with the first choice."""
        if self.recorder.muted:
            return [(self.request, completion, token_attributes(completion))]
        return list(sampled_calls(self.request, completion))

    def _trainable(self, tokens: dict[str, Any]) -> dict[str, Any]:
        """Remove the tokens if they are another model's."""
        return {} if self.foreign else tokens
