"""Rewards that an agent gives in the middle of a rollout: which call they belong to, and what is refused."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from model_server import ModelServer

import agentrig
from agentrig import AgentFailure, Endpoint, Trace
from agentrig.pools import Job
from agentrig.rewards import given, given_to_calls
from agentrig.runners.attempt import run_agent
from agentrig.traces import FEEDBACK, REWARD
from agentrig.tracing.recorder import OUTPUT_LIMIT
from agentrig.tracing.recording import recording

openai = pytest.importorskip("openai")

Ask = Callable[[], Any]


@pytest.fixture
def ask(model: ModelServer) -> Iterator[Ask]:
    with openai.OpenAI(base_url=model.url, api_key="none", max_retries=0) as client:
        yield lambda: client.chat.completions.create(model="m", messages=[{"role": "user", "content": "Is 1 odd?"}])


def record(agent: Callable[[], Any], url: str = "") -> Trace:
    with recording("r1", token_ids=True, base_url=url) as recorder:
        agent()
    return recorder.trace()


def test_a_reward_belongs_to_the_last_call_before_it(ask: Ask) -> None:
    def agent() -> None:
        agentrig.reward(7)  # before any call
        ask()
        agentrig.reward(0.5, feedback="the query has no such column")
        ask()
        ask()
        agentrig.reward(0.1)
        agentrig.reward(1)

    trace = record(agent)
    assert given_to_calls(trace) == [0.5, None, 1.0], "of several, the last counts"
    assert [value for _, value in given(trace)] == [7.0, 0.5, 0.1, 1.0]
    assert given(trace)[1][0].attributes == {REWARD: 0.5, FEEDBACK: "the query has no such column"}
    assert given(trace)[1][0].parent == trace.spans[0].id


def test_a_reward_belongs_to_its_own_part_of_the_agent(ask: Ask) -> None:
    def branch(value: float, ready: threading.Event, go: threading.Event) -> None:
        with agentrig.span("branch"):
            ask()
            ready.set()
            go.wait(10)
            with agentrig.span("run"):  # has no call of its own
                agentrig.reward(value)

    def agent() -> None:
        with agentrig.span("plan"):
            ask()
        go, ready = threading.Event(), [threading.Event() for _ in range(2)]
        threads = [threading.Thread(target=branch, args=(v, r, go)) for v, r in zip((0.25, 0.75), ready, strict=True)]
        for thread, there in zip(threads, ready, strict=True):
            thread.start()
            assert there.wait(10)
        go.set()  # both calls have ended before either reward
        for thread in threads:
            thread.join()
        with agentrig.span("plan"):
            ask()
            agentrig.reward(-1)

    assert given_to_calls(record(agent)) == [None, 0.25, 0.75, -1.0]


def test_a_call_to_a_judge_is_no_call_of_the_policy(ask: Ask, model: ModelServer) -> None:
    from model_server import model_server

    with model_server() as judge, openai.OpenAI(base_url=judge.url, api_key="none") as client:

        def agent() -> None:
            ask()
            client.chat.completions.create(model="judge", messages=[{"role": "user", "content": "Good?"}])
            agentrig.reward(0.5)

        trace = record(agent, model.url)
    assert given_to_calls(trace) == [0.5, None]


def test_a_call_that_failed_or_goes_on_gets_none(ask: Ask, model: ModelServer) -> None:
    def agent() -> None:
        ask()
        with openai.OpenAI(base_url=model.url, api_key="none", max_retries=0) as client:
            with pytest.raises(openai.APIStatusError):
                client.chat.completions.create(model="m", messages=[{"role": "user", "content": "[status=503]"}])
            body: Any = [{"role": "user", "content": "Is 1 odd?"}]
            with client.chat.completions.create(model="m", messages=body, stream=True) as stream:
                agentrig.reward(0.5)
                assert list(stream)

    trace = record(agent)
    assert given_to_calls(trace) == [0.5, None]


@pytest.mark.parametrize("value", [0, True, -1e9, Fraction(1, 4), np.float32(0.5), np.int64(3)])
def test_any_finite_number_is_a_reward(value: Any) -> None:
    ((span, found),) = given(record(lambda: agentrig.reward(value)))
    assert found == float(value)
    assert type(span.attributes[REWARD]) is float


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (math.nan, "nan"),
        (math.inf, "inf"),
        (-1.1e9, "between -1e+09 and 1e+09"),
        (10**400, "OverflowError"),
        ("0.5", "'0.5' (str); give a number"),
        (None, "NoneType"),
        ([0.5], "list"),
        (np.zeros(2), "give a number"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_reward_is_refused_in_the_agent(value: Any, says: str, model: ModelServer) -> None:
    with pytest.raises(AgentFailure) as refused:  # also outside of a rollout
        agentrig.reward(value)
    assert says in str(refused.value)
    job = Job(id="r", input={}, endpoint=Endpoint(base_url=model.url, model="m"))
    result = run_agent(lambda given, endpoint: agentrig.reward(value), job)
    assert result.outcome.failure == "bad-reward"
    assert says in result.outcome.message
    assert given(result.trace) == []


def test_feedback_is_a_text_of_any_length(model: ModelServer) -> None:
    with pytest.raises(AgentFailure, match="feedback is int; give a text"):
        agentrig.reward(0.5, feedback=5)  # type: ignore[arg-type]
    trace = record(lambda: agentrig.reward(0.5, feedback="é\ud800" * OUTPUT_LIMIT))
    kept = given(trace)[0][0].attributes[FEEDBACK]
    assert kept.startswith("é\ufffd")
    assert len(kept) < OUTPUT_LIMIT + 200


@pytest.mark.parametrize("value", ["0.5", None, math.nan, math.inf, 1e10, [1.0], {"a": 1}])
def test_a_span_that_only_looks_like_a_reward_is_none(value: Any) -> None:
    """An agent may write any span; what it records this way is not checked in its process."""
    with recording("r1", token_ids=True) as recorder:
        recorder.add("reward", 1.0, {REWARD: value})
    assert given(recorder.trace()) == []
