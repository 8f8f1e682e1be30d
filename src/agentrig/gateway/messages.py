"""Anthropic's Messages API, to and from chat completions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from agentrig.chat_fields import CACHE, Fields
from agentrig.gateway.dialects import (
    Chat,
    Conversation,
    Earlier,
    PartsWriter,
    StreamWriter,
    alike,
    check_fields,
    check_tool,
    choice_of,
    content_of,
    listed,
    sse,
    unfit,
)
from agentrig.http_server import Refused

MAPPED = ("model", "messages", "system", "max_tokens", "stop_sequences", "tools", "tool_choice", "stream", "metadata")
"""Fields that have a counterpart in a chat completion."""

WITHOUT_EFFECT = ("service_tier", "inference_geo")
"""Fields that change nothing of what is sampled."""

FIELDS: Fields = {
    "system[]": ("type", "text", "citations", CACHE),
    "messages[]": ("role", "content"),
    "messages[].content[]": (
        *("type", "text", "source", "id", "name", "input", "tool_use_id", "content", "is_error"),
        *("citations", "caller", CACHE),
    ),
    "messages[].content[].source": ("type", "media_type", "data", "url"),
    "messages[].content[].content[]": ("type", "text", "citations", CACHE),
    "tools[]": ("type", "name", "description", "input_schema", "strict", "eager_input_streaming", CACHE),
    "tool_choice": ("type", "name", "disable_parallel_tool_use"),
    "metadata": ("user_id",),
}
"""Its fields below the top level, as far as they have a counterpart or change nothing."""

CHOICES: Mapping[str, Any] = {"auto": "auto", "any": "required", "none": "none"}

REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
"""Anthropic's names of errors by status; others are `api_error`."""

MALFORMED = "malformed_json"
"""The one key of a tool's input if the model's arguments are no JSON object: they are its value."""


class Messages(Chat):
    """Anthropic's Messages API."""

    hints = frozenset(("thinking", CACHE))
    nested_hints = (("messages[].content[]", "is_error"),)
    fields = FIELDS
    names: Mapping[str, str] = {
        "max_completion_tokens": "max_tokens",
        "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
        "stop": "stop_sequences",
        "tool_choice.function.name": "tool_choice.name",
        "tools[].function.parameters": "tools[].input_schema",
        "tools[].function": "tools[]",
        "user": "metadata.user_id",
    }
    words: Mapping[str, str] = {
        "'image_url'": "'image'",
        '"auto" or "none"': '{"type": "auto"} or {"type": "none"}',
    }

    def asked(self, body: dict[str, Any], earlier: Earlier) -> tuple[dict[str, Any], Mapping[str, str]]:
        """Return the chat completion's request, and the places that its messages come from."""
        check_fields(body, (*MAPPED, *WITHOUT_EFFECT, *self.hints))
        conversation = _conversation(body)
        found = alike(body, conversation.messages, _tool)
        if found["messages"] and found["messages"][-1]["role"] == "assistant":  # the model is to go on with it
            found |= {"add_generation_prompt": False, "continue_final_message": True}
        if body.get("max_tokens") is not None:
            found["max_tokens"] = body["max_tokens"]
        if body.get("stop_sequences"):
            found["stop"] = body["stop_sequences"]
        if body.get("tool_choice") is not None:
            found |= _tool_choice(body["tool_choice"])
        if isinstance(body.get("metadata"), dict) and body["metadata"].get("user_id"):
            found["user"] = body["metadata"]["user_id"]
        return found, conversation.places

    def answer(self, completion: dict[str, Any], body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the message."""
        choice = choice_of(completion)
        message = choice.get("message") or {}
        content: list[dict[str, Any]] = []
        if message.get("content"):
            content.append({"type": "text", "text": message["content"]})
        for call in message.get("tool_calls") or ():
            function = call.get("function") or {}
            said = {"id": call.get("id"), "name": function.get("name"), "input": _input(function.get("arguments"))}
            content.append({"type": "tool_use", **said})
        return {**_head(completion, content), **_ended(choice)}

    def writer(self, body: Mapping[str, Any]) -> StreamWriter:
        """Return what writes the events."""
        return _Writer()

    def error(self, refused: Refused) -> dict[str, Any]:
        """Return Anthropic's form."""
        return {"type": "error", "error": {"type": KINDS.get(refused.status, "api_error"), "message": str(refused)}}


# --- the request ------------------------------------------------------------------------------------


def _conversation(body: Mapping[str, Any]) -> Conversation:
    found = Conversation()
    if body.get("system"):
        found.add({"role": "system", "content": _text(body["system"], "system")}, "system")
    for k, message in enumerate(listed(body.get("messages"), "messages")):
        where = f"messages[{k}]"
        role, content = message.get("role"), message.get("content")
        if isinstance(content, str):
            found.add({"role": role, "content": content}, where)
        elif role == "assistant":
            _assistant(found, listed(content, f"{where}.content"), where)
        else:
            _user(found, str(role), listed(content, f"{where}.content"), where)
    return found


def _assistant(found: Conversation, blocks: list[dict[str, Any]], where: str) -> None:
    message: dict[str, Any] = {"role": "assistant", "content": None}
    found.add(message, where)
    texts = []
    for j, block in enumerate(blocks):
        place = f"{where}.content[{j}]"
        if block.get("type") == "text":
            texts.append(str(block.get("text")))
        elif block.get("type") == "tool_use":
            arguments = json.dumps(block.get("input") or {})
            fields = {"function.arguments": f"{place}.input"}
            found.call(block.get("id"), block.get("name"), arguments, place, fields)
        else:
            raise unfit(f"a block of type {block.get('type')!r:.60}")
    if texts or "tool_calls" not in message:
        message["content"] = "\n".join(texts)


def _user(found: Conversation, role: str, blocks: list[dict[str, Any]], where: str) -> None:
    """Add a message of the user, after a message for each result of a tool in it."""
    parts: list[dict[str, Any]] = []
    for j, block in enumerate(blocks):
        if block.get("type") == "tool_result":
            place, number = f"{where}.content[{j}]", block.get("tool_use_id")
            content = _text(block.get("content") or "", "the content of a tool_result")
            message = {"role": "tool", "tool_call_id": number, "content": content}
            found.add(message, place, tool_call_id=f"{place}.tool_use_id")
        else:
            parts.append(_part(block))
    if parts or not blocks:
        found.add({"role": role, "content": content_of(parts)}, where)


def _part(block: dict[str, Any]) -> dict[str, Any]:
    if block.get("type") == "text":
        return {"type": "text", "text": block.get("text")}
    source = block.get("source") or {}
    if block.get("type") == "image" and source.get("type") in ("base64", "url"):
        url = source.get("url") or f"data:{source.get('media_type')};base64,{source.get('data')}"
        return {"type": "image_url", "image_url": {"url": url}}
    raise unfit(f"a block of type {block.get('type')!r:.60}")


def _text(content: Any, what: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for block in listed(content, what):
        if block.get("type") != "text":
            raise unfit(f"a block of type {block.get('type')!r:.60} in {what}")
        texts.append(str(block.get("text")))
    return "\n".join(texts)


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    check_tool(tool, where, "name, description and input_schema")
    if tool.get("type", "custom") not in ("custom", None):
        raise unfit(f"a tool of type {tool.get('type')!r:.60}")
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema") or {"type": "object"}}
    function |= {name: tool[name] for name in ("description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _tool_choice(choice: Any) -> dict[str, Any]:
    kind = str(choice.get("type")) if isinstance(choice, dict) else ""
    if kind == "tool":
        found: dict[str, Any] = {"tool_choice": {"type": "function", "function": {"name": choice.get("name")}}}
    elif kind in CHOICES:
        found = {"tool_choice": CHOICES[kind]}
    else:
        text = "tool_choice must be an object with type auto, any, tool or none"
        raise Refused(text, status=400, code="invalid_value", param="tool_choice")
    return {**found, "parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") else found


# --- the answer -------------------------------------------------------------------------------------


def _input(arguments: Any) -> dict[str, Any]:
    try:
        found = json.loads(arguments or "{}")
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {MALFORMED: arguments}


def _head(completion: Mapping[str, Any], content: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": f"msg_{completion.get('id')}",
        "type": "message",
        "role": "assistant",
        "model": completion.get("model"),
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(completion),
    }


def _ended(choice: Mapping[str, Any]) -> dict[str, str | None]:
    """Return why a choice ended. A server that tells a stop string from the end has it as `stop_reason`, as vLLM."""
    reason, stop = choice.get("finish_reason") or "", choice.get("stop_reason")
    if reason == "stop" and isinstance(stop, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop}
    return {"stop_reason": REASONS.get(reason, "end_turn"), "stop_sequence": None}


def _usage(completion: Mapping[str, Any]) -> dict[str, int]:
    usage = completion.get("usage") or {}
    return {"input_tokens": usage.get("prompt_tokens", 0), "output_tokens": usage.get("completion_tokens", 0)}


class _Writer(PartsWriter):
    """Writes the events of a message; its parts are blocks of the content."""

    def __init__(self) -> None:
        super().__init__()
        self._index, self._block = -1, dict[str, Any]()

    def started(self) -> bytes:
        return self._say("message_start", message=_head(self.completion, []))

    def begin(self, call: Mapping[str, Any] | None) -> bytes:
        self._index, self._block = self._index + 1, {"type": "text", "text": ""}
        if call is not None:
            name = (call.get("function") or {}).get("name")
            self._block = {"type": "tool_use", "id": call.get("id"), "name": name, "input": {}}
        return self._say("content_block_start", index=self._index, content_block=self._block)

    def more(self, text: str) -> bytes:
        delta = {"type": "input_json_delta", "partial_json": text}
        if self._block["type"] == "text":
            delta = {"type": "text_delta", "text": text}
        return self._say("content_block_delta", index=self._index, delta=delta)

    def end_part(self) -> bytes:
        return self._say("content_block_stop", index=self._index)

    def ended(self) -> bytes:
        last = self._say("message_delta", delta=_ended(self.ending), usage=_usage(self.completion))
        return last + self._say("message_stop")

    def failed(self, message: str) -> bytes:
        return self._say("error", error={"type": "api_error", "message": message})

    def _say(self, kind: str, **fields: Any) -> bytes:
        return sse(json.dumps({"type": kind, **fields}), kind)
