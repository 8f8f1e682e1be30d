"""Tests what `last-calls` does."""

from agentrig_last_calls import Config, LastCalls

from agentrig import Span, Trace
from agentrig.traces import LLM_CALL


def call(id_: str, *, end: float, tokens: bool = True) -> Span:
    ids = {"prompt_token_ids": [1, 2], "response_token_ids": [3], "response_logprobs": [-0.1]} if tokens else {}
    return Span(id=id_, parent="root", name=LLM_CALL, start=end - 1, end=end, attributes=ids)


def test_earlier_calls_are_left_out_with_a_reason() -> None:
    root = Span(id="root", parent=None, name="rollout", start=0, end=9)
    trace = Trace(rollout_id="r", spans=[root, call("a", end=2), call("b", end=4), call("c", end=6, tokens=False)])
    adapter = LastCalls(Config(calls=1))
    assert [t.span_id for t in adapter(trace)] == ["b"]
    assert [adapter.left_out(trace, c) for c in trace.llm_calls()[:2]] == ["an-earlier-call", None]
    assert [t.span_id for t in LastCalls(Config(calls=2))(trace)] == ["a", "b"]
