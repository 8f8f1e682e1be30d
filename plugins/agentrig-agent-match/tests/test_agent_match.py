"""The adapter `agent-match` on traces."""

from __future__ import annotations

from typing import Any

import pytest
from agentrig_agent_match import AgentMatch, AgentMatchConfig

from agentrig import Span, Trace
from agentrig.errors import ConfigError
from agentrig.settings import structure
from agentrig.testing import Check, checks
from agentrig.traces import LLM_CALL, NODE


def chain(id_: str, parent: str | None, name: str) -> Span:
    return Span(id=id_, parent=parent, name="chain.chain", start=0.0, end=1.0, attributes={NODE: name})


def call(id_: str, parent: str, **attributes: Any) -> Span:
    ids = {"prompt_token_ids": [1, 2], "response_token_ids": [3, 4], "response_logprobs": [-0.1, -0.2]}
    return Span(id=id_, parent=parent, name=LLM_CALL, start=0.0, end=1.0, attributes={**ids, **attributes})


TRACE = Trace(
    rollout_id="r",
    spans=(
        Span(id="root", parent=None, name="rollout", start=0.0, end=1.0),
        chain("graph", "root", "LangGraph"),
        chain("write", "graph", "write_query"),
        chain("sequence", "write", "RunnableSequence"),
        call("a", "sequence"),
        chain("check", "graph", "check_query"),
        call("b", "check"),
        chain("rewrite", "graph", "rewrite_query"),
        call("c", "rewrite"),
    ),
)


def kept(match: str, trace: Trace = TRACE) -> list[tuple[str, str]]:
    return [(t.span_id, t.node) for t in AgentMatch(AgentMatchConfig(match=match))(trace)]


def test_any_enclosing_node_counts_not_only_the_nearest_name() -> None:
    assert kept("write") == [("a", "write_query"), ("c", "rewrite_query")]


def test_the_expression_selects_the_calls() -> None:
    assert kept("^write") == [("a", "write_query")]
    assert [span for span, _ in kept("write|check")] == ["a", "b", "c"]
    assert kept("nothing") == []


def test_an_empty_expression_keeps_every_call_under_its_innermost_node() -> None:
    assert kept("") == [("a", "RunnableSequence"), ("b", "check_query"), ("c", "rewrite_query")]


def test_ids_and_log_probabilities_come_through_unchanged() -> None:
    triplet = AgentMatch(AgentMatchConfig())(TRACE)[0]
    assert (triplet.prompt_ids, triplet.response_ids, triplet.logprobs) == ((1, 2), (3, 4), (-0.1, -0.2))


def test_calls_without_ids_and_failed_calls_give_no_triplet() -> None:
    spans = (
        chain("w", None, "write_query"),
        call("x", "w", response_token_ids=[]),
        Span(id="y", parent="w", name=LLM_CALL, start=0.0, end=1.0, error="HTTP 500"),
    )
    assert kept("write", Trace(rollout_id="r", spans=spans)) == []
    assert kept("write", Trace(rollout_id="r")) == []


ROLES = Trace(
    rollout_id="r",
    spans=(
        chain("w", None, "write_query"),
        call("p", "w", request={"model": "planner"}),
        call("c", "w", request={"model": "coder"}),
        chain("k", None, "check"),
        call("q", "k", request={"model": "planner-2"}),
        call("n", "k"),
    ),
)


def test_the_models_name_selects_calls_too() -> None:
    def spans(**keys: str) -> list[str]:
        return [t.span_id for t in AgentMatch(AgentMatchConfig(**keys))(ROLES)]

    assert spans(match="", model="planner") == ["p", "q"]
    assert spans(match="", model="^planner$") == ["p"]
    assert spans(match="write", model="planner|coder") == ["p", "c"]
    assert spans(match="", model="x") == []
    adapter = AgentMatch(AgentMatchConfig(match="write", model="planner"))
    why = {c.id: adapter.left_out(ROLES, c) for c in ROLES.llm_calls()}
    assert why == {"p": None, "c": "unmatched-model", "q": "unmatched-node", "n": "unmatched-node"}


@pytest.mark.parametrize("key", ["match", "model"])
def test_an_expression_that_does_not_compile_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} = '\\(' is not a regular expression"):
        structure(AgentMatchConfig, {key: "("}, owner="agent-match", section="adapter")


@pytest.mark.parametrize("check", checks("adapter", "agent-match"), ids=str)
def test_the_kit(check: Check) -> None:
    check()
