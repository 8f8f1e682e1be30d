"""What the message of a failed rollout says."""

from __future__ import annotations

import asyncio
import json
import math
import re
from typing import Any

import httpx
import pytest

import agentrig
from agentrig.agents import Judged
from agentrig.pools import Job, Result
from agentrig.runners.attempt import packed, run_agent
from agentrig.runners.reward_process import NOWHERE
from agentrig.testing.scripted import Reply, scripted_server
from agentrig.traces import LLM_CALL
from agentrig.tracing.recorder import opened, plain


def ask(task_input: Any, endpoint: Any) -> str:
    """Ask by plain httpx, read the answer as a stream, or raise an error of one's own."""
    how = task_input["how"]
    body = {"model": endpoint.model, "messages": [{"role": "user", "content": "?"}], "stream": how == "streams"}
    url = f"{endpoint.base_url}/chat/completions"
    if how != "plain":
        with httpx.stream("POST", url, json=body) as reply:
            try:
                reply.raise_for_status()
            except httpx.HTTPStatusError as error:
                if how == "wraps":
                    raise ValueError("no answer: 400 Bad Request") from error
                raise
    reply = httpx.post(url, json=body)
    reply.raise_for_status()
    return "unreached"


@pytest.mark.parametrize("how", ["plain", "reads piece by piece", "streams", "wraps"])
def test_a_failed_call_has_the_servers_answer_in_its_message(how: str) -> None:
    with scripted_server(Reply(status=400, text="this model's context is 64 tokens")) as server:
        found = run_agent(ask, Job(id="r", input={"how": how}, endpoint=server.endpoint()))
    assert found.outcome.failure == "llm-error"
    assert "400 Bad Request" in found.outcome.message
    assert "this model's context is 64 tokens" in found.outcome.message
    assert any("context is 64 tokens" in (span.error or "") for span in found.trace.spans)


@pytest.mark.parametrize(
    ("hows", "kind", "said"),
    [
        (["plain"], "llm-error", r"HTTPStatusError: Client error '400 .*too long"),
        (["own"], "agent-error", r"ValueError: the real cause \(test_attempt\.py:\d+ in one\)"),
        (
            ["plain", "plain"],
            "llm-error",
            r"^ExceptionGroup: .*: HTTPStatusError: .*; HTTPStatusError: ",
        ),
        (
            ["plain", "own"],
            "agent-error",
            r"HTTPStatusError: .*; ValueError: the real cause \(test_attempt.py:",
        ),
    ],
)
def test_the_exceptions_of_a_task_group_are_told_with_their_lines(hows: list[str], kind: str, said: str) -> None:
    async def one(how: str, endpoint: Any) -> None:
        if how == "own":
            raise ValueError("the real cause")
        ask({"how": how}, endpoint)  # it waits for no other task, so that each one fails by itself

    async def agent(task_input: Any, endpoint: Any) -> str:
        async with asyncio.TaskGroup() as tasks:
            for how in hows:
                tasks.create_task(one(how, endpoint))
        return "unreached"

    with scripted_server(Reply(status=400, text="too long")) as server:
        found = run_agent(agent, Job(id="r", input={}, endpoint=server.endpoint()))
    assert found.outcome.failure == kind, found.outcome.message
    assert re.search(said, found.outcome.message, re.DOTALL), found.outcome.message


def nested(levels: int) -> Any:
    value: Any = []
    for _ in range(levels - 1):
        value = [value] if levels % 2 else {"a": value}
    return value


@pytest.mark.parametrize(("levels", "kind"), [(253, None), (254, None), (255, "bad-answer"), (256, "bad-answer")])
def test_an_answer_of_as_many_levels_as_the_pages_say_reaches_the_reward(levels: int, kind: str | None) -> None:
    """253 and 254 were `agent-error`: the result around them was too deep to be sent."""
    job = Job(id="r", input={}, endpoint=NOWHERE)
    outcome = Result.unpacked("r", packed(lambda task_input, endpoint: nested(levels), job)).outcome
    assert outcome.failure == kind
    assert outcome.answer == (None if kind else nested(levels))


@pytest.mark.parametrize("levels", [250, 252, 253, 900])
def test_a_refused_request_of_many_levels_does_not_cost_the_answer(levels: int) -> None:
    """From 253 on the rollout failed: "the rollout's result cannot be sent from its process"."""

    def agent(task_input: Any, endpoint: Any) -> str:
        body = f'{{"model": "m", "messages": {"[" * levels}{"]" * levels}}}'
        httpx.post(f"{endpoint.base_url}/chat/completions", content=body)
        return "right"

    with scripted_server(Reply(status=400, text="too deep")) as server:
        result = Result.unpacked("r", packed(agent, Job(id="r", input={}, endpoint=server.endpoint())))
    assert (result.outcome.failure, result.outcome.answer) == (None, "right"), result.outcome.message
    (call,) = (span for span in result.trace.spans if span.name == LLM_CALL)
    assert isinstance(call.attributes["request"], dict if levels < 253 else str)
    assert "[[[" in json.dumps(call.attributes["request"])


def test_half_a_character_in_a_span_reaches_no_file() -> None:
    """The name of a span is a column of the files of calls, and the run and its resume ended there."""

    def agent(task_input: Any, endpoint: Any) -> str:
        with agentrig.span("tool \ud800"):
            agentrig.reward(0.5)
        with opened("\udfff", {"a\ud83d": ["\ude00", "\ud83d\ude00"]}):
            return "right"

    result = Result.unpacked("r", packed(agent, Job(id="r", input={}, endpoint=NOWHERE)))
    names = [span.name for span in result.trace.spans]
    assert names == ["rollout", "agent", "reward", "\ufffd"]
    assert result.trace.nodes(result.trace.spans[2]) == ["tool \ufffd"]
    assert result.trace.spans[3].attributes == {"a\ufffd": ["\ufffd", "\U0001f600"]}


@pytest.mark.parametrize("levels", [99, 253, 900])
def test_an_output_of_many_levels_does_not_cost_the_answer(levels: int) -> None:
    """From 253 on the rollout failed, as with a request."""

    def agent(task_input: Any, endpoint: Any) -> str:
        with opened("chain", {"output": plain(nested(levels))}):
            return "right"

    result = Result.unpacked("r", packed(agent, Job(id="r", input={}, endpoint=NOWHERE)))
    assert (result.outcome.failure, result.outcome.answer) == (None, "right"), result.outcome.message
    assert ("nested too deep" in str(result.trace.spans[1].attributes["output"])) is (levels > 100)


def test_a_missing_await_is_named() -> None:
    async def reply() -> str:
        return "right"

    async def returns(task_input: Any, endpoint: Any) -> Any:
        return {"sql": call}

    async def reads(task_input: Any, endpoint: Any) -> Any:
        return call.choices  # type: ignore[attr-defined]

    call = reply()
    for agent, said in ((returns, 'its answer["sql"] is of the type coroutine'), (reads, "no attribute 'choices'")):
        message = run_agent(agent, Job(id="r", input={}, endpoint=NOWHERE)).outcome.message
        assert said in message
        assert "is an `await` missing" in message
    call.close()


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_an_own_reward_that_is_no_finite_number_is_the_agents(number: float) -> None:
    """It was a fault of the reward."""
    found = run_agent(
        lambda task_input, endpoint: Judged(answer="x", reward=number), Job(id="r", input={}, endpoint=NOWHERE)
    )
    assert found.outcome.failure == "bad-answer"
    assert f"the agent returned {number} as its reward; return a finite number" in found.outcome.message


def test_a_whole_number_that_no_reader_takes_says_what_to_return() -> None:
    found = run_agent(lambda task_input, endpoint: {"n": [1, 10**4300]}, Job(id="r", input={}, endpoint=NOWHERE))
    assert found.outcome.failure == "bad-answer"
    assert 'its answer["n"][1] is a whole number of more than 4300 digits' in found.outcome.message
    assert "return it as hex()" in found.outcome.message


@pytest.mark.parametrize(
    ("field", "given", "said"),
    [
        ("text", {"words": "two", "digits": "2"}, "; the task has words, digits in input"),
        ("digits", {"digits": 22}, "digits is a number: to read it from a CSV file as text, set tasks.text=['digits']"),
        ("answer", {"answer": None, "digits": 2}, ""),
        ("digits", "no fields", ""),
    ],
)
def test_an_error_about_a_field_of_the_task_names_its_fields(field: str, given: Any, said: str) -> None:
    def agent(task_input: Any, endpoint: Any) -> str:
        return " ".join([*task_input[field]])

    message = run_agent(agent, Job(id="r", input=given, endpoint=NOWHERE)).outcome.message
    before, _, after = message.rpartition(" in agent)")
    assert before, message
    assert after.replace('"', "'").removeprefix("; the task's ") == said
