"""Files of demonstrations: what is read is what was written, and each fault is named with its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest

from agentrig.demonstrations import Reply, Turn, built, read_demonstrations, write_demonstrations
from agentrig.errors import AgentrigError, ConfigError

ASKED: Any = {"role": "user", "content": "2 + 2?"}
SAID: Any = {"role": "assistant", "content": "4"}
IDS = {"prompt_token_ids": [1], "response_token_ids": [2]}
TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def written(tmp_path: Path, *rows: Any) -> Path:
    file = tmp_path / "demonstrations.jsonl"
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return file


def test_a_plain_chat_file_is_one(tmp_path: Path) -> None:
    called = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 2}'}}
    answer = {"role": "tool", "tool_call_id": "c1", "content": "4"}
    parts = [{"type": "text", "text": "It is "}, {"type": "text", "text": "4"}]
    thought = {"role": "assistant", "content": None, "tool_calls": [called], "reasoning_content": "Use the tool."}
    file = written(
        tmp_path,
        {"messages": [ASKED, SAID], "id": "of-the-user"},
        {"messages": [ASKED, thought], "tools": [TOOL]},
        "",
        {"messages": [ASKED, thought, answer, {**SAID, "content": parts}], "tools": None},
    )
    plain, call, end = read_demonstrations(file)
    assert plain == Turn(messages=[ASKED], reply=Reply(content="4"))
    assert call.reply == Reply(
        tool_calls=[{"name": "add", "arguments": {"a": 2, "b": 2}, "id": "c1"}], reasoning="Use the tool."
    )
    assert (call.tools, call.reply.message()) == ([TOOL], thought)
    assert end.messages == [ASKED, thought, answer]
    assert end.reply.content == "It is 4"


def test_what_is_written_is_read(tmp_path: Path) -> None:
    turns = [
        Turn(messages=[ASKED], reply=Reply(content="vier, 四 and \u2028")),
        Turn(
            messages=[{"role": "system", "content": "Add."}, ASKED],
            tools=[TOOL],
            reply=Reply(tool_calls=[{"name": "add", "arguments": {"a": [10**30, "é"]}, "id": "c-0"}], reasoning="Hm."),
            task="t/1",
            reward=0.0,
            prompt_token_ids=[0, 5],
            response_token_ids=[7],
            tokenizer="bytes",
            source="production",
            options={"enable_thinking": False},
        ),
    ]
    file = tmp_path / "demonstrations.jsonl"
    write_demonstrations(file, turns)
    assert read_demonstrations(file) == turns
    keys = list(json.loads(file.read_text().split("\n")[1]))
    assert keys == ["messages", "tools", "task", "tokenizer", "source", "reward", *IDS, "chat_template_kwargs"]


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    file = written(tmp_path, {"messages": [ASKED, SAID]})
    before = file.read_bytes()
    good = read_demonstrations(file)[0]
    for bad in (attrs.evolve(good, reply=Reply(content="\ud800")), attrs.evolve(good, reward=float("nan"))):
        with pytest.raises(ConfigError, match=r"demonstration 1 \(of 0 …\) can't be written"):
            write_demonstrations(file, [good, bad])
        assert (file.read_bytes(), len(list(tmp_path.iterdir()))) == (before, 1)
    with pytest.raises(AgentrigError, match=r"nowhere/x\.jsonl cannot be written: No such file or directory"):
        write_demonstrations(tmp_path / "nowhere" / "x.jsonl", [good])


def call(arguments: Any) -> dict[str, Any]:
    return {
        "messages": [ASKED, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]
    }


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ('{"messages": ', "line 2 is no JSON: Expecting value at column 14"),
        ('{"messages": [], "messages": []}', 'line 2: an object has the key "messages" twice'),
        ([1], "it has no list of messages: it is [1]"),
        ({"prompt": "2 + 2?", "completion": "4"}, "line 2: it has no list of messages"),
        ({"messages": []}, "the last message is not the assistant's, which is learned: there are none"),
        ({"messages": [SAID, ASKED]}, "which is learned: it ends with one of the role user"),
        ({"messages": [SAID]}, "no message comes before the reply"),
        ({"messages": [ASKED, {**SAID, "content": " \n"}]}, "the reply is empty"),
        ({"messages": [ASKED, {"role": "assistant"}]}, "the reply is empty"),
        ({"messages": [ASKED, {**SAID, "weight": 0}]}, '"weight": 0, so nothing is learned'),
        ({"messages": [{**ASKED, "role": "users"}, SAID]}, "messages[0] has the role 'users'. Did you mean \"user\"?"),
        ({"messages": ["2 + 2?", SAID]}, "messages[0] is '2 + 2?'"),
        ({"messages": [{**ASKED, "content": {"a": 1}}, SAID]}, "messages[0].content is {'a': 1}"),
        ({"messages": [{**ASKED, "content": [{"type": "image_url"}]}, SAID]}, "messages[0].content has 'image_url'"),
        ({"messages": [ASKED, {**SAID, "reasoning": ["x"]}]}, "the reasoning of the reply is no text"),
        ({"messages": [ASKED, {"role": "assistant", "tool_calls": ["f"]}]}, "a tool call is not of the form"),
        ({"messages": [ASKED, {"role": "assistant", "function_call": {"name": "f"}}]}, "has function_call, the former"),
        (call("{a: 1"), "the arguments of the reply's tool call are no JSON object: f('{a: 1')"),
        (call("[1]"), "are no JSON object: f('[1]')"),
        ({"messages": [ASKED, SAID], "tools": [{"name": "add"}]}, "a tool is not of the form"),
        ({"messages": [ASKED, SAID], "tools": TOOL}, "a tool is not of the form"),
        ({"messages": [ASKED, {"role": "assistant", "tool_calls": {"function": 1}}]}, "a tool call is not of"),
        ({"messages": [ASKED, {**SAID, "content": "\ud83d"}]}, "holds half of a UTF-16 character: \\ud83d"),
        ({"messages": [ASKED, SAID], "more": float("inf")}, "holds NaN or an infinite number"),
        ({"messages": [ASKED, SAID], "task": 7}, "task is no text: 7"),
        ({"messages": [ASKED, SAID], "chat_template_kwargs": [1]}, "chat_template_kwargs is no object: [1]"),
        ({"messages": [ASKED, SAID], "reward": True}, "reward is no number: true"),
        ({"messages": [ASKED, SAID], "reward": "1.0"}, 'reward is no number: "1.0"'),
        ({"messages": [ASKED, SAID], **IDS, "prompt_token_ids": [1.0]}, "prompt_token_ids is no list of token ids"),
        ({"messages": [ASKED, SAID], **IDS, "response_token_ids": [-1]}, "response_token_ids is no list of token ids"),
        ({"messages": [ASKED, SAID], **IDS, "response_token_ids": []}, "response_token_ids is no list of token ids"),
        ({"messages": [ASKED, SAID], "response_token_ids": [1]}, "it has only one of prompt_token_ids and response"),
    ],
)
def test_a_fault_is_named_with_its_line(tmp_path: Path, row: Any, said: str) -> None:
    file = written(tmp_path, {"messages": [ASKED, SAID]}, row)
    with pytest.raises(AgentrigError) as found:
        read_demonstrations(file)
    assert f"{file}, line 2" in str(found.value)
    assert said in str(found.value)


def test_several_faults_are_counted(tmp_path: Path) -> None:
    file = written(tmp_path, {"messages": [ASKED, SAID]}, *[{"messages": [ASKED]}] * 7)
    with pytest.raises(ConfigError) as found:
        read_demonstrations(file)
    lines = str(found.value).splitlines()
    assert lines[0] == f"7 of 8 lines of {file} are no demonstrations:"
    assert [f"line {n}:" in line for n, line in zip(range(2, 7), lines[1:6], strict=True)] == [True] * 5
    assert lines[6:] == ["  … and 2 more"]


def test_a_file_without_demonstrations_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is empty: a line is"):
        read_demonstrations(written(tmp_path, "", " "))
    with pytest.raises(AgentrigError, match="there is no "):
        read_demonstrations(tmp_path / "nothing.jsonl")
    (tmp_path / "latin.jsonl").write_bytes(b'{"messages": "\xe9"}\n')
    with pytest.raises(AgentrigError, match="line 1, character 15: the byte 0xe9 is not UTF-8"):
        read_demonstrations(tmp_path / "latin.jsonl")


@pytest.mark.parametrize("build", [lambda task, call: None, lambda config: None], ids=["the demonstrator", "nothing"])
def test_a_demonstrator_that_is_not_built_is_named_with_the_cure(build: Any) -> None:
    def right(task: Any, call: Any) -> str:
        return "4"

    assert built("sums", lambda config: right, {}) is right
    with pytest.raises(ConfigError, match=r"agent sums: .*write demonstrate=lambda config: demonstrate"):
        built("sums", build, {})
