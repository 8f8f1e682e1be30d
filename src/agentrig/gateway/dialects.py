"""What the gateway speaks: the forms in which agents ask, and how each maps to a chat completion and back."""

from __future__ import annotations

import abc
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from agentrig.chat_fields import CHAT, Fields
from agentrig.http_server import Refused, openai_error

SAMPLING = frozenset(
    (
        "frequency_penalty",
        "min_p",
        "min_tokens",
        "presence_penalty",
        "repetition_penalty",
        "return_token_ids",
        "seed",
        "stop",
        "temperature",
        "top_k",
        "top_p",
    )
)
"""Fields that go to the model's server as they are, whatever API a request speaks: a run's sampling may have them."""

ELSEWHERE = 'to send it to a model that is not trained, name that in [gateway.models] with api = "own"'
"""What to do about something that the run's model cannot be asked."""


def unfit(what: str, param: str = "") -> Refused:
    """Return the refusal of something that does not map to a chat completion."""
    text = f"{what} does not map to a chat completion, which is what the run's model is asked for; {ELSEWHERE}"
    return Refused(text, status=400, code="unsupported", param=param)


def check_fields(body: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuse fields that have a value and are not known."""
    for name in body.keys() - set(known) - SAMPLING:
        if body[name] not in (None, False, [], {}):
            raise unfit(f"the field {name}", name)


def listed(value: Any, what: str) -> list[dict[str, Any]]:
    """Return a list of objects, as it is; refuse anything else. `what` names the field."""
    if value is None:
        raise Refused(f"{what} is missing", status=400, code="missing_required_parameter", param=what)
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise Refused(f"{what} must be a list of objects", status=400, code="invalid_type", param=what)
    return value


def content_of(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return the content of a message: one text if the parts are nothing but texts, else the parts."""
    if all(part["type"] == "text" for part in parts):
        return "\n".join(str(part["text"]) for part in parts)
    return parts


def check_tool(tool: Mapping[str, Any], where: str, fields: str) -> None:
    """Refuse a tool in the form of chat completions; `fields` are those that one of this API has."""
    if "function" in tool and "name" not in tool:
        text = f"{where}.name is missing: in this API a tool has {fields}, and no function"
        raise Refused(text, status=400, code="invalid_value", param=f"{where}.name")


def alike(
    body: Mapping[str, Any], messages: list[dict[str, Any]], tool: Callable[[dict[str, Any], str], dict[str, Any]]
) -> dict[str, Any]:
    """Return the request of a chat completion with what other APIs have in the same place.

    Args:
        body: The body in another API.
        messages: Its messages.
        tool: Returns the tool of a chat completion for one of its tools, and the place of that.
    """
    found: dict[str, Any] = {"model": body.get("model"), "messages": messages}
    found |= {name: body[name] for name in sorted(body.keys() & SAMPLING) if body[name] is not None}
    if body.get("tools"):
        found["tools"] = [tool(each, f"tools[{i}]") for i, each in enumerate(listed(body["tools"], "tools"))]
    if body.get("stream"):
        found["stream"], found["stream_options"] = True, {"include_usage": True}
    return found


def choice_of(completion: Mapping[str, Any]) -> dict[str, Any]:
    """Return the one choice of a completion, or of an event of a stream; empty if it has none."""
    choices = completion.get("choices") or [{}]
    found: dict[str, Any] = choices[0]
    return found


def error_in(data: str) -> str:
    """Return the message of an error in a stream, '' if the data is none."""
    try:
        error = json.loads(data).get("error")
    except (ValueError, AttributeError):
        return ""
    return str(error.get("message", error)) if isinstance(error, dict) else str(error or "")


class Conversation:
    """The messages of a chat completion, as they are made from the body of another API.

    Attributes:
        messages: The messages.
        places: The place in that body from which each message comes, and each tool call, by its path.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.places: dict[str, str] = {}

    def add(self, message: dict[str, Any], place: str, **fields: str) -> None:
        """Add a message; `fields` are the places of fields that have another name there."""
        self._note(f"messages[{len(self.messages)}]", place, fields)
        self.messages.append(message)

    def call(self, number: Any, name: Any, arguments: Any, place: str, fields: Mapping[str, str]) -> None:
        """Add a call of a tool to the last message."""
        calls = self.messages[-1].setdefault("tool_calls", [])
        path = f"messages[{len(self.messages) - 1}].tool_calls[{len(calls)}]"
        self._note(path, place, {"function": place, **fields})
        calls.append({"id": number, "type": "function", "function": {"name": name, "arguments": arguments}})

    def _note(self, path: str, place: str, fields: Mapping[str, str]) -> None:
        self.places[path] = place
        self.places |= {f"{path}.{name}": at for name, at in fields.items()}


class StreamWriter:
    """Writes a streamed chat completion; a subclass writes it in another dialect's form."""

    def event(self, data: str, event: dict[str, Any] | None) -> bytes:
        """Return what the client gets for one event of the upstream's stream.

        Args:
            data: The event's data, as it came.
            event: Its JSON object without token ids that the client did not ask for; None for what is no part of the
                completion: the end, an error, or data that is not JSON.
        """
        return sse(data if event is None else json.dumps(event))

    def end(self) -> bytes:
        """Return what ends the stream, if its end has not come as an event."""
        return b""


class PartsWriter(StreamWriter, abc.ABC):
    """Writes a stream in parts, texts and calls of tools: one ends when the next one begins. A subclass writes each.

    Attributes:
        completion: The first event of the upstream's stream, with the usage that came since; empty before it.
        ending: The choice that has a finish reason; empty before it.
    """

    def __init__(self) -> None:
        self.completion: dict[str, Any] = {}
        self.ending: dict[str, Any] = {}
        self._part, self._ended = "", False
        self._call: int | None = None

    def event(self, data: str, event: dict[str, Any] | None) -> bytes:
        """Return what the client gets for one event of the upstream's stream."""
        if event is None:
            if message := error_in(data):
                self._ended = True
                return self.failed(message)
            return self.end() if data.strip() == "[DONE]" else b""
        out = []
        if not self.completion:
            self.completion = {"usage": None, **event}
            out.append(self.started())
        self.completion["usage"] = event.get("usage") or self.completion["usage"]
        choice = choice_of(event)
        if choice.get("finish_reason"):
            self.ending = choice
        delta = choice.get("delta") or {}
        if delta.get("content"):
            if self._part != "text":
                out.append(self._ends(then="text") + self.begin(None))
            out.append(self.more(delta["content"]))
        for call in delta.get("tool_calls") or ():
            index = call.get("index")
            if self._part != "call" or (index is not None and index != self._call):
                self._call = index
                out.append(self._ends(then="call") + self.begin(call))
            if arguments := (call.get("function") or {}).get("arguments"):
                out.append(self.more(arguments))
        return b"".join(out)

    def end(self) -> bytes:
        """Return the last events, unless the stream has ended or never began."""
        if self._ended or not self.completion:
            return b""
        self._ended = True
        return self._ends(then="") + self.ended()

    def _ends(self, *, then: str) -> bytes:
        before, self._part = self._part, then
        return self.end_part() if before else b""

    @abc.abstractmethod
    def started(self) -> bytes:
        """Begin the stream."""

    @abc.abstractmethod
    def begin(self, call: Mapping[str, Any] | None) -> bytes:
        """Begin a part: a call of a tool, or a text."""

    @abc.abstractmethod
    def more(self, text: str) -> bytes:
        """Go on with the part: with its text, or the call's arguments."""

    @abc.abstractmethod
    def end_part(self) -> bytes:
        """End the part."""

    @abc.abstractmethod
    def ended(self) -> bytes:
        """End the stream."""

    @abc.abstractmethod
    def failed(self, message: str) -> bytes:
        """End the stream by an error."""


Earlier = Mapping[str, list[dict[str, Any]]]
"""The messages up to each answer that a rollout has got from the Responses API, by the response's id."""


class Chat:
    """OpenAI's chat completions, which the upstream speaks too; a subclass is another API.

    Attributes:
        hints: Fields that have no effect on the run's model: they are dropped, and the span says so.
        nested_hints: As `hints`, below the top level: the place of the objects, and the name.
        fields: The fields below the top level.
        names: What the API calls fields of chat completions that have another name there; `[]` stands for any index.
        words: The same for what error messages say about values.
    """

    hints = frozenset(("reasoning_effort", "store", "verbosity"))
    nested_hints: Iterable[tuple[str, str]] = ()
    fields: Fields = CHAT
    names: Mapping[str, str] = {}
    words: Mapping[str, str] = {}

    def asked(self, body: dict[str, Any], earlier: Earlier) -> tuple[dict[str, Any], Mapping[str, str]]:
        """Return the chat completion's request, and the places that its messages come from; see `Conversation`."""
        return body, {}

    def named(self, path: str, places: Mapping[str, str]) -> str:
        """Return what the agent's API calls a field of the chat completion: `input[0].content`."""
        names = {**self.names, **places}
        for name in sorted(names, key=len, reverse=True):
            if match := re.match(re.escape(name).replace(r"\[\]", r"\[(\d+)\]") + r"(?!\w)", path):
                index = f"[{match[1]}]" if match.groups() else ""
                return names[name].replace("[]", index) + path[match.end() :]
        return path

    def answer(self, completion: dict[str, Any], body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to `body` from the completion, without ids that the client did not ask for."""
        return completion

    def writer(self, body: Mapping[str, Any]) -> StreamWriter:
        """Return what writes the streamed answer to `body`."""
        return StreamWriter()

    def error(self, refused: Refused) -> dict[str, Any]:
        """Return the body of an error."""
        return openai_error(refused)


def sse(data: str, event: str = "") -> bytes:
    """Return a server-sent event."""
    lines = "".join(f"data: {line}\n" for line in data.split("\n"))
    return f"{f'event: {event}' + chr(10) if event else ''}{lines}\n".encode()
