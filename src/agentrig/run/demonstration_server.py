"""A local OpenAI-compatible server that answers an agent's calls with demonstrations, and records them.

Each rollout has an endpoint of its own: the API key says which task a call belongs to.
"""

from __future__ import annotations

import asyncio
import json
import random
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs

from agentrig.demonstrations import LEARN, Call, Demonstrate, Encode, Reply, Turn
from agentrig.endpoints import Endpoint
from agentrig.errors import place_of
from agentrig.http_server import (
    Access,
    Receive,
    Refused,
    Scope,
    Send,
    ServerThread,
    bearer,
    listen,
    openai_error,
    reply,
)
from agentrig.tasks import Task
from agentrig.text import words_of
from agentrig.traces import mapping

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

    def answer(
        self, demonstrate: Demonstrate, body: Mapping[str, Any], encode: Encode | None = None
    ) -> tuple[Reply, dict[str, Any]] | None:
        """Ask the demonstrator, and record the turn; None if it can't say.

        Returns:
            The reply, and with `encode` its token ids: the fields of a choice of OpenAI's chat completion.
        """
        messages, tools = body.get("messages") or [], body.get("tools") or []
        with self.lock:
            replies = [turn.reply for turn in self.turns]
            call = Call(messages=messages, tools=tools, turn=len(replies), replies=replies, rng=self.rng)
            try:
                found = demonstrate(self.task, call)
            except Exception as error:
                self.problem = f"the demonstrator raised {words_of(error)}{place_of(error)}"
                return None
            if found is None:
                self.problem = f"the demonstrator has no reply to call {len(replies) + 1}: {call.text[-200:]!r}"
                return None
            reply = Reply(content=found) if isinstance(found, str) else found
            if not isinstance(reply, Reply):
                self.problem = f"the demonstrator returned {reply!r:.100}; return a Reply, a text or None"
                return None
            options = mapping(body.get("chat_template_kwargs"))
            turn, ids = Turn(messages=messages, tools=tools, options=options, reply=reply), {}
            if encode is not None:
                stops = body.get("stop") or []
                try:
                    for stop in [stops] if isinstance(stops, str) else stops:
                        if stop in reply.content:
                            raise ValueError(f"the agent's stop sequence {stop!r} is in it, where a model would end")
                    prompt, tokens = encode(turn)
                except ValueError as error:
                    self.problem = f"the demonstrated call {len(replies) + 1} can't be learned: {error}"
                    return None
                ids = {"prompt_token_ids": list(prompt), "token_ids": list(tokens)}
            self.turns.append(turn)
            return reply, ids


@contextmanager
def demonstrating(
    tasks: Sequence[Task], demonstrate: Demonstrate, *, seed: int | str, encode: Encode | None = None
) -> Iterator[tuple[list[Endpoint], list[Conversation]]]:
    """Serve one endpoint a task on loopback; yields the endpoints and what is recorded of each.

    Args:
        tasks: One for each rollout; a task may occur several times.
        encode: Gives answers their token ids, so that they can be trained on; None for answers without.
    """
    seen: dict[str, int] = {}
    conversations = []
    for task in tasks:
        seen[task.id] = again = seen.get(task.id, -1) + 1
        conversations.append(Conversation(task, random.Random(f"{seed} {task.id} {again}")))
    of_key = {secrets.token_hex(16): conversation for conversation in conversations}

    def admit(scope: Scope) -> bool:
        if bearer(scope) not in of_key:
            raise Refused("this server needs the endpoint's own API key", status=401)
        return True

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        conversation = of_key[bearer(scope)]
        if scope["method"] == "POST":
            await _answer(conversation, demonstrate, encode, scope, receive, send)
        elif (scope["method"], scope["path"]) == ("GET", "/v1/models"):
            await reply(send, 200, {"object": "list", "data": [{"id": MODEL, "object": "model"}]})
        else:
            raise Refused("this server has GET /v1/models and POST /v1/chat/completions", status=404)

    listener = listen("127.0.0.1")
    port = listener.getsockname()[1]
    access = Access(app, admit, host="127.0.0.1", port=port, limit=LIMIT, form=openai_error)
    server = ServerThread(access, listener, "demonstrations")
    url = f"http://127.0.0.1:{server.port}/v1"
    try:
        yield (
            [
                Endpoint(
                    base_url=url,
                    model=MODEL,
                    api_key=key,
                    sampling={"temperature": 0.0},
                    token_ids=encode is not None,
                )
                for key in of_key
            ],
            conversations,
        )
    finally:
        server.stop()


async def _answer(
    conversation: Conversation,
    demonstrate: Demonstrate,
    encode: Encode | None,
    scope: Scope,
    receive: Receive,
    send: Send,
) -> None:
    """Answer one of OpenAI's chat completions, whole or streamed."""
    try:
        body = json.loads((await receive())["body"])
    except (ValueError, RecursionError):
        body = None
    if not scope["path"].endswith("/chat/completions"):
        conversation.problem = f"the agent asks for {scope['path']}; demonstrations answer chat completions only"
        raise Refused(conversation.problem, status=404)
    if not isinstance(body, dict):
        raise Refused("the body must be a JSON object")
    said = await asyncio.to_thread(conversation.answer, demonstrate, body, encode)  # a demonstrator may take its time
    if said is None:
        raise Refused(conversation.problem)
    answer, ids = said
    message = answer.message(f"call-{len(conversation.turns)}")
    end = "tool_calls" if answer.tool_calls else "stop"
    marks = {} if answer.learn else {LEARN: False}
    kind = "chat.completion.chunk" if body.get("stream") else "chat.completion"
    head = {"id": f"demonstration-{secrets.token_hex(8)}", "object": kind, "created": 0, "model": MODEL}
    if body.get("stream"):
        await reply(send, 200, _events({**head, **marks}, message, end, ids), {"content-type": "text/event-stream"})
        return
    n = body.get("n")
    choices = [
        {"index": i, "message": message, "finish_reason": end, "logprobs": None, **ids}
        for i in range(n if isinstance(n, int) and 0 < n <= 128 else 1)
    ]
    usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    await reply(send, 200, {**head, **marks, "choices": choices, "usage": usage})


def _events(head: Mapping[str, Any], message: Mapping[str, Any], end: str, ids: Mapping[str, Any]) -> bytes:
    """Return a message as the events of a stream."""
    calls = [{**call, "index": i} for i, call in enumerate(message.get("tool_calls", ()))]
    delta = {**message, "tool_calls": calls} if calls else message
    chunks = [
        {**head, "choices": [{"index": 0, **choice}]}
        for choice in ({"delta": delta, "finish_reason": None, **ids}, {"delta": {}, "finish_reason": end})
    ]
    return b"".join(b"data: %b\n\n" % text.encode() for text in (*map(json.dumps, chunks), "[DONE]"))
