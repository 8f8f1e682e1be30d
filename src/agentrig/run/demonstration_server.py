"""A local OpenAI-compatible server that answers an agent's calls with demonstrations, and records them.

Each rollout has an endpoint of its own: the API key says which task a call belongs to.
"""

from __future__ import annotations

import hmac
import json
import random
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import attrs

from agentrig.demonstrations import Call, Demonstrate, Reply, Turn
from agentrig.endpoints import Endpoint
from agentrig.errors import place_of
from agentrig.tasks import Task

MODEL = "demonstration"
LIMIT = 8 << 20
"""Most bytes of a request."""


@attrs.define(eq=False)
class Conversation:
    """The calls of one rollout.

    Attributes:
        turns: The calls that were answered.
        problem: Why a call could not be answered; '' if all were.
    """

    task: Task
    rng: random.Random
    turns: list[Turn] = attrs.field(factory=list)
    problem: str = ""
    lock: threading.Lock = attrs.field(factory=threading.Lock, repr=False)

    def answer(self, demonstrate: Demonstrate, messages: Sequence[Any], tools: Sequence[Any]) -> Reply | None:
        """Ask the demonstrator, and record the turn; None if it can't say."""
        with self.lock:
            replies = [turn.reply for turn in self.turns]
            call = Call(messages=messages, tools=tools, turn=len(replies), replies=replies, rng=self.rng)
            try:
                found = demonstrate(self.task, call)
            except Exception as error:
                self.problem = f"the demonstrator raised {type(error).__name__}: {error}{place_of(error)}"
                return None
            if found is None:
                self.problem = f"the demonstrator has no reply to call {len(replies) + 1}: {call.text[-200:]!r}"
                return None
            reply = Reply(content=found) if isinstance(found, str) else found
            if not isinstance(reply, Reply):
                self.problem = f"the demonstrator returned {reply!r:.100}; return a Reply, a text or None"
                return None
            self.turns.append(Turn(messages=messages, tools=tools, reply=reply))
            return reply


@contextmanager
def demonstrating(
    tasks: Sequence[Task], demonstrate: Demonstrate, *, seed: int
) -> Iterator[tuple[list[Endpoint], list[Conversation]]]:
    """Serve one endpoint a task on loopback; yields the endpoints and what is recorded of each.

    Args:
        tasks: One for each rollout; a task may occur several times.
        demonstrate: Says what to answer.
        seed: Of the conversations' random numbers.
    """
    seen: dict[str, int] = {}
    conversations = []
    for task in tasks:
        seen[task.id] = again = seen.get(task.id, -1) + 1
        conversations.append(Conversation(task, random.Random(f"{seed} {task.id} {again}")))
    secret = secrets.token_hex(16)

    class Handler(_Handler):
        def conversation(self, key: str) -> Conversation | None:
            found, _, number = key.rpartition("-")
            if not hmac.compare_digest(found.encode(), secret.encode()) or not number.isdigit():
                return None
            return conversations[int(number)] if int(number) < len(conversations) else None

        def demonstrate(self, conversation: Conversation, body: Mapping[str, Any]) -> Reply | None:
            return conversation.answer(demonstrate, body.get("messages") or [], body.get("tools") or [])

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        yield (
            [
                Endpoint(base_url=url, model=MODEL, api_key=f"{secret}-{i}", sampling={"temperature": 0.0})
                for i in range(len(tasks))
            ],
            conversations,
        )
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    """OpenAI's chat completions, whole or streamed."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def conversation(self, key: str) -> Conversation | None:
        raise NotImplementedError

    def demonstrate(self, conversation: Conversation, body: Mapping[str, Any]) -> Reply | None:
        raise NotImplementedError

    def log_message(self, format: str, *args: Any) -> None:
        """Stay silent."""

    def do_GET(self) -> None:
        """List the model."""
        if self._conversation() is not None:
            self._send(200, {"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    def do_POST(self) -> None:
        """Answer a call."""
        length = int(self.headers.get("Content-Length") or 0)
        if length > LIMIT:
            self.close_connection = True
            return self._refuse(413, f"the request is larger than {LIMIT} bytes")
        data = self.rfile.read(length)
        conversation = self._conversation()
        if conversation is None:
            return None
        if not self.path.endswith("/chat/completions"):
            conversation.problem = f"the agent asks for {self.path}; demonstrations answer chat completions only"
            return self._refuse(404, conversation.problem)
        try:
            body = json.loads(data)
        except ValueError:
            body = None
        if not isinstance(body, dict):
            return self._refuse(400, "the body must be a JSON object")
        reply = self.demonstrate(conversation, body)
        if reply is None:
            return self._refuse(400, conversation.problem)
        message = message_of(reply, f"call-{len(conversation.turns)}")
        end = "tool_calls" if reply.tool_calls else "stop"
        if body.get("stream"):
            return self._stream(message, end)
        n = body.get("n")
        choices = [
            {"index": i, "message": message, "finish_reason": end, "logprobs": None}
            for i in range(n if isinstance(n, int) and 0 < n <= 128 else 1)
        ]
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        return self._send(200, {**_head("chat.completion"), "choices": choices, "usage": usage})

    def _conversation(self) -> Conversation | None:
        found = self.conversation((self.headers.get("Authorization") or "").removeprefix("Bearer ").strip())
        if found is None:
            self._refuse(401, "this server needs the endpoint's own API key")
        return found

    def _stream(self, message: Mapping[str, Any], end: str) -> None:
        calls = [{**call, "index": i} for i, call in enumerate(message.get("tool_calls", ()))]
        delta = {**message, "tool_calls": calls} if calls else message
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for change, reason in ((delta, None), ({}, end)):
            chunk = {
                **_head("chat.completion.chunk"),
                "choices": [{"index": 0, "delta": change, "finish_reason": reason}],
            }
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def _refuse(self, status: int, message: str) -> None:
        self._send(status, {"error": {"message": message, "type": "invalid_request_error"}})

    def _send(self, status: int, value: Mapping[str, Any]) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _head(kind: str) -> dict[str, Any]:
    return {"id": "demonstration", "object": kind, "created": 0, "model": MODEL}


def message_of(reply: Reply, prefix: str) -> dict[str, Any]:
    """Return a reply as OpenAI's assistant message; the ids of its tool calls begin with `prefix`."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.content or (None if reply.tool_calls else "")}
    if reply.tool_calls:
        message["tool_calls"] = [
            {
                "id": f"{prefix}-{i}",
                "type": "function",
                "function": {"name": call["name"], "arguments": json.dumps(call.get("arguments", {}))},
            }
            for i, call in enumerate(reply.tool_calls)
        ]
    return message
