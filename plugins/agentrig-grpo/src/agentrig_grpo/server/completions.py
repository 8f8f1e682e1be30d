"""OpenAI's text completions of token ids, with vLLM's fields: scores given tokens, and samples after them."""

from __future__ import annotations

import json
from contextlib import suppress
from functools import cache
from typing import Annotated, Any, NewType

import attrs
import cattrs

from agentrig.http_server import Refused
from agentrig_grpo.server import protocol, values
from agentrig_grpo.server.chat import Chat
from agentrig_grpo.server.engine import Decoder, Request, Score
from agentrig_grpo.server.fields import BadField, Between, converter
from agentrig_grpo.server.protocol import Addressed

Tokens = NewType("Tokens", tuple[int, ...])
"""A prompt as token ids."""

LEAST = -9999.0
"""JSON has no infinity; OpenAI's own floor for "practically never" is the same number."""


@attrs.frozen(kw_only=True)
class CompletionRequest(Addressed):
    """A checked request body; the fields have their names there."""

    prompt: Tokens = attrs.field()
    max_tokens: Annotated[int, Between(1)] = 16
    temperature: Annotated[float, Between(0, 2)] = 1.0
    top_p: Annotated[float, Between(0, 1)] = attrs.field(default=1.0)
    seed: Annotated[int, Between(-(2**63), 2**63 - 1)] | None = None
    logprobs: Annotated[int, Between(0, 20)] | None = None
    prompt_logprobs: Annotated[int, Between(0, 1)] | None = None
    return_token_ids: bool = False

    @top_p.validator
    def _above_zero(self, field: Any, value: float) -> None:
        if value == 0:
            raise BadField("must be greater than 0", field.name)


def parse(body: bytes, *, model: str, vocabulary: int) -> CompletionRequest:
    """Check a request's body.

    Args:
        body: Of the request.
        model: The name that it must ask for.
        vocabulary: How many tokens there are.

    Raises:
        Refused: See `protocol.checked`; or a token id that the model does not have.
    """
    request = protocol.checked(body, CompletionRequest, _rules(), model=model)
    largest = max(request.prompt)
    if largest >= vocabulary:
        raise Refused(f"prompt has the token {largest}; this model's go up to {vocabulary - 1}", param="prompt")
    return request


@attrs.frozen(kw_only=True)
class TextRequest(Addressed):
    """The body of a request to tokenize a text."""

    prompt: str = attrs.field()
    add_special_tokens: bool = attrs.field(default=False)

    @add_special_tokens.validator
    def _none_added(self, field: Any, value: bool) -> None:
        if value:
            raise BadField("is not implemented by this server", field.name, code="unsupported_parameter")


def text_of(body: bytes, *, model: str) -> str | None:
    """Return the text that a request asks to tokenize; None for one that has messages.

    Raises:
        Refused: See `protocol.checked`.
    """
    with suppress(values.BadValue):
        data = values.read(body)
        if isinstance(data, dict) and "prompt" not in data:
            return None
    return protocol.checked(body, TextRequest, converter(), model=model).prompt


@cache
def _rules() -> cattrs.Converter:
    rules = converter()
    rules.register_structure_hook(Tokens, _tokens)
    return rules


def _tokens(prompt: Any, _: Any) -> tuple[int, ...]:
    if not isinstance(prompt, list) or not all(type(token) is int and token >= 0 for token in prompt):
        raise BadField("must be a list of token ids; text is taken by /v1/chat/completions")
    if len(prompt) < 2:
        raise BadField("must have two token ids or more")
    return tuple(prompt)


def request_of(asked: CompletionRequest, *, max_length: int) -> Request:
    """Return the engine's request.

    Raises:
        Refused: Prompt and `max_tokens` are longer than the model's context.
    """
    if len(asked.prompt) + asked.max_tokens > max_length:
        raise Refused(
            f"this model's context is {max_length} tokens; the prompt has {len(asked.prompt)} and {asked.max_tokens} "
            "tokens were asked for",
            param="prompt",
            code="context_length_exceeded",
        )
    return Request(
        prompt=asked.prompt,
        max_tokens=asked.max_tokens,
        temperature=asked.temperature if asked.temperature >= 1e-5 else 0.0,
        top_p=asked.top_p,
        seed=asked.seed,
    )


def response(
    asked: CompletionRequest, choice: Request, score: Score | None, tokenizer: Chat, decoder: Decoder, *, model: str
) -> bytes:
    """Return a completion's JSON, in vLLM's form.

    With the prompt's log-probabilities comes `weights`: the dtype and the digest of each tensor that they were
    computed with (`agentrig.delivery.digests`).
    """
    body: dict[str, Any] = protocol.head("text_completion", model, choice.version)
    item: dict[str, Any] = {
        "index": 0,
        "text": tokenizer.text(choice.tokens),
        "logprobs": None,
        "finish_reason": choice.finish,
    }
    if asked.logprobs is not None:
        item["logprobs"] = {
            "tokens": [tokenizer.piece(token) for token in choice.tokens],
            "token_logprobs": [max(value, LEAST) for value in choice.logprobs],
        }
    if score is not None:
        named = zip(asked.prompt[1:], score.logprobs, strict=True)
        item["prompt_logprobs"] = [None, *({str(token): {"logprob": max(value, LEAST)}} for token, value in named)]
        body["weights"] = {"dtype": str(decoder.dtype).removeprefix("torch."), "digests": score.digests}
    if asked.return_token_ids:
        item["token_ids"], item["prompt_token_ids"] = choice.tokens, asked.prompt
    body["choices"], body["usage"] = [item], protocol.usage([choice])
    return json.dumps(body).encode()
