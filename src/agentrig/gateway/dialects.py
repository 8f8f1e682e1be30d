"""What the gateway speaks: the forms in which agents ask, and how each maps to a chat completion and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from agentrig.http_server import Refused, openai_error


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


Earlier = Mapping[str, list[dict[str, Any]]]
"""The messages up to each answer that a rollout has got from the Responses API, by the response's id."""


class Chat:
    """OpenAI's chat completions, which the upstream speaks too; a subclass is another API.

    Attributes:
        hints: Fields that have no effect on the run's model: they are dropped, and the span says so.
    """

    hints = frozenset(("reasoning_effort", "verbosity"))

    def asked(self, body: dict[str, Any], earlier: Earlier) -> dict[str, Any]:
        """Return the chat completion's request.

        Raises:
            agentrig.http_server.Refused: It does not map to one.
        """
        return body

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
