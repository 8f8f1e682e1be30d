"""The messages, tools and response format of a request: checked, and in the form that chat templates take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NewType, TypedDict, get_args

import cattrs

from agentrig_grpo.server import values
from agentrig_grpo.server.fields import BadField
from agentrig_grpo.server.values import short

Role = Literal["system", "developer", "user", "assistant", "tool"]
ROLES = get_args(Role)
"""Who may have written a message."""

Text = NewType("Text", str)
"""A message's content: a string, or a list of text parts that are joined."""

Arguments = NewType("Arguments", dict[str, Any])
"""The arguments of a tool call: JSON text in a request, an object for the template."""

ToolChoice = NewType("ToolChoice", str)
"""`auto` or `none`."""

Schema = NewType("Schema", dict[str, Any])
"""A response format as a JSON schema; empty for free text."""

Name = NewType("Name", str)
"""A tool's name."""


class Called(TypedDict):
    """The function of a tool call."""

    name: Name
    arguments: Arguments


class _Call(TypedDict):
    function: Called


class Call(_Call, total=False):
    """A tool call in a message of the assistant."""

    id: str
    type: Literal["function"]


class _Message(TypedDict):
    role: Role
    content: Text


class Message(_Message, total=False):
    """One message. Its other fields of `agentrig.chat_fields`, such as `name`, go to the chat template as they are."""

    tool_calls: list[Call]
    tool_call_id: str


class _Function(TypedDict):
    name: Name


class Function(_Function, total=False):
    """What a tool is called with; `parameters` is a JSON schema."""

    description: str
    parameters: dict[str, Any]
    strict: bool


class Tool(TypedDict):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


def add_rules(rules: cattrs.Converter) -> None:
    """Add the rules of the types above to a request's converter."""
    rules.register_structure_hook(Text, _text)
    rules.register_structure_hook(Name, _name)
    rules.register_structure_hook(Arguments, _arguments)
    rules.register_structure_hook(ToolChoice, _tool_choice)
    rules.register_structure_hook(Schema, _schema)
    plain = rules.get_structure_hook(Message)
    rules.register_structure_hook(Message, lambda value, type_: _message(value, plain))


def _message(value: Any, plain: Callable[[Any, Any], Any]) -> Any:
    """Check a message; one with tool calls needs no content."""
    if isinstance(value, dict):
        value = {key: item for key, item in value.items() if key != "tool_calls" or item not in (None, [])}
        if "tool_calls" in value:
            if value.get("role") != "assistant":
                raise BadField("has tool_calls; only a message of the assistant may")
            if value.get("content") is None:
                value["content"] = ""
    return plain(value, Message)


def _text(content: Any, _: Any) -> str:
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


def _name(name: Any, _: Any) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= 256:
        raise BadField(f"must be a string of 1 to 256 characters, not {short(name)}")
    return name


def _arguments(arguments: Any, _: Any) -> Any:
    if isinstance(arguments, str):
        try:
            arguments = values.read(arguments.encode() or b"{}", "the text")
        except values.BadValue as error:
            raise BadField(f"must be the text of a JSON object: {error}") from None
    if not isinstance(arguments, dict):
        raise BadField(f"must be the text of a JSON object, not {short(arguments)}")
    return arguments


def _tool_choice(choice: Any, _: Any) -> str:
    if choice not in ("auto", "none"):
        words = f'must be "auto" or "none", not {short(choice)}: this server forces no call'
        raise BadField(words, code="unsupported_value")
    return str(choice)


def _schema(form: Any, _: Any) -> Mapping[str, Any]:
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
