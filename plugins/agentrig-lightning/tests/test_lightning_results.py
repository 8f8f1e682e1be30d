"""What a `LitAgent` emits, records and returns in its rollout, on agentrig's tracer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import agentlightning as agl
import agentrig_lightning as lightning
import pytest
from agentlightning.emitter import find_reward_spans, get_reward_value
from agentlightning.tracer.base import clear_active_tracer, get_active_tracer
from agentlightning.types import SpanCoreFields, TraceStatus
from agentrig_lightning.calls import LitAgentCall
from agentrig_lightning.recorder_tracer import SpanAdapter
from agentrig_lightning.spans import final_reward, from_lightning, run_score, score_span, to_lightning
from model_server import ModelServer
from openai import OpenAI
from opentelemetry import trace as otel
from opentelemetry.sdk.trace import TracerProvider

import agentrig
from agentrig import AgentFailure, Score, Task
from agentrig.adapters import Triplet, triplet_of
from agentrig.agents import Outcome
from agentrig.endpoints import Endpoint
from agentrig.pools import Result
from agentrig.rewards import given_to_calls
from agentrig.runners.engine import RolloutEngine
from agentrig.runners.scorer import Scorer
from agentrig.traces import LLM_CALL, REWARD, Span, Trace
from agentrig.tracing.recording import recording

IMAGE = [{"type": "text", "text": "Is 1 odd?"}, {"type": "image_url", "image_url": {"url": "file:///a.png"}}]
Roll = Callable[[Callable[[Callable[..., str]], Any]], tuple[Any, Trace]]


def every_call(trace: Trace) -> list[Triplet]:
    return [t for c in trace.llm_calls() if (t := triplet_of(c, node="n")) is not None]


def named(trace: Trace, name: str) -> Span:
    (found,) = [s for s in trace.spans if s.name == name]
    return found


@pytest.fixture
def roll(model: ModelServer) -> Iterator[Roll]:
    """Run a function as a `LitAgent`'s rollout; it gets a function that calls the model."""

    def run(body: Callable[[Callable[..., str]], Any]) -> tuple[Any, Trace]:
        class Agent(agl.LitAgent[Any]):
            def rollout(self, task: Any, resources: Any, rollout: Any) -> Any:
                llm = resources["main_llm"]

                def ask(content: Any = "Is 1 odd?") -> str:
                    with OpenAI(base_url=llm.endpoint, api_key="none") as client:
                        reply = client.chat.completions.create(
                            model=llm.model, messages=[{"role": "user", "content": content}]
                        )
                    return str(reply.choices[0].message.content)

                return body(ask)

        call = LitAgentCall(Agent)
        with recording("r1", token_ids=True, base_url=model.url) as recorder:
            answer = call({}, Endpoint(base_url=model.url, model="m", token_ids=True))
        return answer, recorder.trace()

    yield run
    clear_active_tracer()


def emits_twice(ask: Callable[..., str]) -> None:
    """A rollout's body: two calls, each with a reward."""
    ask(IMAGE)
    agl.emit_reward(0.1)
    ask()
    agl.emit_reward(0.9)


def test_each_emitted_reward_stays_with_its_call(roll: Roll) -> None:
    answer, trace = roll(emits_twice)
    assert answer == 0.9
    first, second = SpanAdapter(every_call).adapt(to_lightning(trace, "r1", "a"))
    assert (first.reward, second.reward) == (0.1, 0.9)
    assert first.prompt["image_urls"] == ["file:///a.png"]
    assert second.prompt["raw_content"] == [{"role": "user", "content": "Is 1 odd?"}]
    assert second.response["raw_content"] == [{"role": "assistant", "content": "odd", "finish_reason": "stop"}]
    assert second.response["logprobs"] == [{"logprob": -0.25}] * 3
    assert bytes(second.response["token_ids"]) == b"odd"
    ids = [c.attributes["gen_ai.response.id"] for c in trace.llm_calls()]
    assert [t.metadata["response_id"] for t in (first, second)] == ids
    assert (second.metadata["agent_name"], second.metadata["request"]["model"]) == ("n", "m")


def test_rewards_of_calls_feed_the_credit_turn_and_reach_theirs_too(roll: Roll) -> None:
    def body(ask: Callable[..., str]) -> None:
        agl.emit_reward(9.0)
        ask()
        agl.emit_reward({"form": 0.25, "length": 7.0}, primary_key="form")
        ask()
        agentrig.reward(0.5, feedback="better")

    answer, trace = roll(body)
    assert given_to_calls(trace) == [0.25, 0.5]
    assert answer == 0.5, "the last one is the rollout's, whoever gave it"
    spans = to_lightning(trace, "r1", "a")
    assert [get_reward_value(s) for s in find_reward_spans(spans)] == [9.0, 0.25, 0.5]
    assert [t.reward for t in SpanAdapter(every_call).adapt(spans)] == [0.25, 0.5]
    assert given_to_calls(from_lightning("r1", spans)) == [0.25, 0.5], "there and back"
    assert not [key for span in spans for key in span.attributes if key == REWARD]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e10])
def test_an_emitted_reward_that_is_none_is_refused_in_the_agent(roll: Roll, value: float) -> None:
    def body(ask: Callable[..., str]) -> None:
        ask()
        agl.emit_reward(value)

    with pytest.raises(AgentFailure, match="give a number between") as refused:
        roll(body)
    assert refused.value.kind == "bad-reward"


@pytest.mark.parametrize(("value", "rewards"), [(0.9, [0.1, 0.9]), (1.0, [1.0, 1.0])])
def test_emitted_rewards_reach_agentrigs_algorithms_unless_another_reward_scores(
    roll: Roll, value: float, rewards: list[float]
) -> None:
    answer, trace = roll(emits_twice)
    spec = lightning.adapter(agl.TracerTraceToTriplet, name="theirs", summary="Theirs.")
    scorer = Scorer(lambda task, outcome, budget_s: Score.ok(value), budget_s=5)
    engine = RolloutEngine(None, scorer=scorer, adapter=spec.build(None))  # type: ignore[arg-type]  # runs nothing
    for outcome in (Outcome(answer=answer), Outcome(answer="odd", own_reward=answer)):
        result = Result(id="r1", outcome=outcome, trace=trace, start=0.0, duration_s=1.0)
        (rollout,) = engine.scored([result], {"r1": (Task(id="t", input={}), "g")}, step=1, mode="train")
        assert [t.reward for t in rollout.triplets] == rewards


def test_the_score_of_the_runs_reward_is_the_last_calls(roll: Roll) -> None:
    def body(ask: Callable[..., str]) -> float:
        ask()
        agl.emit_reward(0.1)
        ask()
        return 0.5

    answer, trace = roll(body)
    spans = to_lightning(trace, "r1", "a")
    assert answer == final_reward(spans) == 0.5
    assert given_to_calls(trace) == [0.1, 0.5]
    assert run_score(spans) is None
    assert [t.reward for t in SpanAdapter(every_call).adapt(spans)] == [0.1, 0.5]
    judged = [*spans, score_span(1.0, rollout_id="r1", attempt_id="a", sequence_id=99)]
    assert [t.reward for t in SpanAdapter(every_call).adapt(judged)] == [0.1, 1.0]


def test_operations_are_spans_around_the_calls_inside(roll: Roll) -> None:
    def body(ask: Callable[..., str]) -> None:
        @agl.operation(kind="search")
        def look_up(word: str) -> str:
            return ask(word)

        @agl.operation
        def fail() -> None:
            raise ValueError("no page")

        look_up("Is 1 odd?")
        with pytest.raises(ValueError, match="no page"):
            fail()
        with get_active_tracer().operation_context("plan", {"step": 1}) as operation:  # type: ignore[union-attr]
            operation.record_attributes({"steps": (1, 2)})
        agl.emit_object({"text": "x" * 30_000})
        assert [s.name for s in get_active_tracer().get_last_trace()].count("plan") == 1  # type: ignore[union-attr]

    _, trace = roll(body)
    found, failed = [s for s in trace.spans if s.name == "agentlightning.operation"]
    assert found.attributes["agentlightning.operation.name"] == "look_up"
    assert found.attributes["agentlightning.operation.input.word"] == "Is 1 odd?"
    assert (found.attributes["agentlightning.operation.output"], found.attributes["kind"]) == ("odd", "search")
    assert [s.id for s in trace.ancestors(named(trace, LLM_CALL))] == [found.id, trace.spans[0].id]
    assert (failed.error, failed.attributes["exception.type"]) == ("no page", "ValueError")
    assert named(trace, "plan").attributes == {"step": 1, "steps": [1, 2]}
    assert "x" * 30_000 in named(trace, "agentlightning.object").attributes["agentlightning.object.json"]


def test_raw_opentelemetry_spans_are_recorded_around_the_calls_inside(roll: Roll) -> None:
    tracer = otel.get_tracer("mine")

    def body(ask: Callable[..., str]) -> None:
        with tracer.start_as_current_span("outer") as outer:
            outer.set_attribute("sizes", [1, 2])
            outer.add_event("tried", {"times": 3})
            with agl.operation(name="inner"), tracer.start_as_current_span("innermost"):
                ask()
        tracer.start_span("lost")

    _, trace = roll(body)
    names = [s.name for s in trace.ancestors(named(trace, LLM_CALL))]
    assert names == ["innermost", "agentlightning.operation", "outer", "rollout"]
    outer = named(trace, "outer")
    assert outer.attributes == {"sizes": [1, 2]}
    (event,) = outer.otel["events"]
    assert (event["name"], event["attributes"]) == ("tried", {"times": 3})
    assert named(trace, "lost").error == "never ended"
    (theirs,) = [s for s in to_lightning(trace, "r1", "a") if s.name == "outer"]
    assert theirs.events[0].name == "tried"


def test_a_call_that_the_agents_instrumentation_records_too_is_recorded_once(roll: Roll, model: ModelServer) -> None:
    def body(ask: Callable[..., str]) -> None:
        with otel.get_tracer("instrumentation").start_as_current_span(LLM_CALL) as span:
            ask()
            span.set_attribute("gen_ai.response.id", f"chatcmpl-{len(model.requests)}")

    _, trace = roll(body)
    (call,) = trace.llm_calls()
    assert (call.parent, bytes(call.attributes["response_token_ids"])) == (trace.spans[0].id, b"odd")


@pytest.mark.parametrize("kind", ["opentelemetry", "core", "lightning"])
def test_returned_spans_are_kept(roll: Roll, kind: str) -> None:
    core = agl.emit_reward(0.7, propagate=False)

    def body(ask: Callable[..., str]) -> list[Any]:
        ask()
        if kind == "opentelemetry":
            span: Any = TracerProvider().get_tracer("mine").start_span(core.name, attributes=core.attributes)
            span.end()
            return [span]
        status = TraceStatus(status_code="OK")
        note = SpanCoreFields(name="note", status=status, attributes={"n": 1}, start_time=None, end_time=None)
        made = [note, core]
        return made if kind == "core" else [agl.Span.from_core_fields(m, rollout_id="r1") for m in made]

    answer, trace = roll(body)
    assert answer == 0.7
    assert named(trace, core.name).parent == trace.spans[0].id
    if kind != "opentelemetry":
        assert named(trace, "note").attributes == {"n": 1}


def test_anything_else_that_is_returned_is_an_error(roll: Roll, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(TypeError, match="returned str; a LitAgent returns None, a number or spans"):
        roll(lambda ask: "done")
    with pytest.raises(TypeError, match="a list with str"):
        roll(lambda ask: ["done"])
    assert roll(lambda ask: [])[0] is None
    assert "empty list" in caplog.text
