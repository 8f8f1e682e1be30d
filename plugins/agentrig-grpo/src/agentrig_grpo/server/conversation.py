"""The messages, tools and response format of a request: checked, and in the form that chat templates take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentrig_grpo.server.fields import BadField, BadValue, list_of, object_of, of_type, one_of, read, short

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Who may have written a message."""


def messages(value: Any) -> Any:
    """Check the messages of a request."""
    found = _messages(value)
    if not found:
        raise BadField("is empty; send at least one")
    return found


def _message(value: Any) -> Any:
    """Check a message; one with tool calls needs no content.

    Its other fields of `agentrig.chat_fields`, such as `name`, go to the chat template as they are.
    """
    if isinstance(value, dict):
        value = {key: item for key, item in value.items() if key != "tool_calls" or item not in (None, [])}
        if "tool_calls" in value:
            if value.get("role") != "assistant":
                raise BadField("has tool_calls; only a message of the assistant may")
            if value.get("content") is None:
                value["content"] = ""
    return _plain_message(value)


def _text(content: Any) -> str:
    """Return a message's content: a string, or a list of text parts that are joined."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        for i, part in enumerate(content):
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, dict) else part
                words = f"must be a string or a list of text parts; the model reads no {short(kind)} (part {i})"
                raise BadField(words, code="unsupported_value")
        return "".join(part["text"] for part in content)
    raise BadField("must be a string or a list of text parts")


def _name(name: Any) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= 256:
        raise BadField(f"must be a string of 1 to 256 characters, not {short(name)}")
    return name


def _arguments(arguments: Any) -> Any:
    """Return the arguments of a tool call: JSON text in a request, an object for the template."""
    if isinstance(arguments, str):
        try:
            arguments = read(arguments.encode() or b"{}", "the text")
        except BadValue as error:
            raise BadField(f"must be the text of a JSON object: {error}") from None
    if not isinstance(arguments, dict):
        raise BadField(f"must be the text of a JSON object, not {short(arguments)}")
    return arguments


def tool_choice(choice: Any) -> str:
    """Check whether tools may be called."""
    if choice not in ("auto", "none"):
        words = f'must be "auto" or "none", not {short(choice)}: this server forces no call'
        raise BadField(words, code="unsupported_value")
    return str(choice)


def schema(form: Any) -> Mapping[str, Any]:
    """Return a response format as a JSON schema; empty for free text."""
    kind = form.get("type") if isinstance(form, dict) else None
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"type": "object"}
    if kind == "json_schema":
        given = form.get("json_schema")
        schema = given.get("schema") if isinstance(given, dict) else None
        if not isinstance(schema, dict):
            raise BadField("must have the schema, an object, in json_schema.schema")
        return schema or {"type": ["object", "array", "string", "number", "boolean", "null"]}
    raise BadField(f'must be an object with the type "text", "json_object" or "json_schema", not {short(form)}')


_called = object_of({"name": _name, "arguments": _arguments})
_call = object_of({"function": _called}, id=of_type(str), type=one_of("function"))
_plain_message = object_of(
    {"role": one_of(*ROLES), "content": _text}, tool_calls=list_of(_call), tool_call_id=of_type(str)
)
_messages = list_of(_message)
_function = object_of({"name": _name}, description=of_type(str), parameters=of_type(dict), strict=of_type(bool))

tools = list_of(object_of({"type": one_of("function"), "function": _function}))
"""Checks the tools that the model may call; `parameters` is a JSON schema."""
