"""Tool calls: how a model's chat template writes them, and how they are read from what the model sampled.

A reply in which a call is malformed stays text: what the policy writes is never an error of the server.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from agentrig_grpo.server.fields import BadValue, read, short

NAME, VALUE = "probe_tool", "probe_value"
PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "A tool.",
        "parameters": {"type": "object", "properties": {"a": {"type": "string", "description": "A value."}}},
    },
}
PROBE_CALL = {"id": "call00000", "type": "function", "function": {"name": NAME, "arguments": {"a": VALUE}}}
PROBE_USER = {"role": "user", "content": "hi"}
"""A chat that a template is tried with."""

Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]], str]
"""Renders messages and tools by a chat template, without a generation prompt."""


@attrs.frozen
class ToolCall:
    """One call of a tool.

    Attributes:
        arguments: A JSON object as text.
    """

    name: str
    arguments: str


@attrs.frozen
class Reply:
    """A sampled text, taken apart.

    Attributes:
        content: The text outside of calls.
        calls: In the order in which they were sampled; empty if there are none, or if one is malformed.
    """

    content: str
    calls: tuple[ToolCall, ...] = ()


class _Malformed(Exception):
    """A call can't be read."""


@attrs.frozen
class Tagged:
    """Calls inside `<tool_call>` and `</tool_call>`; the last end tag may be missing.

    Attributes:
        name: Of the form, for messages.
        opening: A regular expression of how a call begins.
        inner: Reads what is between the tags.
        markers: Tokens around a call. They are kept in the text even if they are special tokens.
    """

    name: str
    opening: str
    inner: Callable[[str, Sequence[Mapping[str, Any]]], ToolCall]
    markers: tuple[str, ...] = ("<tool_call>", "</tool_call>")

    def writes(self, turn: str) -> bool:
        """Return whether a template that rendered `PROBE_CALL` so uses this form."""
        return re.search(self.opening, turn) is not None

    def read(self, text: str, tools: Sequence[Mapping[str, Any]]) -> Reply:
        """Return a sampled text's content and calls."""
        start, end = self.markers
        before, *rest = text.split(start)
        if not rest:
            return Reply(text)
        outside, calls = [before.rstrip()], []
        for i, part in enumerate(rest):
            written, closed, after = part.partition(end)
            try:
                if not closed and i < len(rest) - 1:
                    raise _Malformed
                calls.append(self.inner(written, tools))
            except _Malformed:
                return Reply(text)
            outside.append(after.strip())
        return Reply("\n".join(filter(None, outside)), tuple(calls))

    def settled(self, text: str) -> int:
        """Return how many characters of a growing text are content for certain; a call may begin after them."""
        start = self.markers[0]
        at = text.find(start)
        if at < 0:
            at = next((len(text) - n for n in range(len(start) - 1, 0, -1) if text.endswith(start[:n])), len(text))
        return len(text[:at].rstrip())


@attrs.frozen
class Bare:
    """Llama's form: the whole reply is `{"name": …, "parameters": {…}}`, or several with `;` between them.

    Attributes:
        several: Whether the template can write several calls of one message.
    """

    several: bool = True
    name: str = "llama"
    markers: tuple[str, ...] = ("<|python_tag|>",)

    def writes(self, turn: str) -> bool:
        """See `Tagged`."""
        return re.search(rf'\{{\s*"name":\s*"{NAME}",\s*"parameters":\s*\{{', turn) is not None

    def read(self, text: str, tools: Sequence[Mapping[str, Any]]) -> Reply:
        """See `Tagged`."""
        rest, calls = text.strip().removeprefix(self.markers[0]), []
        try:
            while rest := rest.strip():
                calls.append(_call(rest[: (end := _end_of_object(rest))], "parameters", "arguments"))
                rest = rest[end:].lstrip()
                if rest and not rest.startswith(";"):
                    return Reply(text)
                rest = rest[1:]
        except _Malformed:
            return Reply(text)
        return Reply("", tuple(calls)) if calls and (self.several or len(calls) == 1) else Reply(text)

    def settled(self, text: str) -> int:
        """See `Tagged`."""
        begun = text.lstrip()
        return 0 if begun.startswith(("{", self.markers[0])) or self.markers[0].startswith(begun) else len(text)


Form = Tagged | Bare
"""How a chat template writes tool calls."""


def _object(text: str) -> dict[str, Any]:
    try:
        found = read(text.encode())
    except (BadValue, UnicodeEncodeError):
        raise _Malformed from None
    if not isinstance(found, dict):
        raise _Malformed
    return found


def _end_of_object(text: str) -> int:
    try:
        return json.JSONDecoder().raw_decode(text)[1]
    except (ValueError, RecursionError):
        raise _Malformed from None


def _call(text: str, *keys: str) -> ToolCall:
    """Read `{"name": NAME, KEY: {…}}`, with one of the keys."""
    found = _object(text)
    name = found.pop("name", None)
    if found.get("type") == "function":
        del found["type"]
    arguments = [found[key] for key in keys if key in found]
    if not isinstance(name, str) or not name or len(found) != 1 or not arguments or not isinstance(arguments[0], dict):
        raise _Malformed
    return ToolCall(name, json.dumps(arguments[0], ensure_ascii=False))


def _json_call(text: str, tools: Sequence[Mapping[str, Any]]) -> ToolCall:
    return _call(text, "arguments")


_FUNCTION = re.compile(r"\s*<function=([^<>\s]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^<>\s]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)


def _tagged_call(text: str, tools: Sequence[Mapping[str, Any]]) -> ToolCall:
    """Read `<function=NAME><parameter=KEY>VALUE</parameter>…</function>`, as Qwen3-Coder writes it."""
    function = _FUNCTION.fullmatch(text)
    if function is None:
        raise _Malformed
    name, body = function[1], function[2]
    texts = {
        key
        for tool in tools
        if tool["function"]["name"] == name
        for key, about in _properties(tool).items()
        if isinstance(about, Mapping) and about.get("type") == "string"
    }
    arguments: dict[str, Any] = {}
    at = 0
    while body[at:].strip():
        parameter = _PARAMETER.match(body, at)
        if parameter is None:
            raise _Malformed
        key, value = parameter[1], parameter[2]
        arguments[key] = value if key in texts else _value(value)
        at = parameter.end()
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def _properties(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    found = (tool["function"].get("parameters") or {}).get("properties")
    return found if isinstance(found, Mapping) else {}


def _value(text: str) -> Any:
    """Return the JSON value of a parameter; text that is no JSON is the value itself."""
    try:
        return read(text.encode())
    except BadValue:
        return text


FORMS: Sequence[Form] = (
    Tagged("hermes", rf'<tool_call>\s*\{{\s*"name":\s*"{NAME}"', _json_call),
    Tagged("qwen3-coder", rf"<tool_call>\s*<function={NAME}>", _tagged_call),
    Bare(),
)
"""The forms that are read, in the order in which a template is compared with them."""


def form_of(render: Render) -> Form | str:
    """Return how a chat template writes tool calls, or why this server can't serve tools with it."""
    take = (
        "take a model whose chat template has tools (Qwen2.5, Qwen3, Llama 3.1), make a small one for your tasks with "
        "agentrig warmup, or put the tools into the prompt"
    )
    try:
        shown = render([PROBE_USER], [PROBE_TOOL])
    except Exception as error:  # a template can raise anything
        return f"this model's chat template refuses tools ({type(error).__name__}: {error}): {take}"
    if NAME not in shown:
        return f"this model's chat template shows the model no tools: {take}"
    try:
        turn = _turn(render, [PROBE_CALL])
    except Exception as error:
        return f"this model's chat template refuses a tool call ({type(error).__name__}: {error}): {take}"
    form = next((f for f in FORMS if f.writes(turn)), None)
    if form is None:
        return (
            f"this model's chat template writes a tool call as {short(turn)}, which this server can't read "
            f"(it reads the forms {', '.join(f.name for f in FORMS)}): {take}"
        )
    return Bare(several=_several(render)) if isinstance(form, Bare) else form


def _turn(render: Render, calls: Sequence[Mapping[str, Any]]) -> str:
    """Return how the template writes a message with calls."""
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    before, whole = render([PROBE_USER], []), render([PROBE_USER, message], [])
    return whole.removeprefix(before)


def _several(render: Render) -> bool:
    try:
        return _turn(render, [PROBE_CALL, PROBE_CALL]).count(VALUE) == 2
    except Exception:  # as Llama 3.1's does: it has room for one call a message
        return False
