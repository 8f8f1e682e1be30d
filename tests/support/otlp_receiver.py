"""A small OTLP/HTTP receiver: keeps the spans that it gets, read by the official protobuf package."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from agentrig.testing.scripted import LocalServer, QuietHandler, serving


class Received(LocalServer):
    """Keeps spans by id, as plain values: name, parent, times and more; no request ends before `holds` is set."""

    def __init__(self, status: int, holds: threading.Event | None) -> None:
        super().__init__(_Handler)
        self.spans: dict[str, dict[str, Any]] = {}
        self.requests, self.status, self.holds = 0, status, holds

    @property
    def url(self) -> str:
        return super().url.removesuffix("/v1")


class _Handler(QuietHandler):
    server: Received

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.holds is not None:
            self.server.holds.wait()
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        self.server.requests += 1
        status = self.server.status if self.path == "/v1/traces" else 404
        if status == 200:
            for span in spans_in(ExportTraceServiceRequest.FromString(body)):
                self.server.spans[f"{span['trace']}/{span['id']}"] = span
        self.reply(status, b"")


def value_of(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [value_of(item) for item in value.array_value.values]
    return getattr(value, kind)


def spans_in(request: ExportTraceServiceRequest) -> Iterator[dict[str, Any]]:
    for group in request.resource_spans:
        resource = {a.key: value_of(a.value) for a in group.resource.attributes}
        for scope in group.scope_spans:
            for s in scope.spans:
                yield {
                    "trace": s.trace_id.hex(),
                    "id": s.span_id.hex(),
                    "parent": s.parent_span_id.hex() or None,
                    "name": s.name,
                    "kind": s.kind,
                    "start": s.start_time_unix_nano,
                    "end": s.end_time_unix_nano,
                    "attributes": {a.key: value_of(a.value) for a in s.attributes},
                    "events": [
                        (e.name, e.time_unix_nano, {a.key: value_of(a.value) for a in e.attributes}) for e in s.events
                    ],
                    "error": s.status.message if s.status.code == 2 else None,
                    "resource": resource,
                    "schema": scope.schema_url or scope.scope.name,
                }


@contextmanager
def receiving(*, status: int = 200, holds: threading.Event | None = None) -> Iterator[Received]:
    """Receive spans; `holds` lets no request end before it is set."""
    with serving(Received(status, holds)) as server:
        try:
            yield server
        finally:
            if holds is not None:
                holds.set()
