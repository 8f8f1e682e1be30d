"""A small OTLP/HTTP receiver: keeps the spans that it gets, read by the official protobuf package."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import attrs
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@attrs.define
class Received:
    """Its address, and the spans by id: name, parent, times and more, as plain values."""

    url: str = ""
    spans: dict[str, dict[str, Any]] = attrs.field(factory=dict)
    requests: int = 0


def value_of(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [value_of(item) for item in value.array_value.values]
    return getattr(value, kind)


def spans_in(request: ExportTraceServiceRequest) -> Iterator[dict[str, Any]]:
    """Yield the spans of a request."""
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
    received = Received()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if holds is not None:
                holds.wait()
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            received.requests += 1
            if status == 200 and self.path == "/v1/traces":
                for span in spans_in(ExportTraceServiceRequest.FromString(body)):
                    received.spans[f"{span['trace']}/{span['id']}"] = span
            self.send_response(status if self.path == "/v1/traces" else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *words: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    received.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield received
    finally:
        if holds is not None:
            holds.set()
        server.shutdown()
        server.server_close()
        thread.join()
