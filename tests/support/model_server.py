"""A small OpenAI-compatible model server in a thread, which records its requests.

It replaces the model only. Token ids are the bytes of the prompt and of the reply. The last message can change what it
does: `[status=503]`, `[sleep=0.5]`, `[no-ids]`, `[reply=SELECT 1]`.
"""

from __future__ import annotations

import json
import re
import time
from contextlib import AbstractContextManager
from typing import Any

from local_server import LocalServer, QuietHandler, serving

WISH = re.compile(r"\[([a-z-]+)(?:=([^\]]*))?\]")


class ModelServer(LocalServer):
    """Answers `odd` unless a message changes it; `requests` has path, headers and body of each POST."""

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []

    def bodies(self) -> list[dict[str, Any]]:
        """Return the bodies of all requests since the last `clear`."""
        return [body for _, _, body in self.requests]


class _Handler(QuietHandler):
    server: ModelServer

    def _send(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self._send(200, {"object": "list", "data": [{"id": "toy-model", "object": "model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.requests.append((self.path, {k.lower(): v for k, v in self.headers.items()}, body))
        content = body["messages"][-1]["content"]
        text = content if isinstance(content, str) else json.dumps(content)
        wishes = dict(WISH.findall(text))
        if "sleep" in wishes:
            time.sleep(float(wishes["sleep"]))
        if "status" in wishes:
            self._send(int(wishes["status"]), {"error": {"message": f"asked for {wishes['status']}", "type": "toy"}})
            return
        reply = wishes.get("reply", "odd")
        prompt_ids = list("".join(str(m["content"]) for m in body["messages"]).encode())
        with_ids = body.get("return_token_ids") and "no-ids" not in wishes
        if body.get("stream"):
            self._stream(body, reply, prompt_ids if with_ids else None, most=int(wishes.get("break", 0)))
        else:
            self._send(200, self._completion(body, reply, prompt_ids if with_ids else None))

    def _completion(self, body: dict[str, Any], reply: str, prompt_ids: list[int] | None) -> dict[str, Any]:
        number = len(self.server.requests)
        choice: dict[str, Any] = {"index": 0, "message": {"role": "assistant", "content": reply}}
        choice["finish_reason"] = "stop"
        found = {
            "id": f"chatcmpl-{number}",
            "object": "chat.completion",
            "created": 0,
            "model": body.get("model"),
            "choices": [choice],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        }
        if prompt_ids is not None:
            found["prompt_token_ids"], choice["token_ids"] = prompt_ids, list(reply.encode())
        if body.get("logprobs"):
            choice["logprobs"] = _logprobs(reply)
        return found

    def _stream(self, body: dict[str, Any], reply: str, prompt_ids: list[int] | None, most: int = 0) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        head = {"id": "chatcmpl-s", "object": "chat.completion.chunk", "created": 0, "model": body.get("model")}
        for i, letter in enumerate(reply):
            last = i + 1 == len(reply)
            choice: dict[str, Any] = {"index": 0, "delta": {"content": letter}, "finish_reason": None}
            choice["finish_reason"] = "stop" if last else None
            if prompt_ids is not None:
                choice["token_ids"] = list(letter.encode())
            if body.get("logprobs"):
                choice["logprobs"] = _logprobs(letter)
            event = {**head, "choices": [choice]}
            if i == 0 and prompt_ids is not None:
                event["prompt_token_ids"] = prompt_ids
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            self.wfile.flush()
            if i + 1 == most:
                self.wfile.write(b'data: {"error": {"message": "the engine died", "code": 500}}\n\n')
                break
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True


def _logprobs(text: str) -> dict[str, Any]:
    return {"content": [{"token": c, "logprob": -0.25, "bytes": None, "top_logprobs": []} for c in text]}


def model_server() -> AbstractContextManager[ModelServer]:
    """Serve in a thread."""
    return serving(ModelServer())
