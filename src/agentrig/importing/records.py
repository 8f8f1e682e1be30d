"""Conversations that are one record each: OpenAI's chat form, and ATIF, the trajectories of Harbor's agents."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from agentrig.demonstrations import TEXTS, TOKENS, Unfit
from agentrig.figures import number
from agentrig.importing.calls import Found, line_of
from agentrig.traces import items, mapping


def chat_calls(record: Mapping[str, Any], place: str) -> Iterator[Found]:
    """Yield the calls of a record with `messages`: one for each message of the assistant.

    Token ids of the record are those of its last message.
    """
    if not isinstance(record.get("messages"), list):
        yield place, Unfit("its messages are no list", f"{json.dumps(record.get('messages'), ensure_ascii=False):.80}")
        return
    messages = record["messages"]
    said = [i for i, message in enumerate(messages) if mapping(message).get("role") == "assistant"]
    if not said:
        yield place, Unfit("no message is the assistant's")
    for i in said:
        keys = ("tools", *TEXTS, "reward", *(TOKENS if i == len(messages) - 1 else ()))
        more = {key: record[key] for key in keys if key in record}
        yield f"{place}, messages[{i}]", line_of(messages=messages[:i], reply=messages[i], finish=None, **more)


SOURCES = {"system": "system", "user": "user", "agent": "assistant"}
"""The source of a step of ATIF, and the role of its message."""


def atif_calls(record: Mapping[str, Any], place: str) -> Iterator[Found]:
    """Yield the calls of a trajectory, and of those that are embedded in it: one for each step of the agent.

    The prompt is what came before: messages, tool calls, and observations (those of no tool call are a user's message).
    The reward is the number `reward` of the trajectory's `extra`.
    """
    agent = mapping(record.get("agent"))
    more = {"tools": agent.get("tool_definitions"), "reward": number(mapping(record.get("extra")).get("reward"))}
    messages: list[dict[str, Any]] = []
    for i, step in enumerate(map(mapping, items(record.get("steps")))):
        where = f"{place}, steps[{i}]"
        message: dict[str, Any] = {"role": SOURCES.get(str(step.get("source"))), "content": step.get("message")}
        calls = [_tool_call(call) for call in items(step.get("tool_calls"))]
        if calls:
            message |= {"content": message["content"] or None, "tool_calls": calls}
        if step.get("reasoning_content"):
            message["reasoning_content"] = step["reasoning_content"]
        if message["role"] == "assistant":
            yield where, _call(step, agent, list(messages), message, more)
        messages.append(message)
        for result in map(mapping, items(mapping(step.get("observation")).get("results"))):
            answers = result.get("source_call_id")
            whose = {"role": "tool", "tool_call_id": answers} if answers is not None else {"role": "user"}
            messages.append({**whose, "content": result.get("content") or ""})
    for i, inner in enumerate(map(mapping, items(record.get("subagent_trajectories")))):
        yield from atif_calls(inner, f"{place}, subagent_trajectories[{i}]")


def _call(
    step: Mapping[str, Any], agent: Mapping[str, Any], messages: list[Any], message: Any, more: Mapping[str, Any]
) -> dict[str, Any] | Unfit:
    if step.get("is_copied_context"):
        return Unfit("the step is copied from an earlier trajectory")
    if step.get("llm_call_count") not in (None, 1):
        return Unfit("the step is not one call of a model", f"llm_call_count is {step['llm_call_count']}")
    metrics = mapping(step.get("metrics"))
    prompt, sampled = metrics.get("prompt_token_ids"), metrics.get("completion_token_ids")
    if prompt and sampled:
        model = step.get("model_name") or agent.get("model_name")
        more = {**more, **dict(zip(TOKENS, (prompt, sampled), strict=True)), "tokenizer": model}
    return line_of(messages=messages, reply=message, finish=None, **more)


def _tool_call(call: Any) -> dict[str, Any]:
    given = mapping(call)
    arguments = given.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    function = {"name": given.get("function_name"), "arguments": text}
    return {"id": given.get("tool_call_id"), "type": "function", "function": function}
