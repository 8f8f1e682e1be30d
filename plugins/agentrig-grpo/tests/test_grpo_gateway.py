"""What unmodified agents send: the real clients, a real gateway, the real embedded server."""

from __future__ import annotations

from collections.abc import Iterator

import anthropic
import httpx
import openai
import pytest
from agentrig_grpo.server.chat import Chat
from agentrig_grpo.server.handle import Embedded
from embedded_servers import embedded

from agentrig.endpoints import Endpoint
from agentrig.gateway.client import GatewayAttempt
from agentrig.gateway.process import Gateway
from agentrig.gateway.settings import GatewaySettings
from agentrig.testing.scripted import scripted_server

ASKED = [{"role": "user", "content": "select name"}]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.fixture(scope="module")
def server(model_dir) -> Iterator[Embedded]:
    with embedded(model_dir, slots=8, max_length=128) as running:
        yield running


@pytest.fixture(scope="module")
def fixed():
    with scripted_server("of the fixed model", model="big") as running:
        yield running


@pytest.fixture(scope="module")
def gateway(fixed, server) -> Iterator[Gateway]:
    """A gateway whose fixed model `native` is behind another one, which speaks all APIs."""
    policy = Endpoint(base_url=server.base_url, model="tiny", api_key=server.api_key, sampling={"max_tokens": 6})
    with pytest.MonkeyPatch.context() as patch, Gateway(GatewaySettings()) as other:
        behind = GatewayAttempt(other.address, "fixed").open(1, policy)
        patch.setenv("NATIVE_KEY", behind.api_key)
        native = {"base_url": behind.base_url, "model": "tiny", "api_key_env": "NATIVE_KEY", "api": "own"}
        models = {"gpt-4.1-mini": "policy", "big": {"base_url": fixed.url, "model": "big"}, "native": native}
        with Gateway(GatewaySettings(models=models)) as running:
            yield running


@pytest.fixture
def visit(gateway):
    return GatewayAttempt(gateway.address, "r")


@pytest.fixture
def endpoint(server, visit) -> Endpoint:
    return visit.open(1, Endpoint(base_url=server.base_url, model="tiny", api_key=server.api_key, token_ids=True,
                                  sampling={"temperature": 1.0, "max_tokens": 6}))  # fmt: skip


@pytest.fixture
def client(endpoint) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0) as made:
        yield made


@pytest.fixture
def claude(endpoint) -> Iterator[anthropic.Anthropic]:
    url = endpoint.base_url.removesuffix("/v1")
    with anthropic.Anthropic(base_url=url, api_key=endpoint.api_key, max_retries=0) as made:
        yield made


@pytest.fixture
def ids(tokenizer):
    return lambda messages: list(Chat(tokenizer).prompt_ids(messages))


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_n_choices_are_n_calls_with_the_same_prompt(client, visit, ids, tokenizer, stream):
    options = {"stream_options": {"include_usage": True}} if stream else {}
    said = client.chat.completions.create(model="tiny", messages=ASKED, n=3, stream=stream, **options)
    texts = {0: "", 1: "", 2: ""}
    if stream:
        for chunk in said:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
    else:
        texts = {choice.index: choice.message.content for choice in said.choices}
    spans = visit.close().spans
    assert len(spans) == 3
    assert len({span.attributes["gen_ai.response.id"] for span in spans}) == 3
    for index, span in enumerate(spans):
        found = span.attributes
        assert (found["request"]["n"], found["agentrig.choice"]) == (1, f"{index + 1} of 3")
        assert found["prompt_token_ids"] == ids(ASKED)
        assert len(found["response_token_ids"]) == len(found["response_logprobs"]) > 0
        assert found["response"]["choices"][0]["message"]["content"] == texts[index]
        assert tokenizer.decode(found["response_token_ids"], skip_special_tokens=True) == texts[index]


def test_a_response_goes_on_where_the_one_before_ended(client, visit, ids):
    one = client.responses.create(model="tiny", instructions="be brief", input="select", reasoning={"effort": "low"})
    stream = client.responses.create(model="tiny", input="name", previous_response_id=one.id, stream=True)
    two = list(stream)[-1].response
    three = client.responses.create(model="tiny", input="order", previous_response_id=two.id, store=False)
    said = [
        {"role": "user", "content": "select"}, {"role": "assistant", "content": one.output_text},
        {"role": "user", "content": "name"}, {"role": "assistant", "content": two.output_text},
        {"role": "user", "content": "order"},
    ]  # fmt: skip
    assert three.previous_response_id == two.id
    for unknown in ("resp_x", three.id):  # it was not to be stored
        with pytest.raises(openai.BadRequestError, match="has got no response") as refused:
            client.responses.create(model="tiny", input="?", previous_response_id=unknown)
        assert (refused.value.param, refused.value.code) == ("previous_response_id", "previous_response_not_found")
    spans = visit.close().spans
    system = [{"role": "system", "content": "be brief"}]
    prompts = [[*system, *said[:1]], said[:3], said]
    assert [s.attributes["prompt_token_ids"] for s in spans[:3]] == [ids(p) for p in prompts]
    assert spans[0].attributes["agentrig.ignored"] == ["reasoning"]
    assert "reasoning" not in str(spans[0].attributes["request"])
    assert "agentrig.ignored" not in spans[1].attributes


def test_a_prefilled_answer_is_continued(claude, visit, ids, tokenizer):
    messages = [*ASKED, {"role": "assistant", "content": "select count"}]
    said = claude.messages.create(
        model="tiny", max_tokens=5, messages=messages, thinking={"type": "enabled", "budget_tokens": 1024}
    )
    (span,) = visit.close().spans
    start = tokenizer.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    assert start.endswith("<|assistant|>select count")
    found = span.attributes
    assert found["prompt_token_ids"] == tokenizer.encode(start, add_special_tokens=False)
    text = tokenizer.decode(found["response_token_ids"], skip_special_tokens=True)
    assert "".join(block.text for block in said.content) == text
    assert found["agentrig.ignored"] == ["thinking"]


def test_a_stop_sequence_is_named_as_the_reason(claude, visit):
    options = {"model": "tiny", "max_tokens": 60, "messages": ASKED, "extra_body": {"seed": 11}}
    whole = claude.messages.create(**options)
    text = whole.content[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    cut = claude.messages.create(**options, stop_sequences=["never this", stop])
    with claude.messages.stream(**options, stop_sequences=["never this", stop]) as stream:
        streamed = stream.get_final_message()
    for said in (cut, streamed):
        assert said.content[0].text == text[: text.index(stop)]
        assert (said.stop_reason, said.stop_sequence) == ("stop_sequence", stop)
    assert (whole.stop_reason, whole.stop_sequence) in (("end_turn", None), ("max_tokens", None))
    assert [s.attributes["response"]["choices"][0].get("stop_reason") for s in visit.close().spans] == [
        None,
        stop,
        stop,
    ]


def test_tokens_are_counted_by_the_model_s_tokenizer(claude, visit, ids):
    found = claude.messages.count_tokens(model="tiny", messages=ASKED, system="be brief")
    assert found.input_tokens == len(ids([{"role": "system", "content": "be brief"}, *ASKED]))
    assert visit.close().spans == []


def test_names_of_models_and_what_only_fixed_models_answer(client, visit, fixed):
    assert client.chat.completions.create(model="gpt-4.1-mini", messages=ASKED).model == "tiny"
    with pytest.raises(openai.NotFoundError, match=r'\[gateway.models\] "gpt-4o" = "policy"') as refused:
        client.chat.completions.create(model="gpt-4o", messages=ASKED)
    assert refused.value.param == "model"
    for ask in (
        lambda: client.completions.create(model="tiny", prompt="x"),
        lambda: client.embeddings.create(model="tiny", input="x"),
    ):
        with pytest.raises(openai.NotFoundError, match=r"s model answers no .*\[gateway.models\]"):
            ask()
    with pytest.raises(openai.NotFoundError):  # the scripted server's own answer
        client.embeddings.create(model="big", input="x")
    client.responses.create(model="big", input="x", reasoning={"effort": "low"})
    one = client.responses.create(model="native", input="select")
    (*_, last) = client.responses.create(model="native", input="name", previous_response_id=one.id, stream=True)
    assert last.response.output_text
    with pytest.raises(openai.BadRequestError, match="the field background"):  # said by the server behind
        client.responses.create(model="native", input="x", background=True)
    spans = visit.close().spans
    assert [bool(s.attributes.get("response_token_ids")) for s in spans] == [True] + [False] * 8
    assert ["agentrig.server" in s.attributes for s in spans] == [False] * 4 + [True] * 5


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"min_tokens": 2}, "min_tokens", "min_tokens"),
        ({"tool_choice": "required", "tools": []}, "tool_choice", "tool_choice"),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction", "prediction"),
        ({"surprise": 1}, "surprise", "unknown field 'surprise'. This is the run's model: to send it"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content", "no 'image_url' (part 0)"),
    ],
)
def test_a_refusal_names_the_field_and_what_to_do(endpoint, visit, fields, param, words):
    body = {"model": "tiny", "messages": ASKED, **fields}
    headers = {"authorization": f"Bearer {endpoint.api_key}"}
    answer = httpx.post(f"{endpoint.base_url}/chat/completions", json=body, headers=headers, timeout=30)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert words in error["message"]
    assert "[gateway.models]" in error["message"]
    assert param in visit.close().spans[0].error


@pytest.mark.parametrize(
    "fields", [{"n": 1.5}, {"messages": []}, {"max_tokens": "x"}, {"tool_choice": "auto", "tools": 5}]
)
def test_a_field_that_no_model_takes_is_no_reason_for_another_model(endpoint, visit, fields):
    body = {"model": "tiny", "messages": ASKED, **fields}
    headers = {"authorization": f"Bearer {endpoint.api_key}"}
    answer = httpx.post(f"{endpoint.base_url}/chat/completions", json=body, headers=headers, timeout=30)
    assert answer.status_code == 400
    assert "must be" in (said := answer.json()["error"]["message"]) or "is empty" in said
    assert "[gateway.models]" not in said
    visit.close()


def test_fields_that_ask_for_nothing_are_taken(client, visit):
    extra = {"min_tokens": 0, "ignore_eos": False, "skip_special_tokens": True, "chat_template_kwargs": {}}
    client.chat.completions.create(model="tiny", messages=ASKED, reasoning_effort="low", extra_body=extra)
    (span,) = visit.close().spans
    assert span.error is None
    assert span.attributes["agentrig.ignored"] == ["reasoning_effort"]


TOOL = {"name": "add", "input_schema": {"type": "object"}}
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{"}}


@pytest.mark.parametrize(
    ("route", "fields", "param", "words"),
    [
        ("responses", {"input": []}, "input", "input is empty"),
        ("responses", {"input": "x", "max_output_tokens": 0}, "max_output_tokens", "max_output_tokens is 0"),
        ("responses", {"input": "x", "tools": [{"type": "function", "name": 5}]}, "tools[0].name", "must be a string"),
        (
            "responses",
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:x"}]}]},
            "input[0].content",
            "input[0].content must be a string or a list of text parts; the model reads no 'input_image'",
        ),
        (
            "responses",
            {"input": "x", "tool_choice": "required"},
            "tool_choice",
            'tool_choice must be "auto" or "none", not "required"',
        ),
        ("messages", {"stop_sequences": 5}, None, "stop_sequences must be a string or"),
        ("messages", {"max_tokens": 0}, None, "max_tokens is 0"),
        (
            "messages",
            {"tools": [TOOL], "tool_choice": {"type": "any"}},
            None,
            'tool_choice must be {"type": "auto"} or {"type": "none"}, not {"type": "any"}',
        ),
        (
            "messages",
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]},
            None,
            "messages[0].content must be a string or a list of text parts; the model reads no 'image'",
        ),
        (
            "chat/completions",
            {"messages": [*ASKED, {"role": "assistant", "tool_calls": [CALL]}]},
            "messages[1].tool_calls[0].function.arguments",
            "must be the text of a JSON object: the text is not JSON",
        ),
    ],
)
def test_an_error_speaks_the_agent_s_api(endpoint, visit, route, fields, param, words):
    body = {"model": "tiny", **({} if route == "responses" else {"messages": ASKED}), **fields}
    headers = {"authorization": f"Bearer {endpoint.api_key}"}
    answer = httpx.post(f"{endpoint.base_url}/{route}", json=body, headers=headers, timeout=30)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error.get("param")) == (400, "invalid_request_error", param)
    assert words in error["message"]
    assert error.get("code") != "upstream_error"
    visit.close()
