"""Demonstrated calls as token ids, as the server `embedded` reads and writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from agentrig.demonstrations import Reply, Turn
from agentrig_grpo.server.chat import Chat


def encode(turn: Turn, chat: Chat, context: int) -> tuple[Sequence[int], Sequence[int]]:
    """Return the token ids of a turn's prompt and reply; see `agentrig.learners.Imitating.encode`.

    Args:
        context: Most tokens of both.

    Raises:
        ValueError: The template refuses the messages or the reply, the reply is empty, or both are too long.
    """
    if turn.reply.reasoning:
        raise ValueError("the reply has reasoning, which is not learned")
    if not (turn.reply.content.strip() or turn.reply.tool_calls):
        raise ValueError("the reply is empty")
    prompt, reply = prompt_ids(turn, chat), turn.response_token_ids
    if not reply or tuple(turn.prompt_token_ids) != prompt or not _says(turn, reply, chat):
        reply = reply_ids(turn, chat)
        if not _says(turn, reply, chat):
            raise ValueError(f"the model's tokenizer can't write the reply {turn.reply.content!r:.80}")
    if len(prompt) + len(reply) > context:
        raise ValueError(f"prompt and reply have {len(prompt) + len(reply)} tokens, and the context is {context}")
    return prompt, reply


def prompt_ids(turn: Turn, chat: Chat) -> tuple[int, ...]:
    """Return the token ids of a turn's messages, with the generation prompt.

    Raises:
        ValueError: The template or the tokenizer refuses them.
    """
    try:
        messages = [message_of(m) for m in turn.messages]
    except (TypeError, LookupError, AttributeError) as error:
        raise ValueError(f"these are no messages of a chat: {type(error).__name__}: {error}") from error
    return chat.prompt_ids(messages, tools=list(turn.tools), **turn.options)


def reply_ids(turn: Turn, chat: Chat) -> list[int]:
    """Return the token ids of a turn's reply, with the end-of-turn token.

    Raises:
        ValueError: The template can't write calls of tools.
    """
    text = _written(turn, chat) if turn.reply.tool_calls else turn.reply.content
    return [*chat.tokenizer(text, add_special_tokens=False)["input_ids"], chat.tokenizer.eos_token_id]


def _says(turn: Turn, ids: Sequence[int], chat: Chat) -> bool:
    """Whether a client would get the turn's reply of these tokens."""
    try:
        if not turn.reply.tool_calls:
            return chat.text(ids) == turn.reply.content
        if isinstance(chat.tool_form, str):
            return False
        read = chat.tool_form.read(chat.text(ids, keep=chat.tool_form.markers), turn.tools)
    except (ValueError, OverflowError, TypeError):  # ids beyond the vocabulary
        return False
    said = [(call.name, _object(call.arguments)) for call in read.calls]
    return said == [(call["name"], _object(call.get("arguments", {}))) for call in turn.reply.tool_calls]


def _written(turn: Turn, chat: Chat) -> str:
    """Return a reply with calls of tools as the chat template writes it, without the end of the turn."""
    if isinstance(chat.tool_form, str):
        raise ValueError(chat.tool_form)
    messages = [message_of(m) for m in turn.messages]
    tools = list(turn.tools) or None
    render = partial(chat.tokenizer.apply_chat_template, tools=tools, tokenize=False, **turn.options)
    prompt = str(render(messages, add_generation_prompt=True))
    try:
        whole = str(render([*messages, _spoken(turn.reply)], add_generation_prompt=False))
    except Exception as error:  # a template can raise anything
        raise ValueError(f"the chat template refuses the reply: {type(error).__name__}: {error}") from error
    if not whole.startswith(prompt):
        raise ValueError("the model's chat template changes the prompt once the reply with calls of tools is there")
    return whole[len(prompt) :].rstrip().removesuffix(chat.tokenizer.eos_token)


def message_of(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as chat templates take it: text as one string, arguments of tools as objects."""
    found = dict(message)
    content = found.get("content")
    if isinstance(content, list):
        found["content"] = "".join(str(part.get("text", "")) for part in content)
    if found.get("tool_calls"):
        found["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _object(call["function"].get("arguments"))}}
            for call in found["tool_calls"]
        ]
    return found


def _object(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _spoken(reply: Reply) -> dict[str, Any]:
    calls = [
        {"type": "function", "function": {"name": c["name"], "arguments": c.get("arguments", {})}}
        for c in reply.tool_calls
    ]
    return {"role": "assistant", "content": reply.content, "tool_calls": calls}
