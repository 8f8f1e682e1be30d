"""OpenAI's chat completions: bodies checked, responses and errors built."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, NewType, TypeVar

import attrs
import cattrs

from agentrig.chat_fields import CHAT, Fields, check_nested, without_cache
from agentrig.errors import nearest
from agentrig.http_server import Refused
from agentrig_grpo.server import values
from agentrig_grpo.server.chat import Chat, StopStrings
from agentrig_grpo.server.constraints import Constraint
from agentrig_grpo.server.conversation import Message, Schema, Tool, ToolChoice, add_rules
from agentrig_grpo.server.engine import Request
from agentrig_grpo.server.fields import BadField, Between, converter, structure
from agentrig_grpo.server.values import short

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

Stops = NewType("Stops", tuple[str, ...])
"""Stop strings: one or a list of them."""


@attrs.frozen(kw_only=True)
class Addressed:
    """A body as far as the model's name: who asks for another model is told so before anything else."""

    model: str


AnyRequest = TypeVar("AnyRequest", bound=Addressed)


@attrs.frozen(kw_only=True)
class ChatRequest(Addressed):
    """A checked request body; the fields have their names there."""

    messages: list[Message] = attrs.field()
    max_completion_tokens: Annotated[int, Between(1)] | None = None
    max_tokens: Annotated[int, Between(1)] | None = None
    stop: Stops = Stops(())
    logprobs: bool = False
    top_logprobs: Annotated[int, Between(0, 20)] = attrs.field(default=0)
    stream: bool = False
    stream_options: dict[str, Any] = attrs.field(factory=dict)
    temperature: Annotated[float, Between(0, 2)] = 1.0
    top_p: Annotated[float, Between(0, 1)] = attrs.field(default=1.0)
    n: Annotated[int, Between(1, 128)] = 1
    seed: Annotated[int, Between(-(2**63), 2**63 - 1)] | None = None
    return_token_ids: bool = False
    tools: list[Tool] = attrs.field(factory=list)
    tool_choice: ToolChoice = ToolChoice("auto")
    parallel_tool_calls: bool = True
    response_format: Schema = attrs.field(factory=lambda: Schema({}))
    add_generation_prompt: bool = True
    continue_final_message: bool = attrs.field(default=False)

    @continue_final_message.validator
    def _last_of_the_assistant(self, field: Any, value: bool) -> None:
        if value and self.add_generation_prompt:
            raise BadField("needs add_generation_prompt: false", field.name)
        if value and (self.messages[-1]["role"] != "assistant" or not self.messages[-1]["content"].strip()):
            raise BadField("needs a last message of the assistant, with text", field.name)

    @response_format.validator
    def _not_with_tools(self, field: Any, value: Mapping[str, Any]) -> None:
        if value and self.tools and self.tool_choice == "auto":
            words = 'must be left out where tools may be called: leave tools out, or set tool_choice to "none"'
            raise BadField(words, field.name)

    @stream_options.validator
    def _usage_only(self, field: Any, value: Mapping[str, Any]) -> None:
        if value.get("continuous_usage_stats"):
            words = "is not implemented by this server"
            raise BadField(words, f"{field.name}.continuous_usage_stats", code="unsupported_parameter")

    @messages.validator
    def _some(self, field: Any, value: list[Message]) -> None:
        if not value:
            raise BadField("is empty; send at least one", field.name)

    @top_logprobs.validator
    def _with_logprobs(self, field: Any, value: int) -> None:
        if value and not self.logprobs:
            raise BadField("needs logprobs: true", field.name)

    @top_p.validator
    def _above_zero(self, field: Any, value: float) -> None:
        if value == 0:
            raise BadField("must be greater than 0", field.name)

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
    return checked(body, ChatRequest, _rules(), model=model, fields=CHAT)


def checked(
    body: bytes, cls: type[AnyRequest], rules: cattrs.Converter, *, model: str, fields: Fields | None = None
) -> AnyRequest:
    """Check a request's body.

    Args:
        body: Of the request.
        cls: What it is read as.
        rules: How its fields are read.
        model: The name that it must ask for.
        fields: The fields below its top level; None for a body without such fields.

    Raises:
        Refused: Not JSON, a field that is unknown, wrong or not implemented; names the field.
    """
    try:
        data = values.read(body)
        if not isinstance(data, dict):
            raise Refused("the body must be a JSON object")
        asked = structure(Addressed, data, rules).model
        if asked != model:
            raise Refused(
                f"the model {short(asked)} does not exist; this server has {model!r}. An agent that always sends "
                f'another name is served by the gateway: [gateway.models] {json.dumps(asked[:100])} = "policy"',
                param="model",
                status=404,
                code="model_not_found",
            )
        without_cache(data, fields or {})  # a chat template would write that of a tool into the prompt
        request = structure(cls, data, rules)
    except (values.BadValue, BadField) as error:
        raise Refused(str(error), param=error.where, code=getattr(error, "code", "")) from None
    _refuse_others(data, attrs.fields_dict(cls))
    check_nested(data, fields or {})
    return request


@cache
def _rules() -> cattrs.Converter:
    rules = converter()
    add_rules(rules)
    rules.register_structure_hook(Stops, _stops)
    return rules


def _stops(stop: Any, _: Any) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop or []
    if (
        not isinstance(stops, list)
        or len(stops) > 16
        or not all(isinstance(s, str) and 0 < len(s) <= STOP_LIMIT for s in stops)
    ):
        raise BadField(f"must be a string or up to 16 strings, each of 1 to {STOP_LIMIT} characters")
    return tuple(stops)


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
        Request(
            prompt=prompt,
            max_tokens=chat.limit or room,
            # Below this a softmax overflows; the most likely token is what it would give.
            temperature=chat.temperature if chat.temperature >= 1e-5 else 0.0,
            top_p=chat.top_p,
            seed=chat.seed,
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
