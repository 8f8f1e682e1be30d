"""The token ids and log-probabilities of a chat completion, as attributes of its span."""

from __future__ import annotations

from typing import Any


def token_attributes(response: dict[str, Any]) -> dict[str, Any]:
    """Move token ids and log-probabilities from a chat completion in vLLM's format to span attributes."""
    found: dict[str, Any] = {"gen_ai.response.id": response.get("id")}
    choices = response.get("choices") or [{}]
    choice = choices[0]
    prompt = response.pop("prompt_token_ids", None) or choice.pop("prompt_token_ids", None)
    if prompt:
        found["prompt_token_ids"] = prompt
    if ids := choice.pop("token_ids", None):
        found["response_token_ids"] = ids
    content = (choice.pop("logprobs", None) or {}).get("content")
    if content:
        found["response_logprobs"] = [token["logprob"] for token in content]
    if choice.get("finish_reason"):
        found["finish_reason"] = choice["finish_reason"]
    return found
