"""Traces and endpoints as Agent Lightning's spans and resources, and back."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

from agentrig.endpoints import Endpoint
from agentrig.lightning_import import import_lightning
from agentrig.traces import LLM_CALL, Span, Trace

import_lightning()  # before the imports below, which would bring litellm and its network calls

from agentlightning import (  # noqa: E402, TID253  (this module is itself imported lazily)
    LLM,
)
from agentlightning import Span as LightningSpan  # noqa: E402, TID253
from agentlightning.emitter import find_final_reward  # noqa: E402, TID253
from agentlightning.types import OtelResource, TraceStatus  # noqa: E402, TID253

log = logging.getLogger(__name__)


def to_lightning(trace: Trace, rollout_id: str, attempt_id: str) -> list[LightningSpan]:
    """Return a trace's spans as Agent Lightning's, with the attribute names that its adapters read."""
    trace_id = rollout_id.encode().hex()[-32:].rjust(32, "0")  # any 16 bytes do
    resource = OtelResource(attributes={}, schema_url="")
    return [
        LightningSpan.model_construct(
            rollout_id=rollout_id,
            attempt_id=attempt_id,
            sequence_id=i + 1,
            trace_id=trace_id,
            span_id=s.id,
            parent_id=s.parent,
            name=s.name,
            status=TraceStatus.model_construct(status_code="ERROR" if s.error else "OK", description=s.error),
            attributes=_lightning_attributes(s),
            events=[],
            links=[],
            start_time=s.start,
            end_time=s.end,
            context=None,
            parent=None,
            resource=resource,
        )
        for i, s in enumerate(trace.spans)
    ]


def _lightning_attributes(span: Span) -> dict[str, Any]:
    if span.name != LLM_CALL:
        simple = str | int | float | bool
        return {k: v if isinstance(v, simple) else json.dumps(v) for k, v in span.attributes.items()}
    request = span.attributes.get("request") or {}
    response = span.attributes.get("response") or {}
    found: dict[str, Any] = {
        k: span.attributes[k]
        for k in ("prompt_token_ids", "response_token_ids", "gen_ai.response.id")
        if span.attributes.get(k)
    }
    for i, message in enumerate(request.get("messages", [])):
        found[f"gen_ai.prompt.{i}.role"] = message.get("role")
        found[f"gen_ai.prompt.{i}.content"] = _text(message.get("content"))
    for i, choice in enumerate(response.get("choices") or []):
        message = choice.get("message") or {}
        found[f"gen_ai.completion.{i}.role"] = message.get("role")
        found[f"gen_ai.completion.{i}.content"] = _text(message.get("content"))
        found[f"gen_ai.completion.{i}.finish_reason"] = choice.get("finish_reason")
    for key in ("model", "temperature", "top_p", "max_tokens"):
        if key in request:
            found[f"gen_ai.request.{key}"] = request[key]
    if span.attributes.get("response_logprobs"):
        found["logprobs.content"] = json.dumps([{"logprob": x} for x in span.attributes["response_logprobs"]])
    return {k: v for k, v in found.items() if v is not None}


def _text(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content)


def from_lightning(rollout_id: str, spans: Sequence[LightningSpan]) -> Trace:
    """Return Agent Lightning's spans as a trace, for Agent Lightning's tracers."""
    found = [
        Span(
            id=s.span_id,
            parent=s.parent_id,
            name=s.name,
            start=s.start_time or 0.0,
            end=s.end_time or 0.0,
            error=s.status.description if s.status.status_code == "ERROR" else None,
            attributes=dict(s.attributes),
        )
        for s in sorted(spans, key=lambda s: (s.start_time or 0.0, s.sequence_id))
    ]
    return Trace(rollout_id=rollout_id, spans=tuple(found))


def final_reward(spans: Sequence[LightningSpan]) -> float | None:
    """Return the last reward that was emitted among spans, or None."""
    reward: float | None = find_final_reward(list(spans)) if spans else None
    return reward


def endpoint_of(resources: Any) -> Endpoint:
    """Return the endpoint among a rollout's resources, as agentrig or a foreign algorithm put it there."""
    for resource in resources.values():
        if isinstance(resource, LLM):
            parameters = dict(resource.sampling_parameters)
            extra = parameters.pop("agentrig", {})
            return Endpoint(
                base_url=resource.get_base_url(),
                model=resource.model,
                api_key=resource.api_key or "none",
                sampling=parameters,
                headers=extra.get("headers", {}),
                token_ids=extra.get("token_ids", True),
            )
    return Endpoint(base_url="http://127.0.0.1:9/v1", model="none")


def lightning_llm(endpoint: Endpoint, *, ours: bool = True) -> LLM:
    """Return an endpoint as Agent Lightning's resource.

    Args:
        endpoint: The model's server.
        ours: Whether to store agentrig's extra fields in the sampling parameters. A user's agent must not get
            them: it may pass all sampling parameters to its client.
    """
    extra = {"agentrig": {"headers": dict(endpoint.headers), "token_ids": endpoint.token_ids}} if ours else {}
    return LLM(
        endpoint=endpoint.base_url,
        model=endpoint.model,
        api_key=endpoint.api_key,
        sampling_parameters={**endpoint.sampling, **extra},
    )
