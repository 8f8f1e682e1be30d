"""Finished rollouts, made by hand, for the tests of guards, credit and figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentrig import Outcome, Score, Span, Task, Trace, Triplet
from agentrig.rollouts import Rollout
from agentrig.traces import LLM_CALL, NODE


def trace_of(*nodes: str, ids: bool = True) -> Trace:
    """Return a trace with one LLM call under each of these nodes; an empty name is a call under the root."""
    spans = [Span(id="root", parent=None, name="rollout", start=0.0, end=9.0)]
    for i, node in enumerate(nodes):
        attributes: dict[str, Any] = {"request": {}, "response": {}}
        if ids:
            attributes |= {"prompt_token_ids": [1, 2], "response_token_ids": [3], "response_logprobs": [-0.5]}
        if node:
            chain = {NODE: node}
            spans.append(Span(id=f"n{i}", parent="root", name="chain.chain", start=i, end=i + 1, attributes=chain))
        parent = f"n{i}" if node else "root"
        spans.append(Span(id=f"c{i}", parent=parent, name=LLM_CALL, start=i, end=i + 1, attributes=attributes))
    return Trace(rollout_id="r", spans=tuple(spans))


def rollout(
    value: float | None = 1.0,
    *,
    failure: str | None = None,
    message: str = "",
    trace: Trace | None = None,
    triplets: Sequence[Triplet] = (),
    answer: Any = "SELECT 1",
    score: Score | None = None,
    group: str = "g",
) -> Rollout:
    """Return a rollout with that value, or that failure."""
    if failure is None and score is None:
        score = Score.invalid("the database is corrupt") if value is None else Score.ok(value)
    return Rollout(
        id="r",
        task=Task(id="t", input={"question": "?"}, private={"gold": "42"}),
        group=group,
        mode="train",
        step=1,
        outcome=Outcome(answer=None if failure else answer, failure=failure, message=message),
        score=score,
        trace=trace or trace_of("write_query"),
        triplets=triplets,
    )
