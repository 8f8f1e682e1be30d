"""OpenAI's text completions of token ids, with vLLM's fields: scores given tokens, and samples after them."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import attrs

from agentrig.http_server import Refused
from agentrig_grpo.server import protocol
from agentrig_grpo.server.chat import Chat
from agentrig_grpo.server.decoder import Decoder
from agentrig_grpo.server.engine import Request, Score
from agentrig_grpo.server.fields import BadField, BadValue, field, number, of_type, read
from agentrig_grpo.server.protocol import Addressed, Sampled

LEAST = -9999.0
"""JSON has no infinity; OpenAI's own floor for "practically never" is the same number."""


def _tokens(prompt: Any) -> tuple[int, ...]:
    """Return a prompt as token ids."""
    if not isinstance(prompt, list) or not all(type(token) is int and token >= 0 for token in prompt):
        raise BadField("must be a list of token ids; text is taken by /v1/chat/completions")
    if len(prompt) < 2:
        raise BadField("must have two token ids or more")
    return tuple(prompt)


def _none_added(value: Any) -> bool:
    if of_type(bool)(value):
        raise BadField("is not implemented by this server", code="unsupported_parameter")
    return False


@attrs.frozen(kw_only=True)
class CompletionRequest(Sampled):
    """A checked request body; the fields have their names there."""

    prompt: tuple[int, ...] = field(_tokens)
    max_tokens: int = field(number(int, 1), 16)
    logprobs: int | None = field(number(int, 0, 20), None)
    prompt_logprobs: int | None = field(number(int, 0, 1), None)


def parse(body: bytes, *, model: str, vocabulary: int) -> CompletionRequest:
    """Check a request's body.

    Args:
        model: The name that it must ask for.

    Raises:
        Refused: See `protocol.checked`; or a token id that the model does not have.
    """
    request = protocol.checked(body, CompletionRequest, model=model)
    largest = max(request.prompt)
    if largest >= vocabulary:
        raise Refused(f"prompt has the token {largest}; this model's go up to {vocabulary - 1}", param="prompt")
    return request


@attrs.frozen(kw_only=True)
class TextRequest(Addressed):
    """The body of a request to tokenize a text."""

    prompt: str = field(of_type(str))
    add_special_tokens: bool = field(_none_added, False)


def text_of(body: bytes, *, model: str) -> str | None:
    """Return the text that a request asks to tokenize; None for one that has messages."""
    with suppress(BadValue):
        data = read(body)
        if isinstance(data, dict) and "prompt" not in data:
            return None
    return protocol.checked(body, TextRequest, model=model).prompt


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
    return asked.request(asked.prompt, max_tokens=asked.max_tokens)


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
