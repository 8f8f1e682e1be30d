"""The recorder: collects the spans of the current rollout, found through a context variable."""

from __future__ import annotations

import json
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from urllib.parse import urlsplit

import attrs

from agentrig.text import cut, json_text, words_of
from agentrig.traces import MISSED, Span, Trace

active: ContextVar[Recorder | None] = ContextVar("agentrig_recorder", default=None)
parent_span: ContextVar[str | None] = ContextVar("agentrig_parent_span", default=None)

OUTPUT_LIMIT = 20_000
"""Longest node output that is kept, in characters of JSON."""


class Recorder:
    """Collects the spans of one rollout.

    Args:
        rollout_id: The rollout's id.
        token_ids: Request token ids and log-probabilities from the endpoint with every call.
        muted: Request token ids, but record nothing, because another tracer does.
        base_url: The endpoint's URL. Calls to other servers are recorded, but not changed and never trained on.
            Empty: every server counts as the endpoint.
    """

    def __init__(self, rollout_id: str, *, token_ids: bool, muted: bool = False, base_url: str = "") -> None:
        self.rollout_id = rollout_id
        self.token_ids = token_ids
        self.server = server_of(urlsplit(base_url)) if base_url else None
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
        """Start a span and make it the parent of the following spans in this context."""
        while parent in self._hidden:
            parent = self._hidden[parent]
        self._open[span_id] = (parent or self.root, name, time.time(), attributes)
        parent_span.set(span_id)

    def hide(self, span_id: str, parent: str | None) -> None:
        """Start an operation without a span of its own; spans inside it get its parent as their parent."""
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
        parent_span.set(parent)

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
                parent=parent or parent_span.get() or self.root,
                name=name,
                start=start,
                end=time.time(),
                error=error,
                attributes=attributes,
            )
        )

    def adopt(self, spans: Iterable[Span]) -> None:
        """Add spans that another tracer recorded; those without a parent go under the root."""
        self._spans += [s if s.parent else attrs.evolve(s, parent=self.root) for s in spans]

    def miss(self, library: str) -> None:
        """Count a connection to the endpoint by another library than httpx: its calls are not recorded."""
        if not self.muted:
            self._missed[library] += 1

    def fail(self, error: str) -> None:
        """Store the error that ended the rollout."""
        self._error = error

    def trace(self) -> Trace:
        """Return the recorded spans, in order of start; spans that are still open are closed with an error.

        If the agent never closed a stream, for example because it raised, the part that was read is recorded.
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


def current() -> Recorder | None:
    """Return the recorder of the current rollout in this context, or None."""
    return active.get()


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
    recorder = active.get()
    if recorder is None:
        yield
        return
    span_id = uuid.uuid4().hex[:16]
    recorder.open(span_id, parent_span.get(), "agent", {"agent.name": name})
    try:
        yield
    except BaseException as error:
        recorder.close(span_id, error=words_of(error))
        raise
    recorder.close(span_id)


def server_of(url: Any) -> tuple[str, int]:
    """Return a URL's host and port; all names of this machine give the same host."""
    host = str(getattr(url, "hostname", None) or getattr(url, "host", "")).lower()
    port = url.port or (443 if url.scheme == "https" else 80)
    return ("localhost" if host in ("127.0.0.1", "::1", "0.0.0.0") else host), port


def plain(value: Any) -> Any:
    """Return any node output as JSON values; a long one is cut, with a note."""
    text = json_text(value)
    return cut(text, OUTPUT_LIMIT) if len(text) > OUTPUT_LIMIT else json.loads(text)
