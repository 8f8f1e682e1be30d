"""A chat completion as the attributes of its spans: one for each choice, with its token ids and log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def token_attributes(response: dict[str, Any]) -> dict[str, Any]:
    """Move token ids and log-probabilities from a chat completion in vLLM's format to span attributes.

    Raises:
        TypeError, LookupError, AttributeError: It is no chat completion.
    """
    found: dict[str, Any] = {"gen_ai.response.id": response.get("id")}
    choices = response.get("choices") or [{}]
    choice = choices[0]
    prompt = response.pop("prompt_token_ids", None) or choice.pop("prompt_token_ids", None)
    if prompt:
        found["prompt_token_ids"] = _ids(prompt, "prompt_token_ids")
    if ids := choice.pop("token_ids", None):
        found["response_token_ids"] = _ids(ids, "token_ids")
    content = (choice.pop("logprobs", None) or {}).get("content")
    if content:
        found["response_logprobs"] = [token["logprob"] for token in content]
    if choice.get("finish_reason"):
        found["finish_reason"] = choice["finish_reason"]
    return found


def _ids(value: Any, name: str) -> list[int]:
    if not isinstance(value, list) or set(map(type, value)) != {int}:
        raise TypeError(f"{name} is no list of token ids")
    return value


def sampled_calls(
    request: Mapping[str, Any], response: dict[str, Any]
) -> Iterator[tuple[Mapping[str, Any], dict[str, Any], dict[str, Any]]]:
    """Yield request, response and token attributes of each call that a completion stands for.

    One with n choices is n calls with the same prompt. Each has a request with `n: 1`, an id of its own (the answer's,
    and from the second on its number) and the prompt's ids.
    """
    choices = response.get("choices") or [{}]
    if len(choices) < 2:
        yield request, response, token_attributes(response)
        return
    for number, choice in enumerate(choices):
        one = {**response, "choices": [dict(choice)]}
        if number:
            one["id"] = f"{one.get('id')}-{number}"
            one.pop("usage", None)  # it is that of all choices: the first call has it
        tokens = token_attributes(one)
        yield {**request, "n": 1}, one, {**tokens, "agentrig.choice": f"{number + 1} of {len(choices)}"}
