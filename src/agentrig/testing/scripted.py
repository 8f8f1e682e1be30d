"""A scripted OpenAI-compatible server: chat, tools, streaming, errors, delays, and exact token ids.

It replaces the model only: HTTP, the client and the tracer are real. A token is a byte of UTF-8, so a test can compute
the ids that it expects (`prompt_ids`, `Reply.ids`).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, TypeVar

import attrs

from agentrig.endpoints import Endpoint

MODEL = "scripted"
"""The model's name."""

S = TypeVar("S", bound="LocalServer")


@attrs.frozen(kw_only=True)
class Reply:
    """One answer of the server.

    Attributes:
        text: The message's content.
        tool_calls: Tools to call, each a name and its arguments; sampled after the text, as JSON.
        finish_reason: By default `tool_calls` if there are some, else `stop`.
        status: The HTTP status; from 400 on, the reply is an error with `text` as its message.
        headers: More headers, for example `retry-after`.
        delay_s: Seconds before the reply starts.
        pause_s: Seconds between the events of a stream.
        breaks_after: The number of a stream's events after which it ends with an error; None for a whole stream.
        token_ids: Whether the reply has token ids if the request asks for them.
        logprobs: Whether it has log-probabilities if the request asks for them.
    """

    text: str = ""
    tool_calls: Sequence[tuple[str, Mapping[str, Any]]] = ()
    finish_reason: str | None = None
    status: int = 200
    headers: Mapping[str, str] = attrs.field(factory=dict)
    delay_s: float = 0.0
    pause_s: float = 0.0
    breaks_after: int | None = None
    token_ids: bool = True
    logprobs: bool = True

    @property
    def pieces(self) -> list[tuple[str, dict[str, Any]]]:
        """What is sampled, piece by piece: its text, and the change of the message that it makes (OpenAI's delta)."""
        found: list[tuple[str, dict[str, Any]]] = [(letter, {"content": letter}) for letter in self.text]
        for i, (name, arguments) in enumerate(self.tool_calls):
            head = {"index": i, "id": f"call_{i + 1}", "type": "function"}
            found.append((f"\n{name} ", {"tool_calls": [{**head, "function": {"name": name, "arguments": ""}}]}))
            found += [
                (letter, {"tool_calls": [{"index": i, "function": {"arguments": letter}}]})
                for letter in json.dumps(arguments)
            ]
        return found

    @property
    def ids(self) -> list[int]:
        """The token ids of what is sampled: its bytes."""
        return list("".join(text for text, _ in self.pieces).encode())

    @property
    def message(self) -> dict[str, Any]:
        """The assistant's message."""
        calls = [
            {"id": f"call_{i + 1}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
            for i, (name, arguments) in enumerate(self.tool_calls)
        ]
        return {"role": "assistant", "content": self.text if self.text or not calls else None} | (
            {"tool_calls": calls} if calls else {}
        )

    @property
    def ended(self) -> str:
        """Why the sampling ended."""
        return self.finish_reason or ("tool_calls" if self.tool_calls else "stop")


Script = Callable[[Mapping[str, Any]], str | Reply]
"""What the server answers to a request's body: text, or a `Reply`. It is called from several threads."""

Scripted = Script | str | Reply | Sequence[str | Reply]
"""A script; or the answers in order, of which the last one repeats."""


class Request(NamedTuple):
    """A request that the server got: its path, headers (names in lower case) and body."""

    path: str
    headers: Mapping[str, str]
    body: Mapping[str, Any]


class LocalServer(ThreadingHTTPServer):
    """Listens on a port of this machine, by default a free one; each connection has a thread."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, handler: type[BaseHTTPRequestHandler], port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), handler)

    @property
    def url(self) -> str:
        """The base URL; ends in /v1."""
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of connections: clients that are killed hang up."""


class QuietHandler(BaseHTTPRequestHandler):
    """Keeps connections open, sends at once, and logs nothing."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *args: Any) -> None:
        """Stay quiet."""

    def reply(self, status: int, value: Any, headers: Mapping[str, str] | None = None) -> None:
        """Send a reply: bytes as they are, other values as JSON."""
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        known = {"content-type": "application/json", "content-length": str(len(body))}
        for name, text in {**known, **(headers or {})}.items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def serving(server: S) -> Iterator[S]:
    """Serve in a thread until the block ends."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def prompt_ids(body: Mapping[str, Any]) -> list[int]:
    """Return the token ids of a request's prompt: the bytes of its messages, their roles and its tools."""
    tools = json.dumps(body["tools"]) + "\n" if body.get("tools") else ""
    text = "".join(f"<{message['role']}>{_said(message)}\n" for message in body["messages"])
    return list(f"{tools}{text}<assistant>".encode("utf-8", "replace"))


def logprob(token: int, position: int) -> float:
    """Return the log-probability of a sampled token: another for each token and position, to see them mixed up."""
    return -(1 + (7 * token + 13 * position) % 97) / 64


def _said(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    text = content if isinstance(content, str) else "".join(str(part.get("text", "")) for part in content)
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return text + "".join(f"\n{call['name']} {call['arguments']}" for call in calls)


class ScriptedServer(LocalServer):
    """Answers every chat completion as its script says.

    Args:
        script: What it answers.
        model: The name of its model.
        key: The API key that a request must have; '' takes any.

    Attributes:
        requests: What it got, in the order of arrival; may be cleared.
        prompt_ids, logprob: The functions of this module; a subclass may have other tokens.
    """

    def __init__(self, script: Scripted = "ok", *, model: str = MODEL, key: str = "") -> None:
        super().__init__(_Handler)
        self.script, self.model, self.key = script, model, key
        self.requests: list[Request] = []
        self._lock = threading.Lock()

    def endpoint(self, **sampling: Any) -> Endpoint:
        """Return the endpoint that an agent gets, with these sampling fields."""
        key = self.key or "none"
        return Endpoint(base_url=self.url, model=self.model, api_key=key, sampling=sampling, token_ids=True)

    def bodies(self) -> list[Mapping[str, Any]]:
        """Return the bodies of the requests."""
        return [request.body for request in self.requests]

    def got(self, request: Request) -> int:
        """Keep a request, and return how many came before it."""
        with self._lock:
            self.requests.append(request)
            return len(self.requests) - 1

    prompt_ids = staticmethod(prompt_ids)
    logprob = staticmethod(logprob)


def reply_to(body: Mapping[str, Any], script: Scripted, number: int = 0) -> Reply:
    """Return what a script answers to a request, the `number`-th (from 0)."""
    if isinstance(script, Sequence) and not isinstance(script, str):
        script = script[min(number, len(script) - 1)]
    answer = script(body) if callable(script) else script
    return Reply(text=answer) if isinstance(answer, str) else answer


class _Handler(QuietHandler):
    server: ScriptedServer

    def do_GET(self) -> None:
        if self._refused():
            return
        self.reply(200, {"object": "list", "data": [{"id": self.server.model, "object": "model"}]})

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers["content-length"]))
        if self._refused():
            return
        if not self.path.endswith("/chat/completions"):
            text = f"no {self.path} here, only /v1/chat/completions; with gateway.use=on, agentrig's gateway answers it"
            self.reply(404, {"error": {"message": text}})
            return
        body = json.loads(raw)
        headers = {name.lower(): value for name, value in self.headers.items()}
        number = self.server.got(Request(self.path, headers, body))
        reply = reply_to(body, self.server.script, number)
        if reply.delay_s:
            time.sleep(reply.delay_s)
        if reply.status >= 400:
            self.reply(reply.status, {"error": {"message": reply.text, "type": "scripted"}}, reply.headers)
        elif body.get("stream"):
            self._stream(body, reply, number)
        else:
            self.reply(200, self._completion(body, reply, number), reply.headers)

    def _refused(self) -> bool:
        """Answer a request that lacks the key, and say so."""
        refused = bool(self.server.key) and self.headers.get("authorization") != f"Bearer {self.server.key}"
        if refused:
            self.reply(401, {"error": {"message": "this server answers only requests with its key"}})
        return refused

    def _exact(self, body: Mapping[str, Any], reply: Reply, ids: Sequence[int], position: int = 0) -> dict[str, Any]:
        """Return the ids and log-probabilities of tokens that are sampled, as far as the request asks for them."""
        found: dict[str, Any] = {"token_ids": ids} if body.get("return_token_ids") and reply.token_ids else {}
        if body.get("logprobs") and reply.logprobs:
            logprobs = ((token, self.server.logprob(token, i)) for i, token in enumerate(ids, position))
            content = [{"token": chr(t), "logprob": p, "bytes": [t], "top_logprobs": []} for t, p in logprobs]
            found["logprobs"] = {"content": content}
        return found

    def _completion(self, body: Mapping[str, Any], reply: Reply, number: int) -> dict[str, Any]:
        asked, sampled = self.server.prompt_ids(body), reply.ids
        choice = {"message": reply.message, "finish_reason": reply.ended, **self._exact(body, reply, sampled)}
        ids = {"prompt_token_ids": asked} if "token_ids" in choice else {}
        return {
            **_head("chat.completion", body, number),
            "choices": [{"index": i, **choice} for i in range(body.get("n") or 1)],
            "usage": _usage(asked, sampled),
            **ids,
        }

    def _stream(self, body: Mapping[str, Any], reply: Reply, number: int) -> None:
        self.send_response(200)
        for name, value in {"content-type": "text/event-stream", "connection": "close", **reply.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        head, asked = _head("chat.completion.chunk", body, number), self.server.prompt_ids(body)
        ids = {"prompt_token_ids": asked} if "token_ids" in self._exact(body, reply, []) else {}
        self._event({**head, "choices": [_choice({"role": "assistant", "content": ""})], **ids})
        position = 0
        for i, (text, delta) in enumerate(reply.pieces):
            if i == reply.breaks_after:
                self._event({"error": {"message": "the engine died", "code": 500}})
                break
            sampled = list(text.encode())
            self._event({**head, "choices": [_choice(delta) | self._exact(body, reply, sampled, position)]})
            position += len(sampled)
            if reply.pause_s:
                time.sleep(reply.pause_s)
        else:
            self._event({**head, "choices": [_choice({}, reply.ended)]})
            if (body.get("stream_options") or {}).get("include_usage"):
                self._event({**head, "choices": [], "usage": _usage(asked, reply.ids)})
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def _event(self, value: Any) -> None:
        self.wfile.write(f"data: {json.dumps(value)}\n\n".encode())
        self.wfile.flush()


def _head(kind: str, body: Mapping[str, Any], number: int) -> dict[str, Any]:
    return {"id": f"chatcmpl-{number + 1}", "object": kind, "created": int(time.time()), "model": body.get("model")}


def _choice(delta: Mapping[str, Any], ended: str | None = None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "finish_reason": ended}


def _usage(asked: Sequence[int], sampled: Sequence[int]) -> dict[str, int]:
    total = len(asked) + len(sampled)
    return {"prompt_tokens": len(asked), "completion_tokens": len(sampled), "total_tokens": total}


def scripted_server(
    script: Scripted = "ok", *, model: str = MODEL, key: str = ""
) -> AbstractContextManager[ScriptedServer]:
    """Serve in a thread until the block ends; see `ScriptedServer`.

    Example:
        ```python
        with scripted_server(["SELECT 1", Reply(status=503)]) as server:
            answer = agent(task.input, server.endpoint(temperature=0.7))
        ```
    """
    return serving(ScriptedServer(script, model=model, key=key))
