"""The tracer: records a rollout's spans, with nothing asked of the agent.

Two taps feed it. LangChain and LangGraph report their runs to a callback handler that they find in a
context variable. Calls to the model are seen at `httpx`, which the SDKs of OpenAI, Anthropic and others
share: there the request for token ids is added and the exact ids of prompt and response are kept.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.thread import _worker as pool_worker
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import attrs

from agentrig.text import cut, json_text, words_of
from agentrig.traces import LLM_CALL, MISSED, NODE, SERVER, Span, Trace
from agentrig.tracing.connections import watch
from agentrig.tracing.streams import Streamed, async_tee, joined, tee

_active: ContextVar[Recorder | None] = ContextVar("agentrig_recorder", default=None)
_parent: ContextVar[str | None] = ContextVar("agentrig_parent_span", default=None)

OUTPUT_LIMIT = 20_000
"""Longest node output that is kept, in characters of JSON."""


class Recorder:
    """Collects the spans of one rollout.

    Args:
        rollout_id: Whose spans these are.
        token_ids: Ask the endpoint for token ids and log-probabilities with every call.
        muted: Ask for token ids, but record nothing: another tracer does.
        base_url: The endpoint's. A call to another server is another model's: it is recorded, but asked for nothing
            and never trained. Empty: every server is the endpoint.
    """

    def __init__(self, rollout_id: str, *, token_ids: bool, muted: bool = False, base_url: str = "") -> None:
        self.rollout_id = rollout_id
        self.token_ids = token_ids
        self.server = _server(urlsplit(base_url)) if base_url else None
        self.muted = muted
        self.root = uuid.uuid4().hex[:16]
        self._start = time.time()
        self._error: str | None = None
        self._spans: list[Span] = []
        self._open: dict[str, tuple[str | None, str, float, dict[str, Any]]] = {}
        self._hidden: dict[str, str | None] = {}
        self.streams: list[Any] = []
        self._missed: Counter[str] = Counter()

    def open(self, span_id: str, parent: str | None, name: str, attributes: dict[str, Any]) -> None:
        """Begin a span and make it the parent of what follows in this context."""
        while parent in self._hidden:
            parent = self._hidden[parent]
        self._open[span_id] = (parent or self.root, name, time.time(), attributes)
        _parent.set(span_id)

    def hide(self, span_id: str, parent: str | None) -> None:
        """Note an operation that gets no span; what happens in it belongs to its parent."""
        self._hidden[span_id] = parent

    def close(self, span_id: str, *, error: str | None = None, **attributes: Any) -> None:
        """End a span."""
        opened = self._open.pop(span_id, None)
        if opened is None:
            return
        parent, name, start, kept = opened
        kept.update(attributes)
        self._spans.append(
            Span(id=span_id, parent=parent, name=name, start=start, end=time.time(), error=error, attributes=kept)
        )
        _parent.set(parent)

    def add(
        self,
        name: str,
        start: float,
        attributes: dict[str, Any],
        *,
        error: str | None = None,
        parent: str | None = None,
    ) -> None:
        """Record a finished span under a parent, by default the current one."""
        self._spans.append(
            Span(
                id=uuid.uuid4().hex[:16],
                parent=parent or _parent.get() or self.root,
                name=name,
                start=start,
                end=time.time(),
                error=error,
                attributes=attributes,
            )
        )

    def adopt(self, spans: Iterable[Span]) -> None:
        """Take over spans that another tracer recorded; those without a parent go under the root."""
        self._spans += [s if s.parent else attrs.evolve(s, parent=self.root) for s in spans]

    def miss(self, library: str) -> None:
        """Note a connection to the endpoint that another library than httpx made: its calls are not recorded."""
        if not self.muted:
            self._missed[library] += 1

    def fail(self, error: str) -> None:
        """Note the error that ended the rollout."""
        self._error = error

    def trace(self) -> Trace:
        """Return what was recorded, in order of start; spans still open are closed with an error.

        Of a stream that the agent never closed, as one that raised over an event, what passed is recorded.
        """
        for stream in self.streams:
            stream.close()
        for span_id in list(self._open):
            self.close(span_id, error="never ended")
        root = Span(
            id=self.root,
            parent=None,
            name="rollout",
            start=self._start,
            end=time.time(),
            error=self._error,
            attributes={MISSED: dict(self._missed)} if self._missed else {},
        )
        return Trace(rollout_id=self.rollout_id, spans=(root, *sorted(self._spans, key=lambda s: s.start)))


@contextmanager
def recording(rollout_id: str, *, token_ids: bool, muted: bool = False, base_url: str = "") -> Iterator[Recorder]:
    """Record everything that happens in this context (and in threads that copy it).

    Example:
        ```python
        with recording("r1", token_ids=True) as recorder:
            answer = agent(task_input, endpoint)
        trace = recorder.trace()
        ```
    """
    install()
    recorder = Recorder(rollout_id, token_ids=token_ids, muted=muted, base_url=base_url)
    active = _active.set(recorder)
    parent = _parent.set(recorder.root)
    tapped = _handler_variable is not None and not muted
    handler = _handler_variable.set(_make_handler(recorder)) if tapped and _handler_variable is not None else None
    try:
        yield recorder
    finally:
        if handler is not None and _handler_variable is not None:
            _handler_variable.reset(handler)
        _parent.reset(parent)
        _active.reset(active)


def current() -> Recorder | None:
    """Return the recorder of the rollout under way in this context."""
    return _active.get()


@contextmanager
def span(name: str) -> Iterator[None]:
    """Name a part of a plain-Python agent, as a graph node names a part of a graph.

    An adapter can then match the calls made inside. Outside a rollout it does nothing.

    Example:
        ```python
        with agentrig.span("write_query"):
            reply = client.chat.completions.create(...)
        ```
    """
    recorder = _active.get()
    if recorder is None:
        yield
        return
    span_id = uuid.uuid4().hex[:16]
    recorder.open(span_id, _parent.get(), "agent", {"agent.name": name})
    try:
        yield
    except BaseException as error:
        recorder.close(span_id, error=words_of(error))
        raise
    recorder.close(span_id)


# --- the tap at httpx ------------------------------------------------------------------------------

_installed = False
_handler_variable: ContextVar[Any] | None = None
_make_handler: Callable[[Recorder], Any]


def install() -> None:
    """Put both taps in place; once a process, and idle outside `recording`."""
    global _installed
    if _installed:
        return
    _installed = True
    for library in ("httpx", "httpx2"):
        try:
            module = importlib.import_module(library)
        except ImportError:
            continue
        _tap(module, is_async=False)
        _tap(module, is_async=True)
    _tap_threads()
    watch(_active.get)
    with contextlib.suppress(ImportError):  # an agent that does not use LangChain needs no handler
        _install_langchain()


def _tap_threads() -> None:
    """Let threads that a rollout starts, itself or in a pool, record into it; Python gives them a fresh context."""
    submit, start = ThreadPoolExecutor.submit, threading.Thread.start

    def submitted(pool: Any, work: Callable[..., Any], /, *args: Any, **more: Any) -> Any:
        if _active.get() is None:
            return submit(pool, work, *args, **more)
        return submit(pool, copy_context().run, work, *args, **more)

    def started(thread: Any) -> None:
        # A pool's threads outlive the rollout that happened to start them; what they do comes with its own context.
        if _active.get() is not None and getattr(thread, "_target", None) is not pool_worker:
            thread.run = partial(copy_context().run, thread.run)
        start(thread)

    ThreadPoolExecutor.submit = submitted  # type: ignore[method-assign]
    threading.Thread.start = started  # type: ignore[method-assign, assignment]


def _tap(library: Any, *, is_async: bool) -> None:
    client = library.AsyncClient if is_async else library.Client
    copied = async_tee(library.AsyncByteStream) if is_async else tee(library.SyncByteStream)
    send = client.send

    def prepare(self: Any, request: Any) -> tuple[_Call, Any] | None:
        recorder = _active.get()
        if recorder is None or request.method != "POST" or not request.url.path.endswith("/chat/completions"):
            return None
        try:
            body = json.loads(request.content)
        except (ValueError, RecursionError):
            return None
        server = _server(request.url)
        foreign = f"{server[0]}:{server[1]}" if recorder.server not in (None, server) else None
        own = "logprobs" in body or "return_token_ids" in body
        if recorder.token_ids and foreign is None:
            body = {**body, "return_token_ids": True, "logprobs": True}
            headers = {k: v for k, v in request.headers.items() if k.lower() not in ("content-length", "host")}
            asked = self.build_request(request.method, request.url, headers=headers, json=body)
            asked.extensions = request.extensions
            request = asked
        return _Call(recorder, time.time(), body, own, foreign, _parent.get()), request

    if is_async:

        async def asend(self: Any, request: Any, **options: Any) -> Any:
            prepared = prepare(self, request)
            if prepared is None:
                return await send(self, request, **options)
            call, request = prepared
            try:
                response = await send(self, request, **options)
            except BaseException as error:
                call.record({}, error=words_of(error))
                raise
            if options.get("stream") and call.request.get("stream"):
                return call.follow(response, copied)
            await response.aread()
            call.answer(response)
            return response

        client.send = asend
        return

    def ssend(self: Any, request: Any, **options: Any) -> Any:
        prepared = prepare(self, request)
        if prepared is None:
            return send(self, request, **options)
        call, request = prepared
        try:
            response = send(self, request, **options)
        except BaseException as error:
            call.record({}, error=words_of(error))
            raise
        if options.get("stream") and call.request.get("stream"):
            return call.follow(response, copied)
        response.read()
        call.answer(response)
        return response

    client.send = ssend


def _server(url: Any) -> tuple[str, int]:
    """Return a URL's host and port; this machine has several names."""
    host = str(getattr(url, "hostname", None) or getattr(url, "host", "")).lower()
    port = url.port or (443 if url.scheme == "https" else 80)
    return ("localhost" if host in ("127.0.0.1", "::1", "0.0.0.0") else host), port


@attrs.frozen
class _Call:
    """A call to a model that is under way.

    Attributes:
        recorder: Of the rollout.
        start: When it was made.
        request: Its body.
        own: Whether the agent itself asked for ids or log-probabilities.
        foreign: The server, when it is not the endpoint's.
        parent: The span that it was made in; a stream may be read after that has ended.
    """

    recorder: Recorder
    start: float
    request: dict[str, Any]
    own: bool
    foreign: str | None
    parent: str | None

    def record(self, attributes: dict[str, Any], *, error: str | None = None) -> None:
        """Record its end."""
        server = {SERVER: self.foreign} if self.foreign else {}
        self.recorder.add(
            LLM_CALL, self.start, {"request": self.request, **server, **attributes}, error=error, parent=self.parent
        )

    def answer(self, answer: Any) -> None:
        """Record it with its response.

        When the agent did not ask for ids and log-probabilities, it does not get them either: the SDKs would make an
        object of every token, which for a few hundred tokens costs more CPU time than the rest of the rollout.
        """
        if self.recorder.muted:
            return
        content, status = answer.content, answer.status_code
        try:
            response = json.loads(content)
            tokens = _tokens(response)
        except (
            ValueError,
            LookupError,
            AttributeError,
            TypeError,
            RecursionError,
        ):  # no JSON, or no completion: the agent's to judge
            response, tokens = {"text": content[:2000].decode("utf-8", "replace")}, {}
        if self.recorder.token_ids and not self.own and tokens.get("response_token_ids"):
            answer._content = json.dumps(response).encode()
        error = None if status < 400 else f"HTTP {status}: {content[:500].decode('utf-8', 'replace')}"
        self.record({"response": response, **self._trainable(tokens)}, error=error)

    def follow(self, answer: Any, copied: Any) -> Any:
        """Return the response with a stream that is recorded once it is closed, or when the rollout ends."""
        answer.stream = copied(answer.stream, partial(self.stream, answer))
        self.recorder.streams.append(answer.stream.kept)
        return answer

    def stream(self, answer: Any, passed: Streamed) -> None:
        """Record it with what was streamed; whatever is wrong with that is the span's error, never the agent's."""
        if self.recorder.muted:
            return
        try:
            headers = {"content-encoding": answer.headers.get("content-encoding", "identity")}
            content = type(answer)(200, headers=headers, content=passed.raw).content
            error = passed.error
        except Exception as broken:  # the library's own, for bytes that are not of that encoding
            content, error = b"", passed.error or f"the stream cannot be decoded: {type(broken).__name__}: {broken}"
        text = content.decode("utf-8", "replace")
        if answer.status_code >= 400:
            error = f"HTTP {answer.status_code}: {text[:500]}"
            self.record({"response": {"text": text[:2000]}}, error=error)
            return
        response, wrong = joined(text, whole=passed.whole)
        try:
            tokens = _tokens(response)
        except (LookupError, AttributeError, TypeError) as broken:
            tokens, wrong = {}, wrong or f"the stream's tokens cannot be read: {type(broken).__name__}: {broken}"
        self.record({"response": response, **self._trainable(tokens)}, error=error or wrong)

    def _trainable(self, tokens: dict[str, Any]) -> dict[str, Any]:
        """Leave out the tokens of another model."""
        return {} if self.foreign else tokens


def _tokens(response: dict[str, Any]) -> dict[str, Any]:
    """Move what training needs out of a chat completion, as vLLM forms it, into span attributes."""
    found: dict[str, Any] = {"gen_ai.response.id": response.get("id")}
    choices = response.get("choices") or [{}]
    choice = choices[0]
    prompt = response.pop("prompt_token_ids", None) or choice.pop("prompt_token_ids", None)
    if prompt:
        found["prompt_token_ids"] = prompt
    if ids := choice.pop("token_ids", None):
        found["response_token_ids"] = ids
    content = (choice.pop("logprobs", None) or {}).get("content")
    if content:
        found["response_logprobs"] = [token["logprob"] for token in content]
    if choice.get("finish_reason"):
        found["finish_reason"] = choice["finish_reason"]
    return found


# --- the tap at LangChain --------------------------------------------------------------------------


def _install_langchain() -> None:
    global _handler_variable, _make_handler
    from langchain_core.callbacks.base import BaseCallbackHandler
    from langchain_core.tracers.context import register_configure_hook

    class Handler(BaseCallbackHandler):
        """Turns LangChain's runs into spans."""

        run_inline = True  # in async graphs too, so that the context variables reach the call
        raise_error = False

        def __init__(self, recorder: Recorder) -> None:
            self._recorder = recorder

        def on_chain_start(self, serialized: Any, inputs: Any, *, run_id: Any, **more: Any) -> None:
            parent = more.get("parent_run_id")
            if "langsmith:hidden" in (more.get("tags") or ()):
                self._recorder.hide(run_id.hex, parent.hex if parent else None)
                return
            name = more.get("name") or (serialized or {}).get("name") or "chain"
            attributes: dict[str, Any] = {NODE: name}
            if parent is None:
                attributes["input"] = plain(inputs)
            self._recorder.open(run_id.hex, parent.hex if parent else None, "chain.chain", attributes)

        def on_chain_end(self, outputs: Any, *, run_id: Any, **more: Any) -> None:
            self._recorder.close(run_id.hex, output=plain(outputs))

        def on_chain_error(self, error: BaseException, *, run_id: Any, **more: Any) -> None:
            self._recorder.close(run_id.hex, error=words_of(error))

        def on_tool_start(self, serialized: Any, input_str: str, *, run_id: Any, **more: Any) -> None:
            name = more.get("name") or (serialized or {}).get("name") or "tool"
            parent = more.get("parent_run_id")
            attributes = {"tool.name": name, "input": plain(input_str)}
            self._recorder.open(run_id.hex, parent.hex if parent else None, "tool", attributes)

        def on_tool_end(self, output: Any, *, run_id: Any, **more: Any) -> None:
            self._recorder.close(run_id.hex, output=plain(output))

        def on_tool_error(self, error: BaseException, *, run_id: Any, **more: Any) -> None:
            self._recorder.close(run_id.hex, error=words_of(error))

    variable: ContextVar[Any] = ContextVar("agentrig_langchain_handler", default=None)
    register_configure_hook(variable, inheritable=True)
    _handler_variable = variable
    _make_handler = Handler


def plain(value: Any) -> Any:
    """Return JSON values for anything a node may pass on; what is too long is cut, and says so."""
    text = json_text(value)
    return cut(text, OUTPUT_LIMIT) if len(text) > OUTPUT_LIMIT else json.loads(text)
