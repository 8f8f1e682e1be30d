"""Streamed replies: server-sent events, joined into the completion that an unstreamed call would have returned.

Nothing here raises because of a server's data: a broken stream gives an error message for the call's span.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs

LINE_END = re.compile(r"\r\n|\n|\r")
"""Line ends of an event stream; others, such as U+2028 and U+0085, are part of a line."""


@attrs.frozen(kw_only=True)
class Streamed:
    """The part of a stream that was read.

    Attributes:
        raw: The bytes, as the server sent them.
        whole: Whether the stream was read to its end; False if the agent stopped early.
        error: The error, if reading the stream raised.
        aborted: Whether the agent made it raise, by a cancellation.
    """

    raw: bytes
    whole: bool
    error: str | None = None
    aborted: bool = False


def is_abort(error: BaseException) -> bool:
    """Return whether an error in a call comes from the agent, which cancels it or ends: no server raises such a one."""
    return not isinstance(error, Exception)


class Events:
    """Splits an event stream into the data of its events, by the rules of server-sent events, as it arrives."""

    def __init__(self) -> None:
        self._data: list[str] = []
        self._cut = ""
        self._begun = False

    def feed(self, text: str, *, last: bool = False) -> list[str]:
        """Return the data of the events that this text completes; `last` if nothing follows it."""
        if not self._begun and text:
            self._begun, text = True, text.removeprefix("\ufeff")
        found: list[str] = []
        text = self._cut + text
        held = "\r" if text.endswith("\r") and not last else ""  # perhaps the first half of a line end
        *lines, cut = LINE_END.split(text.removesuffix(held))
        self._cut = cut + held
        for line in lines:
            name, _, value = line.partition(":")
            if name == "data":
                self._data.append(value.removeprefix(" "))
            elif not line and self._data:
                found.append("\n".join(self._data))
                self._data = []
        return found

    @property
    def rest(self) -> str:
        """What came after the last complete event."""
        return "\n".join([*self._data, self._cut]).strip()


def events(text: str) -> tuple[list[str], str]:
    """Return the data of each event of a whole stream, and the rest after the last complete event."""
    reader = Events()
    return reader.feed(text, last=True), reader.rest


def joined(text: str, *, whole: bool = True) -> tuple[dict[str, Any], str | None]:
    """Join the events of a streamed completion into the body of an unstreamed one.

    Return that of all valid events, and the first error or None. An incomplete last event is an error only if the
    stream was read to its end (`whole`).
    """
    joining = Joining()
    found, rest = events(text)
    for data in found:
        joining.add(data)
    return joining.end(rest, whole=whole)


class Joining:
    """Joins the events of a streamed completion as they arrive.

    Attributes:
        done: Whether the event that ends the stream has come.
    """

    def __init__(self) -> None:
        self._completion = _Completion()
        self._errors: list[str] = []
        self._number = 0
        self.done = False

    def add(self, data: str) -> dict[str, Any] | None:
        """Add the data of an event; return its JSON object, or None if it is no part of the completion."""
        self._number += 1
        if data.strip() == "[DONE]":
            self.done = True
            return None
        if not data.strip():
            return None
        try:
            event: dict[str, Any] = json.loads(data)
            if event.get("error"):
                self._errors.append(f"the stream broke: {event['error']}")
                return None
            self._completion.add(event)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            self._errors.append(
                f"event {self._number} of the stream is not part of a completion: {type(error).__name__}: {error}: "
                f"{data[:200]!r}"
            )
            return None
        return event

    def end(self, rest: str = "", *, whole: bool = True) -> tuple[dict[str, Any], str | None]:
        """Return what `joined` returns; `rest` came after the last complete event."""
        errors = list(self._errors)
        if self.done or not whole:
            pass  # data after the end does not matter, and neither does data that the agent did not wait for
        elif rest:
            errors.append(f"the stream ended inside an event: {rest[:200]!r}")
        elif not self._completion.finished:
            errors.append("the stream ended before the completion did: no finish_reason, no [DONE]")
        return self._completion.body(), errors[0] if errors else None


class _Completion:
    """Joins events, separately for each choice."""

    def __init__(self) -> None:
        self._top: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}
        self._messages: dict[int, dict[str, Any]] = {}

    @property
    def finished(self) -> bool:
        """Whether a choice has a finish reason."""
        return any(choice["finish_reason"] for choice in self._choices.values())

    def add(self, event: dict[str, Any]) -> None:
        """Add an event."""
        for key, value in event.items():
            if key not in ("choices", "object") and value is not None:
                self._top[key] = value if key == "usage" else self._top.get(key, value)
        for part in event.get("choices") or ():
            index = int(part.get("index") or 0)
            empty: dict[str, Any] = {"index": index, "finish_reason": None, "token_ids": [], "logprobs": []}
            choice = self._choices.setdefault(index, empty)
            message = self._messages.setdefault(index, {"role": "assistant"})
            choice["finish_reason"] = part.get("finish_reason") or choice["finish_reason"]
            if part.get("stop_reason") is not None:
                choice["stop_reason"] = part["stop_reason"]
            choice["token_ids"] += part.get("token_ids") or ()
            choice["logprobs"] += (part.get("logprobs") or {}).get("content") or ()
            if part.get("prompt_token_ids"):
                choice["prompt_token_ids"] = part["prompt_token_ids"]
            for key, value in (part.get("delta") or {}).items():
                if key == "tool_calls":
                    calls = message.setdefault(key, [])
                    for call in value or ():
                        _add_call(calls, call)
                else:
                    _add(message, key, value)

    def body(self) -> dict[str, Any]:
        """Return the unstreamed body."""
        choices = []
        for index in sorted(self._choices) or [0]:
            choice = self._choices.get(index, {"index": 0, "finish_reason": None, "token_ids": [], "logprobs": []})
            message = self._messages.get(index, {"role": "assistant"})
            calls = [{k: v for k, v in call.items() if k != "index"} for call in message.get("tool_calls", ())]
            content = message.get("content", None if calls else "")
            more = {"tool_calls": calls} if calls else {}
            choices.append(
                {
                    **choice,
                    "logprobs": {"content": choice["logprobs"]},
                    "message": {**message, "content": content, **more},
                }
            )
        return {**self._top, "choices": choices}


def _add(into: dict[str, Any], key: str, value: Any) -> None:
    """Add a field of a delta: text is appended, dicts are merged; other values and the role are replaced."""
    old = into.get(key)
    if isinstance(value, dict):
        table = into.setdefault(key, {}) if old is None else old
        for name, part in value.items():
            _add(table, name, part)
    elif isinstance(value, str) and isinstance(old, str) and key not in ("role", "id", "type"):
        into[key] = old + value
    elif value is not None:
        into[key] = value


def _add_call(calls: list[dict[str, Any]], part: dict[str, Any]) -> None:
    """Add a part of a tool call to the call with its index; without an index, to the last call unless its id is new."""
    index = part.get("index")
    same = [c for c in calls if c.get("index") == index] if index is not None else calls[-1:]
    if not same or (index is None and part.get("id") not in (None, same[-1].get("id"))):
        calls.append({})
        same = calls[-1:]
    for key, value in part.items():
        _add(same[-1], key, value)


Done = Callable[[Streamed], None]
"""Called once, when a stream is closed."""


class _Copy:
    """Keeps a copy of the data of a stream, and passes it on once."""

    def __init__(self, done: Done) -> None:
        self.chunks: list[bytes] = []
        self.whole = False
        self.error: str | None = None
        self.aborted = False
        self._done: Done | None = done

    @contextmanager
    def reading(self) -> Iterator[list[bytes]]:
        """Give the list for the chunks that are read; store an error. It is no error if the reader stops early."""
        try:
            yield self.chunks
            self.whole = True
        except GeneratorExit:
            raise
        except BaseException as error:
            self.error = f"the stream broke: {type(error).__name__}: {error}"
            self.aborted = is_abort(error)
            raise

    def close(self) -> None:
        """Pass on the data that was read."""
        done, self._done = self._done, None
        if done is not None:
            content = b"".join(self.chunks)
            done(Streamed(raw=content, whole=self.whole, error=self.error, aborted=self.aborted))
            self.chunks.clear()


def tee(base: Any) -> Any:
    """Return a subclass of a client library's stream class, asynchronous or not, that keeps a copy of the data.

    It passes the copy on when it is closed, or by `kept.close()` if the agent never closes it.
    """

    class Tee(base):  # type: ignore[misc]
        def __init__(self, stream: Any, done: Done) -> None:
            self._stream, self.kept = stream, _Copy(done)

        def __iter__(self) -> Iterator[bytes]:
            with self.kept.reading() as chunks:
                for chunk in self._stream:
                    chunks.append(chunk)
                    yield chunk

        async def __aiter__(self) -> AsyncIterator[bytes]:
            with self.kept.reading() as chunks:
                async for chunk in self._stream:
                    chunks.append(chunk)
                    yield chunk

        def close(self) -> None:
            try:
                self._stream.close()
            finally:
                self.kept.close()

        async def aclose(self) -> None:
            try:
                await self._stream.aclose()
            finally:
                self.kept.close()

    return Tee
