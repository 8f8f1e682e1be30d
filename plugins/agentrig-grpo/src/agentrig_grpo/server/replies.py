"""What a client gets of a sampled choice: its text, its tool calls, and its chunks of a stream."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import orjson

from agentrig_grpo.server import protocol
from agentrig_grpo.server.chat import Chat, StopStrings
from agentrig_grpo.server.engine import Request
from agentrig_grpo.server.protocol import ChatRequest
from agentrig_grpo.server.tools import Form, ToolCall


def response(chat: ChatRequest, choices: Sequence[Request], tokenizer: Chat, *, model: str) -> bytes:
    """Return a chat completion's JSON; with `return_token_ids` its ids are where vLLM 0.24 puts them."""
    body: dict[str, Any] = protocol.head("chat.completion", model, choices[0].version)
    body["choices"] = []
    for choice in choices:
        message, finish = message_of(chat, choice, tokenizer)
        body["choices"].append(_item(chat, choice, tokenizer, finish, message=message))
    body["usage"] = protocol.usage(choices)
    if chat.return_token_ids:
        body["prompt_token_ids"] = choices[0].prompt
    return orjson.dumps(body)


def _item(
    asked: ChatRequest, choice: Request, tokenizer: Chat, finish: str | None, *, start: int = 0, **said: Any
) -> dict[str, Any]:
    """Return a choice of a response or a chunk, with what is said of its tokens from `start` on."""
    item: dict[str, Any] = {
        "index": choice.choice,
        **said,
        "logprobs": logprobs_of(choice, tokenizer, start) if asked.logprobs else None,
        "finish_reason": finish,
        **(stop_reason_of(choice, tokenizer) if finish else {}),
    }
    if asked.return_token_ids:
        item["token_ids"] = choice.tokens[start:]
    return item


def reads_calls(asked: ChatRequest, tokenizer: Chat) -> Form | None:
    """Return the form in which a reply may call tools; None if it may not."""
    form = tokenizer.tool_form if asked.tools and asked.tool_choice == "auto" else None
    return None if isinstance(form, str) else form


def message_of(asked: ChatRequest, choice: Request, tokenizer: Chat) -> tuple[dict[str, Any], str | None]:
    """Return the assistant's message and the finish reason."""
    form = reads_calls(asked, tokenizer)
    text = text_of(choice, tokenizer, form)
    if form is None:
        return {"role": "assistant", "content": text}, choice.finish
    reply = form.read(text, asked.tools)
    if not reply.calls:
        return {"role": "assistant", "content": text}, choice.finish
    calls = reply.calls if asked.parallel_tool_calls else reply.calls[:1]
    made = [_call(choice, i, call) for i, call in enumerate(calls)]
    message = {"role": "assistant", "content": reply.content or None, "tool_calls": made}
    return message, "tool_calls" if choice.finish == "stop" else choice.finish


def text_of(choice: Request, tokenizer: Chat, form: Form | None = None) -> str:
    """Return a reply's text: special tokens left out but those around tool calls, cut before a stop string."""
    text = tokenizer.text(choice.tokens, keep=form.markers if form else ())
    return choice.stopped.cut(text) if isinstance(choice.stopped, StopStrings) else text


def stop_reason_of(choice: Request, tokenizer: Chat) -> dict[str, str]:
    """Return `stop_reason`, the stop string that ended a choice, as vLLM names it; empty if none did."""
    if choice.finish != "stop" or not isinstance(choice.stopped, StopStrings):
        return {}
    stop = choice.stopped.first(tokenizer.text(choice.tokens))
    return {} if stop is None else {"stop_reason": stop}


def logprobs_of(request: Request, tokenizer: Chat, start: int = 0) -> dict[str, Any]:
    """Return OpenAI's `logprobs` object for the tokens from `start` on."""
    content = []
    for place in range(start, len(request.tokens)):
        entry = _entry(tokenizer, request.tokens[place], request.logprobs[place])
        tops = request.tops[place] if request.tops else []
        entry["top_logprobs"] = [_entry(tokenizer, token, logprob) for token, logprob in tops]
        content.append(entry)
    return {"content": content}


class Deltas:
    """What of one choice has been sent, and what is new."""

    def __init__(self, asked: ChatRequest, choice: Request, tokenizer: Chat) -> None:
        self.asked, self.choice, self.tokenizer = asked, choice, tokenizer
        self.form = reads_calls(asked, tokenizer)
        self.text, self.tokens, self.closed = 0, 0, False

    def opening(self) -> dict[str, Any]:
        """Return the first chunk's choice."""
        delta = {"role": "assistant", "content": None if self.form else ""}
        return {"index": self.choice.choice, "delta": delta, "logprobs": None, "finish_reason": None}

    def delta(self) -> dict[str, Any] | None:
        """Return the next chunk's choice; None if there is nothing new.

        Text that may be the beginning of a tool call is sent at the end: as a call, or as text if it is malformed.
        """
        choice = self.choice
        if self.closed or (choice.finish is None and len(choice.tokens) == self.tokens):
            return None
        message: dict[str, Any] = {}
        if choice.finish is None:
            text, finish = self._settled(), None
        else:
            message, finish = message_of(self.asked, choice, self.tokenizer)
            text = message["content"] or ""
        delta: dict[str, Any] = {"content": text[self.text :]}
        if self.form is not None and not delta["content"]:
            delta = {}
        if "tool_calls" in message:
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(message["tool_calls"])]
        item = _item(self.asked, choice, self.tokenizer, finish, start=self.tokens, delta=delta)
        self.text, self.tokens = max(self.text, len(text)), len(choice.tokens)
        self.closed = choice.finish is not None
        return item

    def _settled(self) -> str:
        """Return the part of a running reply that is content, whatever comes next."""
        # A letter may still lack bytes, and a stop string or a call may have begun.
        text = text_of(self.choice, self.tokenizer, self.form).rstrip("\ufffd")
        if isinstance(self.choice.stopped, StopStrings):
            text = self.choice.stopped.safe(text)
        return text if self.form is None else text[: self.form.settled(text)]


def _call(choice: Request, number: int, call: ToolCall) -> dict[str, Any]:
    """Return a tool call in OpenAI's form; its id is the same whenever a run repeats itself."""
    said = repr((choice.prompt, choice.tokens, choice.choice, number))
    name = hashlib.blake2b(said.encode(), digest_size=12).hexdigest()
    return {
        "id": f"call_{name}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _entry(tokenizer: Chat, token: int, logprob: float) -> dict[str, Any]:
    piece = tokenizer.piece(token)
    # JSON has no infinity; OpenAI's own floor for "practically never" is the same number.
    return {"token": piece, "logprob": max(logprob, -9999.0), "bytes": list(piece.encode())}
