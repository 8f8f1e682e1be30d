"""OpenAI's chat completions: bodies checked, responses and errors built."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

import attrs

from agentrig.chat_fields import CHAT, Fields, check_nested, without_cache
from agentrig.errors import nearest
from agentrig.http_server import Refused
from agentrig_grpo.server import conversation
from agentrig_grpo.server.chat import Chat, StopStrings
from agentrig_grpo.server.constraints import Constraint
from agentrig_grpo.server.engine import Request
from agentrig_grpo.server.fields import BadField, BadValue, field, number, of_type, read, short, structure

IGNORED = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"})
"""Fields that change nothing about what is sampled."""

NEUTRAL: Mapping[str, Sequence[Any]] = {
    "frequency_penalty": (0, None),
    "presence_penalty": (0, None),
    "repetition_penalty": (1, None),
    "logit_bias": ({}, None),
    "top_k": (0, -1, None),
    "min_p": (0, None),
    "functions": ([], None),
    "reasoning_effort": (None,),
    "modalities": (["text"], None),
    "min_tokens": (0, None),
    "ignore_eos": (False, None),
    "stop_token_ids": ([], None),
    "skip_special_tokens": (True, None),
    "chat_template_kwargs": ({}, None),
    "best_of": (1, None),
    "use_beam_search": (False, None),
    "length_penalty": (1, None),
    "verbosity": (None,),
    "prediction": (None,),
    "audio": (None,),
    "web_search_options": (None,),
    "function_call": (None,),
}
"""Fields that this server doesn't implement, with the values that ask for nothing."""

STOP_LIMIT = 512
"""Most characters of a stop string: each is looked for after every token."""


def _stops(stop: Any) -> tuple[str, ...]:
    """Return stop strings: one or a list of them."""
    stops = [stop] if isinstance(stop, str) else stop or []
    if (
        not isinstance(stops, list)
        or len(stops) > 16
        or not all(isinstance(s, str) and 0 < len(s) <= STOP_LIMIT for s in stops)
    ):
        raise BadField(f"must be a string or up to 16 strings, each of 1 to {STOP_LIMIT} characters")
    return tuple(stops)


def share(value: Any) -> float:
    """Check `top_p`."""
    found: float = number(float, 0, 1)(value)
    if found == 0:
        raise BadField("must be greater than 0")
    return found


@attrs.frozen(kw_only=True)
class Addressed:
    """A body as far as the model's name: who asks for another model is told so before anything else."""

    model: str = field(of_type(str))


AnyRequest = TypeVar("AnyRequest", bound=Addressed)


@attrs.frozen(kw_only=True)
class Sampled(Addressed):
    """What a body says of sampling; the fields have their names there."""

    temperature: float = field(number(float, 0, 2), 1.0)
    top_p: float = field(share, 1.0)
    seed: int | None = field(number(int, -(2**63), 2**63 - 1), None)
    return_token_ids: bool = field(of_type(bool), False)

    def request(self, prompt: tuple[int, ...], **more: Any) -> Request:
        """Return an engine's request for a prompt."""
        # Below this a softmax overflows; the most likely token is what it would give.
        temperature = self.temperature if self.temperature >= 1e-5 else 0.0
        return Request(prompt=prompt, temperature=temperature, top_p=self.top_p, seed=self.seed, **more)


@attrs.frozen(kw_only=True)
class ChatRequest(Sampled):
    """A checked request body; the fields have their names there."""

    messages: list[dict[str, Any]] = field(conversation.messages)
    max_completion_tokens: int | None = field(number(int, 1), None)
    max_tokens: int | None = field(number(int, 1), None)
    stop: tuple[str, ...] = field(_stops, ())
    logprobs: bool = field(of_type(bool), False)
    top_logprobs: int = field(number(int, 0, 20), 0)
    stream: bool = field(of_type(bool), False)
    stream_options: dict[str, Any] = field(of_type(dict), attrs.Factory(dict))
    n: int = field(number(int, 1, 128), 1)
    tools: list[dict[str, Any]] = field(conversation.tools, attrs.Factory(list))
    tool_choice: str = field(conversation.tool_choice, "auto")
    parallel_tool_calls: bool = field(of_type(bool), True)
    response_format: Mapping[str, Any] = field(conversation.schema, attrs.Factory(dict))
    add_generation_prompt: bool = field(of_type(bool), True)
    continue_final_message: bool = field(of_type(bool), False)

    def __attrs_post_init__(self) -> None:
        last = self.messages[-1]
        if self.continue_final_message and self.add_generation_prompt:
            raise BadField("needs add_generation_prompt: false", "continue_final_message")
        if self.continue_final_message and (last["role"] != "assistant" or not last["content"].strip()):
            raise BadField("needs a last message of the assistant, with text", "continue_final_message")
        if self.response_format and self.tools and self.tool_choice == "auto":
            words = 'must be left out where tools may be called: leave tools out, or set tool_choice to "none"'
            raise BadField(words, "response_format")
        if self.stream_options.get("continuous_usage_stats"):
            where = "stream_options.continuous_usage_stats"
            raise BadField("is not implemented by this server", where, code="unsupported_parameter")
        if self.top_logprobs and not self.logprobs:
            raise BadField("needs logprobs: true", "top_logprobs")

    @property
    def limit(self) -> int | None:
        """The most tokens of a response; None means as many as the context has room for."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def usage_in_stream(self) -> bool:
        """Whether a stream ends with the token counts."""
        return bool(self.stream_options.get("include_usage"))


def parse(body: bytes, *, model: str) -> ChatRequest:
    """Check the body of a chat completion; see `checked` for the errors."""
    return checked(body, ChatRequest, model=model, fields=CHAT)


def checked(body: bytes, cls: type[AnyRequest], *, model: str, fields: Fields | None = None) -> AnyRequest:
    """Check a request's body.

    Args:
        model: The name that it must ask for.
        fields: The fields below its top level; None for a body without such fields.

    Raises:
        Refused: Not JSON, a field that is unknown, wrong or not implemented; names the field.
    """
    try:
        data = read(body)
        if not isinstance(data, dict):
            raise Refused("the body must be a JSON object")
        asked = structure(Addressed, data).model
        if asked != model:
            raise Refused(
                f"the model {short(asked)} does not exist; this server has {model!r}. An agent that always sends "
                f'another name is served by the gateway: [gateway.models] {json.dumps(asked[:100])} = "policy"',
                param="model",
                status=404,
                code="model_not_found",
            )
        without_cache(data, fields or {})  # a chat template would write that of a tool into the prompt
        request = structure(cls, data)
    except (BadValue, BadField) as error:
        raise Refused(str(error), param=error.where, code=getattr(error, "code", "")) from None
    _refuse_others(data, attrs.fields_dict(cls))
    check_nested(data, fields or {})
    return request


def _refuse_others(data: Mapping[str, Any], own: Collection[str]) -> None:
    for name, value in data.items():
        if name in own or name in IGNORED:
            continue
        if name not in NEUTRAL:
            near = nearest(name[:100], [*own, *NEUTRAL])
            raise Refused(f"unknown field {short(name)}.{near}", param=name[:100], code="unknown_parameter")
        if value not in NEUTRAL[name]:
            words = f"{name} = {short(value)} is not implemented by this server"
            raise Refused(words, param=name, code="unsupported_parameter")


def too_long(tokens: str, chat: ChatRequest, max_length: int) -> Refused:
    """Return the error of a prompt of so many tokens, or of what is asked for beside it."""
    asked = f" and {chat.limit} tokens were asked for" if chat.limit else ""
    return Refused(
        f"this model's context is {max_length} tokens; the prompt has {tokens}{asked}",
        param="messages",
        code="context_length_exceeded",
    )


def requests_of(
    chat: ChatRequest,
    prompt: tuple[int, ...],
    tokenizer: Chat,
    *,
    max_length: int,
    constraints: Sequence[Constraint] = (),
) -> list[Request]:
    """Return the engine's requests, one a choice; each has a constraint of its own, if there are any.

    Raises:
        Refused: The prompt, or prompt and `max_tokens`, are longer than the model's context.
    """
    room = max_length - len(prompt)
    if room < 1 or (chat.limit or 0) > room:
        raise too_long(str(len(prompt)), chat, max_length)
    return [
        chat.request(
            prompt,
            max_tokens=chat.limit or room,
            choice=choice,
            top_logprobs=chat.top_logprobs,
            stopped=StopStrings(tokenizer, chat.stop) if chat.stop else None,
            constraint=constraints[choice] if constraints else None,
        )
        for choice in range(chat.n)
    ]


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
