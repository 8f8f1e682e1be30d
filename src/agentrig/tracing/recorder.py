"""The recorder: collects the spans of the current rollout, found through a context variable."""

from __future__ import annotations

import json
import logging
import os
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from urllib.parse import urlsplit

import attrs

from agentrig.endpoints import RECORDED
from agentrig.errors import AgentFailure
from agentrig.rewards import VALUE_LIMIT
from agentrig.text import cut, json_text, plain_values, storable, words_of
from agentrig.traces import CUT, FEEDBACK, LLM_CALL, MISSED, REWARD, SERVER, Span, Trace, mapping

log = logging.getLogger(__name__)

active: ContextVar[Recorder | None] = ContextVar("agentrig_recorder", default=None)
parent_span: ContextVar[str | None] = ContextVar("agentrig_parent_span", default=None)

OUTPUT_LIMIT = 20_000
"""Longest node output that is kept, in characters of JSON."""


BAD_REWARD = "bad-reward"
"""The failure of a rollout whose agent gave something that is no reward, and did not handle the error."""


class Recorder:
    """Collects the spans of one rollout.

    Args:
        rollout_id: The rollout's id.
        token_ids: Request token ids and log-probabilities from the endpoint with every call.
        muted: Request token ids, but record nothing, because another tracer does.
        base_url: The endpoint's URL. Calls to other servers are recorded, but not changed and never trained on.
            Empty: every server counts as the endpoint.
        gateway: Whether this URL is the gateway's, which records the calls to it; see `join`.
        sampling: Sampling fields of the run, for calls to the endpoint.
        replace: Whether they replace those of the agent; see `agentrig.endpoints.sampled_as`.
        key: The endpoint's key, sent with calls to it whatever key the agent's client has. Empty: the agent's is sent.
        headers: More headers of calls to the endpoint.

    Attributes:
        root: The id of the root span.
        ended: Whether the rollout has ended; calls to the endpoint are refused then.
        under_way: What identifies the calls that have not ended.
        outside_in: The id of the span to which calls from outside of this process belong: the program's, or the root.
        about: More attributes of the root span.
    """

    def __init__(
        self,
        rollout_id: str,
        *,
        token_ids: bool,
        muted: bool = False,
        base_url: str = "",
        gateway: bool = False,
        key: str = "",
        headers: Mapping[str, str] | None = None,
        sampling: Mapping[str, Any] | None = None,
        replace: bool = False,
    ) -> None:
        self.rollout_id = rollout_id
        self.gateway = gateway
        self._headers = {**(headers or {}), **({"Authorization": f"Bearer {key}"} if key else {})}
        self._process = os.getpid()
        self.sampling, self.replace = sampling or {}, replace
        self.token_ids = token_ids
        self.server = server_of(urlsplit(base_url)) if base_url else None
        self.muted = muted
        self.root = self.outside_in = uuid.uuid4().hex[:16]
        self._start = time.time()
        self._error: str | None = None
        self._spans: list[Span] = []
        self._open: dict[str, tuple[str | None, str, float, dict[str, Any]]] = {}
        self._hidden: dict[str, str | None] = {}
        self.streams: list[Any] = []
        self._missed: Counter[str] = Counter()
        self._heard: dict[str, dict[str, Any]] = {}
        self._cut = 0
        self.ended = False
        self.under_way: set[int] = set()
        self.about: dict[str, str] = {}

    told = False

    @staticmethod
    def outside() -> str | None:
        """Return the id of OpenTelemetry's current span; replaced by the part that records its spans."""
        return None

    def parent(self) -> str:
        """Return the innermost open span around what happens now, agentrig's or OpenTelemetry's; else the root."""
        inner = parent_span.get() or self.root
        other = self.outside()
        if other not in self._open:
            return inner
        above: str | None = other
        while above in self._open and above != inner:
            above = self._open[above][0]
        return other if other is not None and above == inner else inner

    @property
    def headers(self) -> dict[str, str]:
        """The headers of calls to the endpoint; a process that the agent has forked records none of its calls."""
        forked = os.getpid() != self._process
        return {name: value for name, value in self._headers.items() if not (forked and name == RECORDED)}

    def is_open(self, span_id: str) -> bool:
        """Return whether a span has started and not ended."""
        return span_id in self._open

    def open(
        self,
        span_id: str,
        parent: str | None,
        name: str,
        attributes: dict[str, Any],
        *,
        start: float | None = None,
        current: bool = True,
    ) -> None:
        """Start a span and, if it is `current`, make it the parent of the following spans in this context."""
        self._open[span_id] = (self._shown(parent) or self.root, name, start or time.time(), attributes)
        if current:
            parent_span.set(span_id)

    def hide(self, span_id: str, parent: str | None) -> None:
        """Start an operation without a span of its own; spans inside it get its parent as their parent."""
        self._open.pop(span_id, None)
        self._hidden[span_id] = parent

    def _shown(self, span_id: str | None) -> str | None:
        while span_id in self._hidden:
            span_id = self._hidden[span_id]
        return span_id

    def close(
        self,
        span_id: str,
        *,
        error: str | None = None,
        end: float | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> None:
        """End a span."""
        opened = self._open.pop(span_id, None)
        if opened is None:
            return
        parent, name, start, kept = opened
        kept.update(attributes or {})
        self._spans.append(
            Span(
                id=span_id,
                parent=parent,
                name=name,
                start=start,
                end=end or time.time(),
                error=error,
                attributes=kept,
            )
        )
        parent_span.set(parent)

    def keep(self, span: Span) -> None:
        """End a span that OpenTelemetry recorded; the parent stays the one with which it was opened.

        An LLM call that the httpx tap has recorded inside it is not recorded twice.
        """
        opened = self._open.pop(span.id, None)
        parent = opened[0] if opened is not None else self.root
        known = [s.attributes.get("gen_ai.response.id") for s in self._spans if s.name == LLM_CALL]
        response = span.attributes.get("gen_ai.response.id")
        if span.name == LLM_CALL and response is not None and response in known:
            self.hide(span.id, parent)
            return
        self._spans.append(attrs.evolve(span, parent=parent))

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
                parent=parent or self.parent(),
                name=name,
                start=start,
                end=time.time(),
                error=error,
                attributes=attributes,
            )
        )

    def hear(self, attributes: dict[str, Any]) -> None:
        """Remember a call that another tracer records: with the exact bodies, which it does not have."""
        response_id = mapping(attributes.get("response")).get("id")
        if response_id:
            self._heard[str(response_id)] = attributes

    def adopt(self, spans: Iterable[Span]) -> None:
        """Add spans that another tracer recorded; those without a parent go under the root.

        LLM calls get the bodies that the httpx tap has seen. Those to another server lose their token ids.
        """
        known = {s.id for s in self._spans}
        for span in spans:
            if span.id in known:
                continue
            attributes = dict(span.attributes)
            if span.name == LLM_CALL:
                attributes.update(self._heard.get(str(attributes.get("gen_ai.response.id")), {}))
                if SERVER in attributes:
                    for key in ("prompt_token_ids", "response_token_ids", "response_logprobs"):
                        attributes.pop(key, None)
            self._spans.append(attrs.evolve(span, parent=span.parent or self.root, attributes=attributes))

    def join(self, spans: Iterable[Span], *, cut: int = 0) -> None:
        """Add the spans that the gateway recorded; those without a known parent go under `outside_in`.

        A call that another tracer has recorded too stays one span, under that tracer's parent: it gets the bodies and
        token ids, which only the gateway has.

        `cut` is how many calls it cut because the rollout had ended.
        """
        self._cut += cut
        own = {str(s.attributes.get("gen_ai.response.id")): i for i, s in enumerate(self._spans) if s.name == LLM_CALL}
        known = {self.root, *(s.id for s in self._spans), *self._open, *self._hidden}
        for span in spans:
            place = own.get(str(span.attributes.get("gen_ai.response.id") or ""))
            if span.name == LLM_CALL and place is not None:
                there = self._spans[place]
                self._spans[place] = attrs.evolve(there, attributes={**there.attributes, **span.attributes})
                continue
            known.add(span.id)
            self._spans.append(attrs.evolve(span, parent=span.parent if span.parent in known else self.outside_in))

    def miss(self, way: str) -> None:
        """Count a connection to the endpoint by another library, or a call of another API; the gateway sees both."""
        if not self.muted and not self.gateway:
            self._missed[way] += 1

    def refuse(self) -> None:
        """Say once in a process that a call came after the end of its rollout."""
        if not self.told:
            Recorder.told = True
            log.warning(
                "a thread of the agent called the model after its rollout %s had ended: such calls are refused, and "
                "those under way at the end are not recorded (agentrig.cut of the trace counts them)",
                self.rollout_id,
            )

    def fail(self, error: str) -> None:
        """Store the error that ended the rollout."""
        self._error = error

    def finished(self) -> list[Span]:
        """Return the spans that have ended so far, in order of start."""
        shown = [attrs.evolve(s, parent=self._shown(s.parent)) if s.parent in self._hidden else s for s in self._spans]
        return sorted(shown, key=lambda s: s.start)

    def trace(self) -> Trace:
        """Return the recorded spans, in order of start; spans that are still open are closed with an error.

        If the agent never closed a stream, for example because it raised, the part that was read is recorded.
        """
        for stream in self.streams:
            stream.close()
        for span_id in list(self._open):
            self.close(span_id, error="never ended")
        cut = self._cut + (len(self.under_way) if self.ended else 0)
        root = Span(
            id=self.root,
            parent=None,
            name="rollout",
            start=self._start,
            end=time.time(),
            error=self._error,
            attributes={
                **({MISSED: dict(self._missed)} if self._missed else {}),
                **({CUT: cut} if cut else {}),
                **self.about,
            },
        )
        return Trace(rollout_id=self.rollout_id, spans=(root, *self.finished()))


def current() -> Recorder | None:
    """Return the recorder of the current rollout in this context, or None."""
    return active.get()


@contextmanager
def opened(name: str, attributes: dict[str, Any]) -> Iterator[str | None]:
    """Record a span around this block, which may add attributes; yield its id, None outside a rollout."""
    recorder = active.get()
    if recorder is None:
        yield None
        return
    span_id, error = uuid.uuid4().hex[:16], None
    recorder.open(span_id, recorder.parent(), name, attributes)
    try:
        yield span_id
    except BaseException as raised:
        error = words_of(raised)
        raise
    finally:
        recorder.close(span_id, error=error)


@contextmanager
def span(name: str) -> Iterator[None]:
    """Name a part of a plain-Python agent, like a node of a graph.

    An adapter can then match the calls made inside it. Outside a rollout it does nothing.

    Example:
        ```python
        with agentrig.span("write_query"):
            reply = client.chat.completions.create(...)
        ```
    """
    with opened("agent", {"agent.name": name}):
        yield


def reward(value: float, *, feedback: str = "") -> None:
    """Give a reward to a call to the model, in the middle of a rollout. Outside a rollout it is only checked.

    It belongs to the last call to the run's model that has ended: the last in the innermost span around this line
    (`agentrig.span`, a graph node, a tool, the rollout) that has one. Of several for one call the last counts. Given
    before any call, it belongs to none.

    The credit `turn` learns from it where the run's reward scores no calls itself (`Score.calls`). The rollout's own
    reward is still what the run's reward says: only `own` takes the last one, of an agent that returns no number.

    Args:
        value: A finite number of at most 1e9 in size.
        feedback: What was good or bad about the call; it is recorded beside the reward.

    Raises:
        AgentFailure: The value is no such number, or the feedback no text; the kind is `bad-reward`.

    Example:
        ```python
        with agentrig.span("write_query"):
            query = ask(client, question)
            rows, error = run(query)
            agentrig.reward(0.0 if error else 0.5, feedback=error or "")
        ```
    """
    attributes: dict[str, Any] = {REWARD: reward_number(value)}
    if not isinstance(feedback, str):
        raise AgentFailure(f"a reward's feedback is {type(feedback).__name__}; give a text", kind=BAD_REWARD)
    if feedback:
        attributes[FEEDBACK] = cut(storable(feedback), OUTPUT_LIMIT)
    if (recorder := active.get()) is not None:
        recorder.add("reward", time.time(), attributes)


def reward_number(value: Any) -> float:
    """Return an agent's reward as a plain number; one not finite or over `VALUE_LIMIT` in size is a `bad-reward`."""
    said = f"agentrig.reward was given {value!r:.80} ({type(value).__name__}); give a number"
    try:
        number = float(value) if hasattr(value, "__float__") else None  # float() would read a text
    except Exception as error:
        raise AgentFailure(f"{said}: {words_of(error)}", kind=BAD_REWARD) from error
    if number is None or not abs(number) <= VALUE_LIMIT:
        raise AgentFailure(f"{said} between -{VALUE_LIMIT:g} and {VALUE_LIMIT:g}", kind=BAD_REWARD)
    return number


def server_of(url: Any) -> tuple[str, int]:
    """Return a URL's host and port; all names of this machine give the same host."""
    host = str(getattr(url, "hostname", None) or getattr(url, "host", "")).lower()
    port = url.port or (443 if url.scheme == "https" else 80)
    return ("localhost" if host in ("127.0.0.1", "::1", "0.0.0.0") else host), port


def plain(value: Any) -> Any:
    """Return any node output as JSON values; a long one is cut, with a note, and so is a deep one."""
    text = json_text(value)
    return cut(text, OUTPUT_LIMIT) if len(text) > OUTPUT_LIMIT else plain_values(json.loads(text))
