"""A request's body, field by field: what is accepted, and which name an error has."""

from __future__ import annotations

import json

import pytest
from agentrig_grpo.server.protocol import parse

from agentrig.http_server import Refused

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


def asked(**change):
    return parse(json.dumps({**BODY, **change}).encode(), model="tiny")


def refusal(**change):
    with pytest.raises(Refused) as caught:
        asked(**change)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"n": "2"}, "n", "n must be an integer, not '2'"),
        ({"n": True}, "n", "n must be an integer, not True"),
        ({"n": 1.5}, "n", "n must be an integer, not 1.5"),
        ({"temperature": "1"}, "temperature", "temperature must be a number, not '1'"),
        ({"temperature": 10**400}, "temperature", "(401 characters); it must be between 0 and 2"),
        ({"seed": 2**63}, "seed", f"it must be between {-(2**63)} and {2**63 - 1}"),
        ({"logprobs": 1}, "logprobs", "logprobs must be true or false, not a number"),
        ({"stream": "true"}, "stream", "stream must be true or false, not text"),
        ({"stop": ["a"] * 17}, "stop", "stop must be a string or up to 16 strings"),
        ({"messages": {"role": "user"}}, "messages", "messages must be a list, not an object"),
        ({"messages": [*BODY["messages"], "hi"]}, "messages[1]", "must be an object with role and content"),
        ({"messages": [*BODY["messages"], {"content": ""}]}, "messages[1].role", "is None; use one of system"),
        ({"messages": [{"role": ["user"], "content": ""}]}, "messages[0].role", "is ['user']; use one of"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "must be a string or a list of text parts"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content", "text parts"),
    ],
)
def test_errors_name_the_place_in_the_body(change, param, words):
    error = refusal(**change)
    assert error.param == param
    assert str(error).startswith(param)
    assert words in str(error)


def test_valid_fields_of_a_body_are_kept():
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    request = asked(
        messages=[{"role": "tool", "content": parts, "tool_call_id": "7"}],
        temperature=1,
        n=2.0,
        max_tokens=9,
        stop="x",
        stream_options={"include_usage": True},
        user="me",
        tools=[],
    )
    assert request.messages == [{"role": "tool", "content": "a b", "tool_call_id": "7"}]
    assert (request.temperature, request.n, request.stop) == (1.0, 2, ("x",))
    assert (type(request.temperature), type(request.n)) == (float, int)
    assert (request.limit, request.usage_in_stream) == (9, True)
    assert asked(max_tokens=9, max_completion_tokens=4).limit == 4


def test_a_wrong_model_name_is_the_first_error():
    with pytest.raises(Refused, match="the model 'big' does not exist") as caught:
        asked(model="big", n="2", messages=[])
    assert (caught.value.status, caught.value.param) == (404, "model")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": [{"role": "user", "content": "hi", "banana": 1}]}, "messages[0].banana"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "banana": 1}]}]},
            "messages[0].content[0].banana",
        ),
        ({"stream_options": {"banana": 1}}, "stream_options.banana"),
        ({"stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
        ({"tools": [{"type": "function", "function": {"name": "a", "banana": 1}}]}, "tools[0].function.banana"),
    ],
)
def test_a_field_below_the_top_level_that_nobody_knows_is_refused(change, param):
    error = refusal(**change)
    assert error.param == param
    assert param in str(error)


def test_what_a_provider_may_keep_of_a_prompt_is_no_part_of_it():
    cache = {"cache_control": {"type": "ephemeral"}}
    tool = {"type": "function", "function": {"name": "a"}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi", **cache}], **cache}]
    request = asked(messages=messages, tools=[{**tool, **cache}])
    assert request.messages == BODY["messages"]
    assert request.tools == [tool]
