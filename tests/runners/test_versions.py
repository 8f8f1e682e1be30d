"""Rollouts of other weights than their step takes are failures with a kind of their own."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from rollouts import trace_of

from agentrig import Outcome, Task, Trace
from agentrig.errors import RunStopped
from agentrig.plan import Plan
from agentrig.pools import Result
from agentrig.rollouts import Rollout
from agentrig.run.guards import check_failures
from agentrig.runners.engine import Versions
from agentrig.runners.scorer import Scorer
from agentrig.traces import SERVER


def answered(*fingerprints: str | None) -> Trace:
    """Return a trace whose calls were answered with these fingerprints; None is a call to another server."""
    trace = trace_of(*("write_query" for _ in fingerprints))
    for call, fingerprint in zip(trace.llm_calls(), fingerprints, strict=True):
        attributes: dict[str, Any] = call.attributes  # type: ignore[assignment]
        if fingerprint is None:
            attributes[SERVER] = "api.example.com"
        attributes["response"] = {"system_fingerprint": fingerprint or "v999"}
    return trace


def test_the_version_of_a_rollout_is_checked_and_recorded(toy_plan: Callable[..., Plan]) -> None:
    plan = toy_plan()
    told: list[Rollout] = []
    engine, _ = plan.engine(scorer=Scorer(plan.build("reward"), budget_s=2), adapter=plan.build("adapter"))
    engine._on_rollout = told.append
    traces = {
        "one-behind": answered("v5", "v5"),
        "both": answered("v5", "v6"),
        "two-behind": answered("v6", "v4", "v6"),
        "newer": answered("v7"),
        "unstated": answered("vllm-0.24.0"),
        "elsewhere": answered("v6", None),
    }
    task = Task(id="t", input={"number": 1}, private={"parity": "odd"})
    results = [Result(id=i, outcome=Outcome(answer="odd"), trace=t, start=0, duration_s=1) for i, t in traces.items()]
    waiting = {r.id: (task, "g") for r in results}

    def judged(versions: Versions | None) -> dict[str, Rollout]:
        return {r.id: r for r in engine.scored(results, waiting, step=7, mode="train", versions=versions)}

    found = judged(Versions.of(6, step=7, max_staleness=1))
    assert {i: r.version for i, r in found.items()} == {
        "one-behind": 5, "both": 5, "two-behind": 4, "newer": 7, "unstated": 6, "elsewhere": 6,
    }  # fmt: skip
    assert {i: r.failure for i, r in found.items() if r.failure} == {
        "two-behind": "stale-weights", "newer": "unknown-weights",
    }  # fmt: skip
    assert (found["two-behind"].value, found["two-behind"].score, found["two-behind"].triplets) == (None, None, ())
    assert [r.failure for r in told] == [r.failure for r in found.values()], "observers see the failure"
    message = found["two-behind"].outcome.message
    assert re.fullmatch(r"call c1 was answered with weights of version 4; its step takes version 5 to 6", message)
    with pytest.raises(RunStopped, match=r"1 x stale-weights: for example call c1 was answered with weights of versi"):
        check_failures(list(found.values()), 0.1, step=7, mode="train")
    fresh = judged(Versions(served=6, oldest=6))
    assert {i for i, r in fresh.items() if r.failure == "stale-weights"} == {"one-behind", "both", "two-behind"}
    free = judged(None)
    assert not any(r.failure for r in free.values())
    assert [r.version for r in free.values()] == [5, 5, 4, 7, None, 6]


def test_a_server_with_older_weights_than_a_step_takes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"step 7 would be sampled with weights of version 4; .* takes version 5 to 6"):
        Versions.of(4, step=7, max_staleness=1)
    with pytest.raises(ValueError, match=r"with max_staleness = 0 it takes version 6"):
        Versions.of(5, step=7, max_staleness=0)
    assert Versions.of(5, step=7, max_staleness=1) == Versions(served=5, oldest=5)
