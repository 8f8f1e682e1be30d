"""Tools on the embedded server: chat templates in three forms, real clients, streams, and calls that are malformed."""

from __future__ import annotations

import json
from contextlib import ExitStack

import httpx
import pytest
import tool_models
from agentrig_grpo.server.chat import Chat
from agentrig_grpo.server.tools import Bare, form_of
from openai import OpenAI
from tool_models import ARGUMENTS, TEMPLATES, TOOL, lessons, user

from agentrig import Outcome, Score, Task
from agentrig.rollouts import Rollout
from agentrig.tracing.recording import recording
from agentrig.tracing.streams import joined
from agentrig.view.rollout import readable
from agentrig.view.terminal import span_text

FORMS = list(TEMPLATES)
CALLED, RESULT, TALK, BROKEN, TWICE = range(5)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return tool_models.make(tmp_path_factory.mktemp("tools"))


@pytest.fixture(scope="module")
def urls(models):
    with ExitStack() as stack:
        yield {form: stack.enter_context(tool_models.served(models, form)) for form in FORMS}


def body_of(form, lesson, **more):
    messages = json.loads(json.dumps(lessons(form)[lesson][0]))
    for message in messages:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
            message["content"] = None
    return {"model": "tiny", "messages": messages, "tools": [TOOL], "temperature": 0, "max_tokens": 100, **more}


def ask(urls, form, lesson, **more):
    response = httpx.post(f"{urls[form]}/chat/completions", json=body_of(form, lesson, **more), timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def said(answer):
    choice = answer["choices"][0]
    message = choice["message"]
    calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", ())]
    return message["content"], calls, choice["finish_reason"]


@pytest.mark.parametrize("form", FORMS)
def test_calls_are_read_and_what_is_malformed_stays_text(models, urls, form):
    add = ("add", ARGUMENTS)
    several = ("both\nok", [add, add], "tool_calls")
    wanted = [
        (None, [add], "tool_calls"),
        ("it is 5", [], "stop"),
        ("hello there", [], "stop"),
        (lessons(form)[BROKEN][1], [], "stop"),
        several if form != "llama" else (lessons(form)[TWICE][1], [], "stop"),
    ]
    for lesson, expected in enumerate(wanted):
        answer = ask(urls, form, lesson, return_token_ids=True, logprobs=True)
        assert said(answer) == expected
        choice, tokenizer = answer["choices"][0], models.tokenizers[form]
        messages, reply = lessons(form)[lesson]
        ids = tokenizer(reply, add_special_tokens=False)["input_ids"]
        assert choice["token_ids"] == [*ids, tokenizer.eos_token_id], "what was sampled, whatever was read from it"
        assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
        prompt = tokenizer.apply_chat_template(messages, tools=[TOOL], add_generation_prompt=True, tokenize=False)
        assert answer["prompt_token_ids"] == tokenizer(prompt, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("form", FORMS)
def test_a_stream_joins_to_the_whole_reply(urls, form):
    for lesson in range(len(lessons(form))):
        more = {"return_token_ids": True, "logprobs": True}
        whole = ask(urls, form, lesson, **more)
        body = body_of(form, lesson, stream=True, stream_options={"include_usage": True}, **more)
        text = httpx.post(f"{urls[form]}/chat/completions", json=body, timeout=60).text
        streamed, error = joined(text)
        assert error is None
        assert [streamed[key] for key in ("prompt_token_ids", "usage")] == [whole["prompt_token_ids"], whole["usage"]]
        choice = whole["choices"][0]
        assert {key: streamed["choices"][0][key] for key in choice} == choice
        # Each step's tokens come with it, also while a call is held back.
        assert text.count('"token_ids"') == len(choice["token_ids"])


def test_the_id_of_a_call_repeats_itself_and_is_its_own(urls):
    def ids(lesson):
        return [c["id"] for c in ask(urls, "hermes", lesson)["choices"][0]["message"]["tool_calls"]]

    assert ids(CALLED) == ids(CALLED)
    assert len({*ids(CALLED), *ids(TWICE)}) == 3


def test_tool_choice_and_parallel_calls(urls):
    call = lessons("hermes")[CALLED][1]
    text, calls, finish = said(ask(urls, "hermes", CALLED, tool_choice="none"))
    assert (calls, finish) == ([], "stop")
    assert text == call.replace("<tool_call>", "").replace("</tool_call>", "")
    assert said(ask(urls, "hermes", TWICE, parallel_tool_calls=False))[1] == [("add", ARGUMENTS)]
    text, calls, finish = said(ask(urls, "hermes", CALLED, max_tokens=8))
    assert (calls, finish) == ([], "length")
    assert call.startswith(text)


def test_a_run_of_the_openai_client_is_recorded_with_its_ids_and_shown(models, urls):
    with recording("r", token_ids=True, base_url=urls["hermes"]) as recorder:
        client = OpenAI(base_url=urls["hermes"], api_key="x")
        messages = [user("add")]
        settings = {"model": "tiny", "tools": [TOOL], "temperature": 0, "max_tokens": 100}
        first = client.chat.completions.create(messages=messages, **settings).choices[0]
        (call,) = first.message.tool_calls
        result = {"role": "tool", "tool_call_id": call.id, "content": "5"}
        messages += [first.message.model_dump(), result]
        with client.chat.completions.stream(messages=messages, **settings) as stream:
            last = stream.get_final_completion().choices[0].message.content
        with client.chat.completions.stream(messages=[user("add")], **settings) as stream:
            again = stream.get_final_completion().choices[0].message.tool_calls
    assert (first.finish_reason, call.function.name, last) == ("tool_calls", "add", "it is 5")
    assert json.loads(call.function.arguments) == {"a": 2, "b": 3}
    assert [c.id for c in again] == [call.id]
    trace = recorder.trace()
    tokenizer = models.tokenizers["hermes"]
    for span, lesson in zip(trace.llm_calls(), (CALLED, RESULT, CALLED), strict=True):
        ids = tokenizer(lessons("hermes")[lesson][1], add_special_tokens=False)["input_ids"]
        assert span.attributes["response_token_ids"] == [*ids, tokenizer.eos_token_id]
        assert len(span.attributes["response_logprobs"]) == len(ids) + 1
    rollout = Rollout(
        id="r",
        task=Task(id="t", input={"question": "2 and 3"}),
        group="g",
        mode="dev",
        step=0,
        outcome=Outcome(answer=last),
        score=Score.ok(1.0),
        trace=trace,
    )
    lines = [line.strip("│├└─ ") for line in span_text(rollout).splitlines()]
    assert sum(line.endswith("tools add") for line in lines) == 3
    assert not any(line.startswith("tool call: add") for line in lines), "the reply above is the same"
    assert lines.count(f"reply: add({ARGUMENTS})") == 2
    assert lines.count("the tool's answer: 5") == 1
    assert "reply: it is 5" in lines
    assert "reply: null" not in lines
    spans = [{"id": s.id, "name": s.name, "start": s.start, "attributes": dict(s.attributes)} for s in trace.spans]
    calls = readable({"spans": spans}, {}, None).calls
    assert [([m.text for m in call.messages if m.role == "tool"], call.reply) for call in calls] == [
        ([], f"add({ARGUMENTS})"),
        (["5"], "it is 5"),
        ([], f"add({ARGUMENTS})"),
    ]


def history(**function):
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}", **function}}
    return {"messages": [user("add"), {"role": "assistant", "tool_calls": [call]}]}


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"tool_choice": "required"}, "tool_choice", "this server forces no call"),
        ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, "tool_choice", "forces no call"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'web_search'; use one of function"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name", "1 to 256 characters"),
        ({"functions": [TOOL["function"]]}, "functions", "not implemented"),
        (history(arguments="{"), "messages[1].tool_calls[0].function.arguments", "text of a JSON object"),
        (history(arguments="[1]"), "messages[1].tool_calls[0].function.arguments", "text of a JSON object"),
        ({"messages": [{"role": "user", "tool_calls": [{}]}]}, "messages[0]", "only a message of the assistant"),
        ({"response_format": {"type": "json_object"}}, "response_format", "leave tools out"),
    ],
)
def test_bad_requests_are_refused_in_words(urls, change, param, words):
    response = httpx.post(f"{urls['hermes']}/chat/completions", json=body_of("hermes", CALLED, **change))
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert words in error["message"]


def test_llamas_template_has_room_for_one_call_a_message(urls):
    messages = body_of("llama", RESULT)["messages"]
    messages[1]["tool_calls"] *= 2
    body = body_of("llama", RESULT, messages=messages)
    response = httpx.post(f"{urls['llama']}/chat/completions", json=body)
    assert response.status_code == 400
    assert "one call a message" in response.json()["error"]["message"]


def chat_with(tokenizer, template):
    import copy

    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = template
    return Chat(tokenizer)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "shows the model no tools"),
        ("{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}", "this server can't read"),
        ("{% if tools %}{{ raise_exception('no') }}{% endif %}", "refuses tools (TemplateError: no)"),
        (
            "{{ tools }}{% for m in messages %}{% if m.tool_calls %}{{ m.x.y }}{% endif %}{% endfor %}",
            "refuses a tool call",
        ),
    ],
)
def test_a_template_that_can_not_serve_tools_says_why(models, template, words):
    reason = chat_with(models.tokenizers["hermes"], template).tool_form
    assert isinstance(reason, str)
    assert words in reason
    assert "Qwen2.5" in reason
    assert "agentrig warmup" in reason


def test_the_order_of_a_schemas_keys_reaches_the_template(models):
    chat = chat_with(models.tokenizers["hermes"], "{{ tools | tojson }}{{ messages | tojson }}")
    one, other = {"type": "function", "function": {"name": "a"}}, {"function": {"name": "a"}, "type": "function"}
    texts = [chat.text(chat.prompt_ids([user("x")], tools=[tool])) for tool in (one, other)]
    assert [text.index("type") < text.index("function") for text in texts] == [True, False]


LLAMA_CALL = '{"name": "f", "parameters": {"x": 1}}'


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"x": "</é>"}}\n', "", [("f", '{"x": "</é>"}')]),
        ("hermes", 'a <tool_call>{"name": "f", "arguments": {}}</tool_call> b', "a\nb", [("f", "{}")]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}<tool_call>{"name": "f", "arguments": {}}', None, None),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', None, None),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', None, None),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": "\\ud800"}}</tool_call>', None, None),
        ("hermes", '<tool_call>{"name": 1, "arguments": {}}</tool_call>', None, None),
        ("hermes", "<tool_call>" + "[" * 100_000, None, None),
        ("hermes", '{"name": "f", "arguments": {}}', None, None),
        ("qwen3-coder", "<tool_call>\n<function=f>\n</function>\n</tool_call>", "", [("f", "{}")]),
        (
            "qwen3-coder",
            "<tool_call><function=f><parameter=s>\n1\n2\n</parameter><parameter=x>[1]</parameter></function></tool_call>",
            "",
            [("f", '{"s": "1\\n2", "x": [1]}')],
        ),
        ("qwen3-coder", "<tool_call><function=f>x</function></tool_call>", None, None),
        ("qwen3-coder", "<tool_call><function=f><parameter=s>1</function></tool_call>", None, None),
        ("llama", f" {LLAMA_CALL}\n", "", [("f", '{"x": 1}')]),
        ("llama", f"{LLAMA_CALL}; {LLAMA_CALL}", "", [("f", '{"x": 1}'), ("f", '{"x": 1}')]),
        ("llama", '{"name": "f", "arguments": {}, "type": "function"}', "", [("f", "{}")]),
        ("llama", f"I call {LLAMA_CALL}", None, None),
        ("llama", f"{LLAMA_CALL} and more", None, None),
        ("llama", '{"answer": 3}', None, None),
        ("llama", "[" * 100_000, None, None),
        ("llama", "", None, None),
    ],
)
def test_replies_are_read_by_form(models, form, text, content, calls):
    schema = {"properties": {"s": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    reader = Bare(several=True) if form == "llama" else Chat(models.tokenizers[form]).tool_form
    reply = reader.read(text, tools)
    assert reply.content == (text if content is None else content)
    assert [(c.name, c.arguments) for c in reply.calls] == (calls or [])
    for end in range(min(len(text), 200)):
        sent = text[: reader.settled(text[:end])]
        assert reply.content.startswith(sent), "what a stream has sent is never taken back"


def test_a_form_is_found_by_what_the_template_writes():
    def qwen(messages, tools):
        calls = [c["function"] for m in messages for c in m.get("tool_calls", ())]
        return f"{tools}{messages[0]['content']}" + "".join(
            f'<tool_call>\n{{"name": "{c["name"]}", "arguments": {json.dumps(c["arguments"])}}}\n</tool_call>'
            for c in calls
        )

    assert form_of(qwen).name == "hermes"
