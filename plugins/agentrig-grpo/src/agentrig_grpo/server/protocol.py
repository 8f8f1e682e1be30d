"""OpenAI's chat completions: bodies checked, responses and errors built."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from agentrig.errors import nearest
from agentrig_grpo.server import values
from agentrig_grpo.server.chat import Chat, StopStrings
from agentrig_grpo.server.engine import Request
from agentrig_grpo.server.values import short

IGNORED = frozenset(
    {"user", "metadata", "store", "service_tier", "parallel_tool_calls", "safety_identifier", "prompt_cache_key"}
)
"""Fields that change nothing about what is sampled."""

NEUTRAL: Mapping[str, Sequence[Any]] = {
    "frequency_penalty": (0, None),
    "presence_penalty": (0, None),
    "repetition_penalty": (1, None),
    "logit_bias": ({}, None),
    "top_k": (0, -1, None),
    "min_p": (0, None),
    "tools": ([], None),
    "tool_choice": ("none", "auto", None),
    "functions": ([], None),
    "response_format": ({"type": "text"}, None),
    "reasoning_effort": (None,),
    "modalities": (["text"], None),
}
"""Fields that this server doesn't implement, with the values that ask for nothing."""

STOP_LIMIT = 512
"""Most characters of a stop string: each is looked for after every token."""

ROLES = ("system", "developer", "user", "assistant", "tool")


class ApiError(Exception):
    """A request that is refused, in OpenAI's form."""

    def __init__(self, message: str, *, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.status, self.code = param, status, code

    def body(self) -> bytes:
        """Return the JSON body."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()


@attrs.frozen(kw_only=True)
class ChatRequest:
    """A checked request body."""

    messages: list[dict[str, Any]]
    max_tokens: int | None
    temperature: float
    top_p: float
    n: int
    seed: int | None
    stop: tuple[str, ...]
    logprobs: bool
    top_logprobs: int
    token_ids: bool
    stream: bool
    usage_in_stream: bool


def parse(body: bytes, *, model: str) -> ChatRequest:
    """Check a request's body.

    Raises:
        ApiError: Not JSON, a field that is unknown, wrong or not implemented; names the field.
    """
    try:
        data = values.read(body)
    except values.BadValue as error:
        raise ApiError(str(error), param=error.where or None) from None
    if not isinstance(data, dict):
        raise ApiError("the body must be a JSON object")
    fields = _Fields(data)
    asked = fields.take("model", str, None)
    if asked != model:
        raise ApiError(
            f"the model {short(asked)} does not exist; this server has {model!r}",
            param="model",
            status=404,
            code="model_not_found",
        )
    messages = _messages(fields.take("messages", list, None))
    limits = [fields.number(name, int, None, 1, None) for name in ("max_completion_tokens", "max_tokens")]
    stop = data.pop("stop", None)
    stops = [stop] if isinstance(stop, str) else stop or []
    if (
        not isinstance(stops, list)
        or len(stops) > 16
        or not all(isinstance(s, str) and 0 < len(s) <= STOP_LIMIT for s in stops)
    ):
        raise ApiError(
            f"stop must be a string or up to 16 strings, none of them empty or longer than {STOP_LIMIT} characters",
            param="stop",
        )
    logprobs = fields.take("logprobs", bool, False)
    top_logprobs = fields.number("top_logprobs", int, 0, 0, 20)
    if top_logprobs and not logprobs:
        raise ApiError("top_logprobs needs logprobs: true", param="top_logprobs")
    stream = fields.take("stream", bool, False)
    options = fields.take("stream_options", dict, {})
    request = ChatRequest(
        messages=messages,
        max_tokens=next((limit for limit in limits if limit is not None), None),
        temperature=fields.number("temperature", float, 1.0, 0, 2),
        top_p=fields.number("top_p", float, 1.0, 0, 1),
        n=fields.number("n", int, 1, 1, 128),
        seed=fields.number("seed", int, None, -(2**63), 2**63 - 1),
        stop=tuple(stops),
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        token_ids=fields.take("return_token_ids", bool, False),
        stream=stream,
        usage_in_stream=bool(options.get("include_usage")),
    )
    if request.top_p == 0:
        raise ApiError("top_p must be greater than 0", param="top_p")
    _refuse_others(data)
    return request


class _Fields:
    """Takes typed fields out of a body."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data

    def take(self, name: str, type_: type, default: Any) -> Any:
        value = self.data.pop(name, None)
        if value is None:
            if default is None:
                raise ApiError(f"{name} is missing", param=name)
            return default
        if not isinstance(value, type_):
            raise ApiError(f"{name} must be of type {type_.__name__}, not {type(value).__name__}", param=name)
        return value

    def number(self, name: str, type_: type, default: Any, low: float, high: float | None) -> Any:
        value = self.data.pop(name, None)
        if value is None:
            return default
        fits = isinstance(value, int | float) and not isinstance(value, bool)
        if not fits or (type_ is int and value != int(value)):
            raise ApiError(f"{name} must be {'an integer' if type_ is int else 'a number'}", param=name)
        if not low <= value or (high is not None and not value <= high):
            bounds = f"at least {low}" if high is None else f"between {low} and {high}"
            raise ApiError(f"{name} is {short(value)}; it must be {bounds}", param=name)
        return type_(value)


def _messages(messages: list[Any]) -> list[dict[str, Any]]:
    if not messages:
        raise ApiError("messages is empty; send at least one", param="messages")
    checked = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(message, dict):
            raise ApiError(f"{where} must be an object with role and content", param=where)
        if message.get("role") not in ROLES:
            raise ApiError(
                f"{where}.role is {short(message.get('role'))}; use one of {', '.join(ROLES)}", param=f"{where}.role"
            )
        checked.append({**message, "content": _content(message.get("content"), f"{where}.content")})
    return checked


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content
    ):
        return "".join(part["text"] for part in content)
    raise ApiError(f"{where} must be a string or a list of text parts", param=where)


def _refuse_others(data: Mapping[str, Any]) -> None:
    for name, value in data.items():
        if name in IGNORED:
            continue
        if name not in NEUTRAL:
            known = [f.name for f in attrs.fields(ChatRequest)] + [*NEUTRAL, "return_token_ids", "model"]
            near = nearest(name[:100], known)
            raise ApiError(f"unknown field {short(name)}.{near}", param=name[:100], code="unknown_parameter")
        if value not in NEUTRAL[name]:
            raise ApiError(f"{name} = {short(value)} is not implemented by this server", param=name)


def too_long(tokens: str, chat: ChatRequest, max_length: int) -> ApiError:
    """Return the error of a prompt of so many tokens, or of what is asked for beside it."""
    asked = f" and {chat.max_tokens} tokens were asked for" if chat.max_tokens else ""
    return ApiError(
        f"this model's context is {max_length} tokens; the prompt has {tokens}{asked}",
        param="messages",
        code="context_length_exceeded",
    )


def requests_of(chat: ChatRequest, prompt: tuple[int, ...], tokenizer: Chat, *, max_length: int) -> list[Request]:
    """Return the engine's requests, one a choice.

    Raises:
        ApiError: The prompt, or prompt and `max_tokens`, are longer than the model's context.
    """
    room = max_length - len(prompt)
    if room < 1 or (chat.max_tokens or 0) > room:
        raise too_long(str(len(prompt)), chat, max_length)
    return [
        Request(
            prompt=prompt,
            max_tokens=chat.max_tokens or room,
            # Below this a softmax overflows; the most likely token is what it would give.
            temperature=chat.temperature if chat.temperature >= 1e-5 else 0.0,
            top_p=chat.top_p,
            seed=chat.seed,
            choice=choice,
            top_logprobs=chat.top_logprobs,
            stopped=StopStrings(tokenizer, chat.stop) if chat.stop else None,
        )
        for choice in range(chat.n)
    ]


def response(chat: ChatRequest, choices: Sequence[Request], tokenizer: Chat, *, model: str) -> bytes:
    """Return a chat completion's JSON; with `return_token_ids` its ids are where vLLM 0.24 puts them."""
    body: dict[str, Any] = head("chat.completion", model, choices[0].version)
    body["choices"] = []
    for choice in choices:
        item: dict[str, Any] = {
            "index": choice.choice,
            "message": {"role": "assistant", "content": text_of(choice, tokenizer)},
            "logprobs": logprobs_of(choice, tokenizer) if chat.logprobs else None,
            "finish_reason": choice.finish,
        }
        if chat.token_ids:
            item["token_ids"] = choice.tokens
        body["choices"].append(item)
    body["usage"] = usage(choices)
    if chat.token_ids:
        body["prompt_token_ids"] = choices[0].prompt
    return json.dumps(body).encode()


def head(kind: str, model: str, version: int) -> dict[str, Any]:
    """Return the fields that every response and every chunk starts with; the fingerprint is the weights' version."""
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": f"v{version}",
    }


def usage(choices: Sequence[Request]) -> dict[str, int]:
    """Return the token counts of a request."""
    prompt, completion = len(choices[0].prompt), sum(len(c.tokens) for c in choices)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def text_of(request: Request, tokenizer: Chat) -> str:
    """Return a response's text: special tokens left out, cut before a stop string."""
    text = tokenizer.text(request.tokens)
    return request.stopped.cut(text) if isinstance(request.stopped, StopStrings) else text


def logprobs_of(request: Request, tokenizer: Chat, start: int = 0) -> dict[str, Any]:
    """Return OpenAI's `logprobs` object for the tokens from `start` on."""
    content = []
    for place in range(start, len(request.tokens)):
        entry = _entry(tokenizer, request.tokens[place], request.logprobs[place])
        tops = request.tops[place] if request.tops else []
        entry["top_logprobs"] = [_entry(tokenizer, token, logprob) for token, logprob in tops]
        content.append(entry)
    return {"content": content}


def _entry(tokenizer: Chat, token: int, logprob: float) -> dict[str, Any]:
    piece = tokenizer.piece(token)
    # JSON has no infinity; OpenAI's own floor for "practically never" is the same number.
    return {"token": piece, "logprob": max(logprob, -9999.0), "bytes": list(piece.encode())}
