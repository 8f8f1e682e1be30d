"""Traces: which nodes enclose a call, and which calls become triplets."""

from __future__ import annotations

from rollouts import trace_of

from agentrig import Span, Trace
from agentrig.adapters import triplet_of
from agentrig.traces import LLM_CALL, NODE


def span(id: str, parent: str | None, name: str = "chain.chain", **attributes: object) -> Span:
    return Span(id=id, parent=parent, name=name, start=0.0, end=1.0, attributes=attributes)


def test_nodes_are_named_innermost_first_over_nameless_spans() -> None:
    trace = Trace(
        rollout_id="r",
        spans=(
            span("root", None, "rollout"),
            span("graph", "root", **{NODE: "LangGraph"}),
            span("node", "graph", **{NODE: "write_query"}),
            span("tool", "node", "tool"),
            span("chain", "tool", **{NODE: "RunnableSequence"}),
            span("call", "chain", LLM_CALL),
        ),
    )
    assert trace.nodes(trace.llm_calls()[0]) == ["RunnableSequence", "write_query", "LangGraph"]


def test_plain_spans_name_a_node_too() -> None:
    assert span("a", None, "agent", **{"agent.name": "plan"}).node == "plan"
    assert span("a", None).node is None


def test_failed_calls_do_not_count() -> None:
    failed = Span(id="c", parent=None, name=LLM_CALL, start=0.0, end=1.0, error="HTTP 500")
    assert Trace(rollout_id="r", spans=(failed,)).llm_calls() == []


def test_missing_or_cyclic_parents_end_the_search() -> None:
    lost = Trace(rollout_id="r", spans=(span("a", "gone"),))
    assert list(lost.ancestors(lost.spans[0])) == []
    ring = Trace(rollout_id="r", spans=(span("a", "b"), span("b", "a")))
    assert [s.id for s in ring.ancestors(ring.spans[0])] == ["b"]


def test_a_call_with_ids_is_a_triplet() -> None:
    trace = trace_of("write_query")
    triplet = triplet_of(trace.llm_calls()[0], node="write_query")
    assert triplet is not None
    assert (triplet.prompt_ids, triplet.response_ids, triplet.logprobs) == ((1, 2), (3,), (-0.5,))
    assert (triplet.node, triplet.span_id, triplet.reward) == ("write_query", "c0", None)


def test_a_call_without_ids_is_no_triplet() -> None:
    assert triplet_of(trace_of("write_query", ids=False).llm_calls()[0]) is None


def test_log_probabilities_of_the_wrong_length_are_not_kept() -> None:
    call = span("c", None, LLM_CALL, prompt_token_ids=[1], response_token_ids=[2, 3], response_logprobs=[-0.5])
    triplet = triplet_of(call)
    assert triplet is not None
    assert triplet.logprobs is None
