"""OpenAI's Responses API, to and from chat completions; what came before a request is stored with its rollout."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from agentrig.chat_fields import Fields
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

MAPPED = (
    "model", "input", "instructions", "tools", "tool_choice", "parallel_tool_calls", "max_output_tokens", "text",
    "stream", "user",
)  # fmt: skip
"""Fields that have a counterpart in a chat completion."""

WITHOUT_EFFECT = (
    "metadata", "store", "stream_options", "service_tier", "prompt_cache_key", "prompt_cache_retention",
    "safety_identifier", "top_logprobs",
)  # fmt: skip
"""Fields that change nothing of what is sampled, or that concern what OpenAI stores or bills."""

PART = ("type", "text", "image_url", "detail", "annotations", "logprobs")
"""Fields of a part of a content."""

FIELDS: Fields = {
    "input[]": ("type", "role", "content", "id", "status", "phase", "call_id", "name", "arguments", "output"),
    "input[].content[]": PART,
    "input[].output[]": PART,
    "tools[]": ("type", "name", "description", "parameters", "strict"),
    "tool_choice": ("type", "name"),
    "text": ("format", "verbosity"),
    "text.format": ("type", "name", "description", "schema", "strict"),
    "stream_options": ("include_obfuscation",),
}
"""Its fields below the top level, as far as they have a counterpart or change nothing."""


class Responses(Chat):
    """OpenAI's Responses API."""

    hints = frozenset(("reasoning",))
    nested_hints = (("text", "verbosity"),)
    fields = FIELDS
    names: Mapping[str, str] = {
        "max_completion_tokens": "max_output_tokens",
        "max_tokens": "max_output_tokens",
        "messages": "input",
        "response_format.json_schema": "text.format",
        "response_format": "text.format",
        "tool_choice.function.name": "tool_choice.name",
        "tools[].function": "tools[]",
    }
    words: Mapping[str, str] = {"'image_url'": "'input_image'"}

    def asked(self, body: dict[str, Any], earlier: Earlier) -> tuple[dict[str, Any], Mapping[str, str]]:
        """Return the chat completion's request, and the places that its messages come from."""
        check_fields(body, (*MAPPED, *WITHOUT_EFFECT, *self.hints, "include", "truncation", "previous_response_id"))
        if set(body.get("include") or ()) - {"reasoning.encrypted_content"}:
            raise unfit(f"include = {body['include']}", "include")
        if body.get("truncation") not in (None, "disabled"):
            raise unfit(f"truncation = {body['truncation']!r}", "truncation")
        conversation = Conversation()
        if body.get("instructions"):
            conversation.add({"role": "system", "content": body["instructions"]}, "instructions")
        if (former := body.get("previous_response_id")) is not None:
            if former not in earlier:
                text = f"this rollout has got no response {former!r:.100} that it stored"
                code = "previous_response_not_found"
                raise Refused(text, status=400, code=code, param="previous_response_id")
            for message in earlier[former]:
                conversation.add(message, "previous_response_id")
        _add_input(conversation, body)
        found = alike(body, conversation.messages, _tool)
        for name in ("parallel_tool_calls", "user"):
            if body.get(name) is not None:
                found[name] = body[name]
        if body.get("max_output_tokens") is not None:
            found["max_tokens"] = body["max_output_tokens"]
        if body.get("tool_choice") is not None:
            found["tool_choice"] = _tool_choice(body["tool_choice"])
        if (form := _response_format(body.get("text"))) is not None:
            found["response_format"] = form
        return found, conversation.places

    def answer(self, completion: dict[str, Any], body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the response."""
        choice = choice_of(completion)
        message = choice.get("message") or {}
        output = [_message(completion["id"], message["content"])] if message.get("content") else []
        output += [_call(call) for call in message.get("tool_calls") or ()]
        return _response(completion, body, output, choice.get("finish_reason"))

    def writer(self, body: Mapping[str, Any]) -> StreamWriter:
        """Return what writes the events."""
        return _Writer(body)

    def conversation(self, body: Mapping[str, Any], earlier: Earlier, completion: dict[str, Any]) -> dict[str, Any]:
        """Return what `previous_response_id` refers to: the messages up to an answer, by its id; without instructions.

        Nothing with `store: false`, as at OpenAI.
        """
        if body.get("store") is False:
            return {}
        before = earlier.get(str(body.get("previous_response_id")), [])
        message = choice_of(completion).get("message") or {}
        answer = {key: message[key] for key in ("role", "content", "tool_calls") if key in message}
        asked = Conversation()
        _add_input(asked, body)
        return {f"resp_{completion.get('id')}": [*before, *asked.messages, answer]}


# --- the request ------------------------------------------------------------------------------------


def _add_input(found: Conversation, body: Mapping[str, Any]) -> None:
    """Add a message for each item of the input, but one for all calls that an answer has made."""
    given = body.get("input")
    if isinstance(given, str):
        found.add({"role": "user", "content": given}, "input", content="input")
        return
    if given is not None and not isinstance(given, list):
        text = "input must be a list of objects, or a text"
        raise Refused(text, status=400, code="invalid_type", param="input")
    answering = False  # whether the last message is an answer in the input, which can have calls
    for k, item in enumerate(listed(given, "input")):
        where, kind = f"input[{k}]", item.get("type", "message")
        if kind == "message":
            role = {"developer": "system"}.get(item.get("role", ""), item.get("role"))
            found.add({"role": role, "content": _content(item.get("content"), f"{where}.content")}, where)
        elif kind == "function_call":
            if not answering:
                found.add({"role": "assistant", "content": None}, where)
            number = item.get("call_id")
            found.call(number, item.get("name"), item.get("arguments"), where, {"id": f"{where}.call_id"})
        elif kind == "function_call_output":
            content, number = _content(item.get("output"), f"{where}.output"), item.get("call_id")
            message = {"role": "tool", "tool_call_id": number, "content": content}
            found.add(message, where, content=f"{where}.output", tool_call_id=f"{where}.call_id")
        else:
            raise unfit(f"an input item of type {kind!r:.60}")
        answering = found.messages[-1]["role"] == "assistant"


def _content(content: Any, where: str) -> Any:
    if isinstance(content, str):
        return content
    parts: list[dict[str, Any]] = []
    for part in listed(content, where):
        kind = part.get("type")
        if kind in ("input_text", "output_text", "text"):
            parts.append({"type": "text", "text": part.get("text")})
        elif kind == "input_image" and part.get("image_url"):
            image = {"url": part["image_url"], "detail": part.get("detail") or "auto"}
            parts.append({"type": "image_url", "image_url": image})
        else:
            raise unfit(f"content of type {kind!r:.60}")
    return content_of(parts)


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    check_tool(tool, where, "name, description and parameters")
    if tool.get("type") != "function":
        raise unfit(f"a tool of type {tool.get('type')!r:.60}")
    kept = {k: tool[k] for k in ("name", "description", "parameters", "strict") if tool.get(k) is not None}
    return {"type": "function", "function": kept}


def _tool_choice(choice: Any) -> Any:
    if choice in ("auto", "none", "required"):
        return choice
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    raise unfit(f"tool_choice = {choice!r:.100}")


def _response_format(text: Any) -> dict[str, Any] | None:
    if text is None:
        return None
    if not isinstance(text, dict):
        raise Refused("text must be an object", status=400, code="invalid_type")
    form = text.get("format") or {"type": "text"}
    if form.get("type") == "text":
        return None
    if form.get("type") == "json_object":
        return {"type": "json_object"}
    if form.get("type") == "json_schema":
        kept = {k: form[k] for k in ("name", "description", "schema", "strict") if form.get(k) is not None}
        return {"type": "json_schema", "json_schema": kept}
    raise unfit(f"text.format of type {form.get('type')!r:.60}")


# --- the answer -------------------------------------------------------------------------------------


def _message(number: str, text: str, status: str = "completed") -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    content = [part] if status == "completed" else []
    return {"id": f"msg_{number}", "type": "message", "role": "assistant", "status": status, "content": content}


def _call(call: Mapping[str, Any], status: str = "completed") -> dict[str, Any]:
    function = call.get("function") or {}
    return {
        "id": f"fc_{call.get('id')}",
        "type": "function_call",
        "call_id": call.get("id"),
        "name": function.get("name"),
        "arguments": function.get("arguments") or "" if status == "completed" else "",
        "status": status,
    }


def _response(
    completion: Mapping[str, Any], body: Mapping[str, Any], output: list[dict[str, Any]], reason: str | None
) -> dict[str, Any]:
    """Return a response; without a finish reason it is one that is still under way."""
    usage, short = completion.get("usage"), reason in ("length", "content_filter")
    status = "incomplete" if short else "completed" if reason else "in_progress"
    details = {"reason": "max_output_tokens" if reason == "length" else "content_filter"} if short else None
    return {
        "id": f"resp_{completion.get('id')}",
        "object": "response",
        "created_at": completion.get("created") or int(time.time()),
        "status": status,
        "error": None,
        "incomplete_details": details,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": body.get("metadata") or {},
        "model": completion.get("model"),
        "output": output,
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "previous_response_id": body.get("previous_response_id"),
        "store": body.get("store") is not False,
        "temperature": body.get("temperature"),
        "text": body.get("text") or {"format": {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_p": body.get("top_p"),
        "truncation": "disabled",
        "usage": {
            "input_tokens": usage.get("prompt_tokens", 0),
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": usage.get("completion_tokens", 0),
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.get("total_tokens", 0),
        }
        if usage
        else None,
    }


class _Writer(PartsWriter):
    """Writes the events of a response; its parts are items of the output."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        super().__init__()
        self._body = body
        self._output: list[dict[str, Any]] = []
        self._item: dict[str, Any] = {}
        self._said, self._number = "", -1

    def started(self) -> bytes:
        response = _response(self.completion, self._body, [], None)
        return self._say("response.created", response=response) + self._say("response.in_progress", response=response)

    def begin(self, call: Mapping[str, Any] | None) -> bytes:
        if call is None:
            self._item = _message(f"{self.completion.get('id')}_{len(self._output)}", "", "in_progress")
        else:
            self._item = _call(call, "in_progress")
        out = self._say("response.output_item.added", output_index=len(self._output), item=self._item)
        if call is None:
            self._said = ""
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            out += self._say("response.content_part.added", content_index=0, part=part, **self._where())
        return out

    def more(self, text: str) -> bytes:
        if self._item["type"] == "message":
            self._said += text
            return self._say("response.output_text.delta", content_index=0, delta=text, logprobs=[], **self._where())
        self._item["arguments"] += text
        return self._say("response.function_call_arguments.delta", delta=text, **self._where())

    def end_part(self) -> bytes:
        item, where = self._item, self._where()
        if item["type"] == "message":
            (part,) = _message("", self._said)["content"]
            item["content"] = [part]
            out = self._say("response.output_text.done", content_index=0, text=self._said, logprobs=[], **where)
            out += self._say("response.content_part.done", content_index=0, part=part, **where)
        else:
            name, arguments = item["name"], item["arguments"]
            out = self._say("response.function_call_arguments.done", name=name, arguments=arguments, **where)
        item["status"] = "completed"
        out += self._say("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        return out

    def ended(self) -> bytes:
        response = _response(self.completion, self._body, self._output, self.ending.get("finish_reason") or "stop")
        return self._say(f"response.{response['status']}", response=response)

    def failed(self, message: str) -> bytes:
        return self._say("error", code="upstream_failed", message=message, param=None)

    def _where(self) -> dict[str, Any]:
        return {"item_id": self._item["id"], "output_index": len(self._output)}

    def _say(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return sse(json.dumps({"type": kind, "sequence_number": self._number, **fields}), kind)
