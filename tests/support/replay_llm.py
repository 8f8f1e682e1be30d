"""A model server that replays known answers: OpenAI's chat API, over plain asyncio, so that it costs little.

It stands in for the *model* only; server, agent, tracer and reward around it are real. A question is answered
with the SQL that the file gives for it, a check always with the verdict that the query is correct. Token ids are
the bytes of prompt and reply.

    python tests/support/replay_llm.py ANSWERS.json [--delay SECONDS]      prints its address, then serves

ANSWERS.json maps "db_id<TAB>question" to SQL; "*" answers all others.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import uvloop

DATABASE = re.compile(r"database (.+?):\n")
QUESTION = re.compile(r"Question: (.*?)(?:\n\nQuery:|\Z)", re.S)


def reply_to(messages: list[dict[str, Any]], answers: Mapping[str, str]) -> str:
    """Return the replayed reply to the prompts of langgraph-sql's preset `full`."""
    text = messages[-1]["content"]
    if "\n\nResult:\n" in text and "Reviewer's remarks" not in text:
        return "It does what was asked.\nVERDICT: CORRECT"
    database, question = DATABASE.search(text), QUESTION.search(text)
    key = f"{database.group(1) if database else ''}\t{question.group(1).strip() if question else ''}"
    return f"```sql\n{answers.get(key, answers.get('*', 'SELECT 1'))}\n```"


def completion(number: int | str, body: Mapping[str, Any], answers: Mapping[str, str]) -> dict[str, Any]:
    reply = reply_to(body["messages"], answers)
    prompt_ids = list("".join(m["content"] for m in body["messages"]).encode())
    ids = list(reply.encode())
    choice: dict[str, Any] = {"index": 0, "message": {"role": "assistant", "content": reply}, "finish_reason": "stop"}
    found: dict[str, Any] = {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "created": 0,
        "model": body.get("model", "replay"),
        "choices": [choice],
        "usage": {
            "prompt_tokens": len(prompt_ids),
            "completion_tokens": len(ids),
            "total_tokens": len(prompt_ids) + len(ids),
        },
    }
    if body.get("return_token_ids"):
        found["prompt_token_ids"], choice["token_ids"] = prompt_ids, ids
    if body.get("logprobs"):
        empty = {"bytes": None, "top_logprobs": []}
        choice["logprobs"] = {"content": [{"token": chr(i % 128), "logprob": -0.5, **empty} for i in ids]}
    return found


async def serve(answers: Mapping[str, str], delay_s: float) -> None:
    """Serve on a free loopback port until killed; the address goes to standard output.

    The same request gets the same answer but for its number, so each is made once: a benchmark's CPU time is not this
    server's.
    """
    count = 0

    @lru_cache(maxsize=256)
    def answer(raw: bytes) -> tuple[bytes, bytes]:
        before, _, after = json.dumps(completion("NUMBER", json.loads(raw), answers)).partition("NUMBER")
        return before.encode(), after.encode()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                length = re.search(r"content-length: *(\d+)", head, re.I)
                raw = await reader.readexactly(int(length.group(1))) if length else b""
                if head.startswith("GET "):
                    data = json.dumps({"object": "list", "data": [{"id": "replay", "object": "model"}]}).encode()
                else:
                    count += 1
                    data = str(count).encode().join(answer(raw))
                    if delay_s:
                        await asyncio.sleep(delay_s)
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(data)
                    + data
                )
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0, limit=2**22)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", flush=True)
    await server.serve_forever()


@contextmanager
def replay_server(answers: Mapping[str, str], folder: Path, *, delay_s: float = 0.0) -> Iterator[str]:
    """Run the server as a process of its own; yields its address."""
    file = folder / "answers.json"
    file.write_text(json.dumps(dict(answers)))
    command = [sys.executable, __file__, str(file), "--delay", str(delay_s)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address.startswith("http"), "the replay server did not start"
        yield address
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("answers", type=Path)
    parser.add_argument("--delay", type=float, default=0.0)
    options = parser.parse_args()
    uvloop.run(serve(json.loads(options.answers.read_text()), options.delay))


if __name__ == "__main__":
    main()
