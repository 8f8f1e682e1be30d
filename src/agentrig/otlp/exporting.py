"""Spans sent to an OpenTelemetry collector by the official exporter, in a thread of its own; or as lines of a file."""

from __future__ import annotations

import atexit
import base64
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import attrs

from agentrig.background import Background
from agentrig.errors import extra
from agentrig.observers import RunEnd, RunError, RunStart, StepEnd
from agentrig.otlp.spans import Origin, spans_of
from agentrig.rollouts import Rollout
from agentrig.secrets import http_address
from agentrig.settings import setting
from agentrig.text import amount

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

BATCH = 16
"""Rollouts in one request."""


@attrs.frozen(kw_only=True)
class OtlpConfig:
    """Settings of `otlp`."""

    url: str = setting(
        "http://localhost:4318",
        help="the collector's OTLP/HTTP address; /v1/traces is added if it has no path",
        validator=http_address,
    )
    content: bool = setting(True, help="send messages, arguments and results too, and not only figures")
    timeout_s: float = setting(10.0, help="seconds for one request, with its retries", gt=0)
    queue: int = setting(500, help="how many requests may wait; more are dropped and counted", ge=1)
    flush_s: float = setting(30.0, help="seconds that the run waits for the collector at its end", ge=0)


class ExportError(Exception):
    """The collector did not take the spans."""


class Exporter:
    """Sends spans to a collector; `timeout_s` is for one request, with its retries."""

    def __init__(self, url: str, *, timeout_s: float) -> None:
        with extra("otlp", "a collector needs OpenTelemetry's exporter"):
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.trace.export import SpanExportResult

        whole = url if urlsplit(url).path.strip("/") else f"{url.rstrip('/')}/v1/traces"
        logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)  # what fails is counted, and said once
        self.url, self._success = whole, SpanExportResult.SUCCESS
        self._exporter = OTLPSpanExporter(endpoint=whole, timeout=timeout_s)

    def send(self, spans: Sequence[ReadableSpan]) -> None:
        """Send spans; returns once the collector has them.

        Raises:
            ExportError: It did not take them within the time.
        """
        if spans and self._exporter.export(spans) is not self._success:
            raise ExportError(f"{self.url} did not take {amount(len(spans), 'span')}: is an OTLP/HTTP collector there?")


class Otlp:
    """The observer `otlp`: sends the spans of every rollout, and never lets the run wait for the collector."""

    def __init__(self, config: OtlpConfig) -> None:
        self._exporter = Exporter(config.url, timeout_s=config.timeout_s)
        self._work = Background("otlp", limit=config.queue, patience_s=config.flush_s)
        self._content = config.content
        self._origin = origin_of({}, "", content=config.content)
        self._waiting: list[Rollout] = []
        self._runs = False

    def on_run_start(self, event: RunStart) -> None:
        """Note whose rollouts come."""
        self._origin = origin_of(event.config, Path(event.directory).resolve().name, content=self._content)
        self._runs = True

    def on_rollout_end(self, rollout: Rollout) -> None:
        """Collect a rollout; a command that is no run (`eval`, `dev`) has each sent by itself."""
        if not self._runs and not self._waiting:
            atexit.unregister(self.settle)
            atexit.register(self.settle)
        self._waiting.append(rollout)
        if len(self._waiting) >= BATCH or not self._runs:
            self._send()

    def on_step_end(self, event: StepEnd | RunEnd | RunError) -> None:
        """Send what is left of the step, or of the run."""
        self._send()

    on_run_end = on_run_error = on_step_end

    def settle(self) -> dict[str, Any]:
        """Send what is left, wait a bounded time, and return the counts of requests."""
        self._send()
        return {**attrs.asdict(self._work.settle()), "url": self._exporter.url}

    def _send(self) -> None:
        rollouts, self._waiting, origin = self._waiting, [], self._origin
        if rollouts:
            self._work.put(lambda: self._exporter.send([span for r in rollouts for span in spans_of(r, origin)]))


def origin_of(config: Mapping[str, Any], run: str, *, content: bool, whole: bool = False) -> Origin:
    """Return the origin of a run's rollouts, from its resolved configuration."""

    def used(kind: str) -> str:
        section = config.get(kind)
        return str(section.get("use", kind) if isinstance(section, Mapping) else kind).rpartition(":")[2]

    return Origin(run=run, agent=used("agent"), reward=used("reward"), content=content, whole=whole)


IDS = ("traceId", "spanId", "parentSpanId")
"""OTLP's JSON has these in hexadecimal; protobuf's own form is base64."""


def json_line(spans: Sequence[ReadableSpan]) -> str:
    """Return spans as one line: an `ExportTraceServiceRequest`."""
    with extra("otlp", "--file needs OpenTelemetry's exporter"):
        from google.protobuf.json_format import MessageToDict
        from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

    return json.dumps(_hexadecimal(MessageToDict(encode_spans(spans), use_integers_for_enums=True)))


def _hexadecimal(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: base64.b64decode(item).hex() if key in IDS and isinstance(item, str) else _hexadecimal(item)
            for key, item in value.items()
        }
    return [_hexadecimal(item) for item in value] if isinstance(value, list) else value
