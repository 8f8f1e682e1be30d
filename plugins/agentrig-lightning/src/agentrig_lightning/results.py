"""What a `LitAgent` returned from a rollout: its reward, and spans to keep."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from agentlightning import Span as LightningSpan
from agentlightning.emitter import emit_reward
from agentlightning.types import SpanCoreFields
from opentelemetry.sdk.trace import ReadableSpan

from agentrig.traces import Trace
from agentrig.tracing.recorder import Recorder
from agentrig_lightning.spans import final_reward, from_lightning, to_lightning

log = logging.getLogger(__name__)

RUN_SCORE = "agentrig.score"
"""Attribute of the reward span that a run adds to a rollout: the score of the run's own reward."""


def reported(result: Any, recorder: Recorder) -> float | None:
    """Return the reward of a rollout from what its agent returned, as Agent Lightning's runner reads it.

    Spans that the agent returned are recorded, and so is a number, as the rollout's last reward.

    Raises:
        TypeError: The agent returned something else.
    """
    number = isinstance(result, int | float)
    if result is not None and not number and not isinstance(result, list):
        raise TypeError(f"the agent returned {type(result).__name__}; a LitAgent returns None, a number or spans")
    cores = [emit_reward(float(result), propagate=False)] if number else result
    if cores is not None and not cores:
        log.warning("rollout %s: the agent returned an empty list: it has no reward", recorder.rollout_id)
        return None
    if cores:
        recorder.adopt(from_lightning(recorder.rollout_id, [_span(core, recorder.rollout_id) for core in cores]).spans)
    return float(result) if number else final_reward(so_far(recorder))


def so_far(recorder: Recorder, attempt_id: str = "") -> list[LightningSpan]:
    """Return the spans of a rollout that have ended, as Agent Lightning's."""
    trace = Trace(rollout_id=recorder.rollout_id, spans=tuple(recorder.finished()))
    return to_lightning(trace, recorder.rollout_id, attempt_id)


def _span(returned: Any, rollout_id: str) -> LightningSpan:
    if isinstance(returned, ReadableSpan):
        return LightningSpan.from_opentelemetry(returned, rollout_id, "", 0)
    if isinstance(returned, SpanCoreFields):
        return LightningSpan.from_core_fields(returned, rollout_id=rollout_id)
    if isinstance(returned, LightningSpan):
        return returned
    raise TypeError(
        f"the agent returned a list with {type(returned).__name__}; a LitAgent returns None, a number or spans of "
        "OpenTelemetry or Agent Lightning"
    )


def score_span(value: float, *, rollout_id: str, attempt_id: str, sequence_id: int) -> LightningSpan:
    """Return the reward span with a run's score of a rollout."""
    core = emit_reward(value, attributes={RUN_SCORE: True}, propagate=False)
    return LightningSpan.from_core_fields(core, rollout_id=rollout_id, attempt_id=attempt_id, sequence_id=sequence_id)


def run_score(spans: Sequence[LightningSpan]) -> float | None:
    """Return the score that the run added to a rollout's spans, or None."""
    return final_reward([span for span in spans if span.attributes.get(RUN_SCORE)])
