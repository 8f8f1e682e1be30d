"""Spans as lines of OTLP's JSON, the form of the collector's file exporter and receiver."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from agentrig.errors import extra

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

IDS = ("traceId", "spanId", "parentSpanId")
"""OTLP's JSON has these in hexadecimal; protobuf's own form is base64."""


def line(spans: Sequence[ReadableSpan]) -> str:
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
