"""The models of vLLM's requests and responses, as far as they matter here."""

from __future__ import annotations

from pydantic import BaseModel


class ChatCompletionRequest(BaseModel):
    messages: list[dict[str, str]]
    stream: bool = False


class ChatCompletionResponse(BaseModel):
    text: str
    logprobs: list[float]
