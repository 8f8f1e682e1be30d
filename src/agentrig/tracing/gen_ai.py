"""LLM calls as OpenTelemetry's flat attributes `gen_ai.*`, from a call's JSON bodies and back.

The names are those of AgentOps, which Agent Lightning's adapters read. The attributes hold less than the bodies:
sampling parameters that AgentOps does not know are missing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentrig.traces import items, mapping

REQUEST_FIELDS = ("model", "max_tokens", "temperature", "top_p", "frequency_penalty", "presence_penalty")
"""Fields of a request that have an attribute `gen_ai.request.*` with their own name."""

READ_FIELDS = (*REQUEST_FIELDS, "top_k", "seed")
"""The same when reading; other instrumentations record two more."""

USAGE_FIELDS = ("total_tokens", "prompt_tokens", "completion_tokens")

TOOL_CALL = "tool_call."
"""Start of the name of a span that stands for one tool call in an LLM call's response."""


def flat(request: Mapping[str, Any], response: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's attributes; what is null in the bodies has none.

    The tool calls of the response are not among them: AgentOps records each as a span, see `tool_calls`.
    """
    found: dict[str, Any] = {"gen_ai.system": "OpenAI", "gen_ai.request.type": "chat"}
    found["gen_ai.request.streaming"] = bool(request.get("stream"))
    found.update({f"gen_ai.request.{key}": request.get(key) for key in REQUEST_FIELDS})
    found["gen_ai.user"] = request.get("user")
    for i, message in enumerate(items(request.get("messages"))):
        found.update({f"gen_ai.prompt.{i}.{key}": value for key, value in _message(mapping(message)).items()})
    for i, tool in enumerate(items(request.get("tools"))):
        function = mapping(mapping(tool).get("function"))
        prefix = f"gen_ai.request.functions.{i}"
        found[f"{prefix}.name"] = function.get("name")
        found[f"{prefix}.description"] = function.get("description")
        found[f"{prefix}.parameters"] = json.dumps(function.get("parameters"))
    found["gen_ai.response.id"], found["gen_ai.response.model"] = response.get("id"), response.get("model")
    found["gen_ai.openai.system_fingerprint"] = response.get("system_fingerprint")
    found.update({f"gen_ai.usage.{key}": mapping(response.get("usage")).get(key) for key in USAGE_FIELDS})
    for choice in map(mapping, items(response.get("choices"))):
        prefix, message = f"gen_ai.completion.{choice.get('index') or 0}", mapping(choice.get("message"))
        found[f"{prefix}.finish_reason"] = choice.get("finish_reason")
        found[f"{prefix}.role"] = message.get("role")
        found[f"{prefix}.content"] = _text(message.get("content"))
        found[f"{prefix}.refusal"] = message.get("refusal")
    return {key: value for key, value in found.items() if value is not None}


def tool_calls(response: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the span of each tool call in a response: its name and its attributes."""
    for choice in items(response.get("choices")):
        for call in map(mapping, items(mapping(mapping(choice).get("message")).get("tool_calls"))):
            function = mapping(call.get("function"))
            name = str(function.get("name") or "")
            yield (
                TOOL_CALL + name,
                {
                    "agentops.span.kind": "tool",
                    "tool.name": name,
                    "tool.parameters": function.get("arguments") or "",
                    "tool.call.id": call.get("id") or "",
                    "tool.call.type": call.get("type") or "function",
                },
            )


def request_of(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request's body, as far as the attributes have it."""
    found = {key: attributes.get(f"gen_ai.request.{key}") for key in READ_FIELDS}
    found["stream"] = attributes.get("gen_ai.request.streaming") or None
    found["user"] = attributes.get("gen_ai.user")
    found["messages"] = [_read_message(m) for m in _numbered(attributes, "gen_ai.prompt")]
    found["tools"] = [
        {"type": "function", "function": {**function, "parameters": _json(function.get("parameters"))}}
        for function in _numbered(attributes, "gen_ai.request.functions")
    ] or None
    return {key: value for key, value in found.items() if value is not None}


def response_of(attributes: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """Return the response's body, as far as the attributes of the call and of its tool calls' spans have it."""
    choices = []
    for i, choice in enumerate(_numbered(attributes, "gen_ai.completion")):
        reason = choice.pop("finish_reason", None)
        choices.append({"index": i, "finish_reason": reason, "message": {"content": None, **_read_message(choice)}})
    calls = [
        {
            "id": tool.get("tool.call.id"),
            "type": tool.get("tool.call.type") or "function",
            "function": {"name": tool["tool.name"], "arguments": tool.get("tool.parameters") or ""},
        }
        for tool in tools
        if "tool.name" in tool
    ]
    if calls and choices:
        choices[0]["message"]["tool_calls"] = calls
    usage = {key: attributes.get(f"gen_ai.usage.{key}") for key in USAGE_FIELDS}
    found: dict[str, Any] = {
        "id": attributes.get("gen_ai.response.id"),
        "model": attributes.get("gen_ai.response.model"),
        "system_fingerprint": attributes.get("gen_ai.openai.system_fingerprint"),
        "choices": choices,
        "usage": {key: value for key, value in usage.items() if value is not None} or None,
    }
    return {key: value for key, value in found.items() if value is not None}


def logprobs_of(attributes: Mapping[str, Any]) -> list[float] | None:
    """Return the log-probability of each response token; None if none are recorded."""
    content = _json(attributes.get("logprobs.content"))
    return [token["logprob"] for token in content] if isinstance(content, list) and content else None


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    found = {
        "role": message.get("role"),
        "content": _text(message.get("content")),
        "tool_call_id": message.get("tool_call_id"),
    }
    for i, call in enumerate(map(mapping, items(message.get("tool_calls")))):
        function = mapping(call.get("function"))
        found[f"tool_calls.{i}.id"] = call.get("id")
        found[f"tool_calls.{i}.name"], found[f"tool_calls.{i}.arguments"] = (
            function.get("name"),
            function.get("arguments"),
        )
    return found


def _read_message(flat_message: Mapping[str, Any]) -> dict[str, Any]:
    calls = _numbered(flat_message, "tool_calls")
    found = {key: value for key, value in flat_message.items() if not key.startswith("tool_calls.")}
    parts = _json(found.get("content"))
    if isinstance(parts, list) and parts and all(isinstance(part, dict) and "type" in part for part in parts):
        found["content"] = parts
    if calls:
        found["tool_calls"] = [
            {
                "id": call.get("id"),
                "type": "function",
                "function": {"name": call.get("name"), "arguments": call.get("arguments") or ""},
            }
            for call in calls
        ]
    return found


def _numbered(attributes: Mapping[str, Any], prefix: str) -> list[dict[str, Any]]:
    """Return numbered groups of attributes, in order: those of `PREFIX.0.role` as `{"role": …}`."""
    found: dict[int, dict[str, Any]] = {}
    start = prefix + "."
    for key, value in attributes.items():
        if key.startswith(start):
            number, _, name = key[len(start) :].partition(".")
            if number.isdigit() and name:
                found.setdefault(int(number), {})[name] = value
    return [found[number] for number in sorted(found)]


def _text(content: Any) -> str | None:
    return content if content is None or isinstance(content, str) else json.dumps(content)


def _json(text: Any) -> Any:
    """Return the value of a JSON text; anything else as it is."""
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text
