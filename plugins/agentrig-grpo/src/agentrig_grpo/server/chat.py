"""Text to token ids and back: the chat template, detokenization, stop strings."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

KEPT_TOKENS = 1 << 20
"""Tokens of prompts that are kept for the next request with the same messages; about 36 bytes each."""


class Chat:
    """A tokenizer with the few things that the server needs, cached.

    Args:
        tokenizer: A fast Hugging Face tokenizer with a chat template.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._special = frozenset(tokenizer.all_special_ids)
        # A group asks the same thing n times, and its prompt is rendered once.
        self._prompts: OrderedDict[bytes, tuple[int, ...]] = OrderedDict()
        self._kept = 0
        self._piece = lru_cache(maxsize=None)(self._decode_one)

    def prompt_ids(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Return the token ids of a conversation, with the generation prompt at its end.

        Raises:
            jinja2.TemplateError: The template refuses the conversation (roles out of order, …).
        """
        text = json.dumps(messages, sort_keys=True)
        key = hashlib.blake2b(text.encode(), digest_size=16).digest()
        ids = self._prompts.pop(key, None)
        if ids is None:
            ids = self._render(text)
            self._kept += len(ids)
        self._prompts[key] = ids
        while self._kept > KEPT_TOKENS:
            self._kept -= len(self._prompts.popitem(last=False)[1])
        return ids

    def _render(self, messages: str) -> tuple[int, ...]:
        text = self.tokenizer.apply_chat_template(json.loads(messages), add_generation_prompt=True, tokenize=False)
        # The template writes the special tokens itself.
        return tuple(self._backend.encode(text, add_special_tokens=False).ids)

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens left out."""
        return str(self._backend.decode(list(ids), skip_special_tokens=True))

    def piece(self, token: int) -> str:
        """Return one token's own text; special tokens are shown."""
        return self._piece(token)

    def _decode_one(self, token: int) -> str:
        return str(self._backend.decode([token], skip_special_tokens=False))


class StopStrings:
    """Watches a growing response for stop strings.

    Only the last tokens are decoded at each step: a stop string of b bytes spans at most b tokens.
    """

    def __init__(self, chat: Chat, stops: Sequence[str]) -> None:
        self._chat, self._stops = chat, tuple(stops)
        self._tail = max(len(s.encode()) for s in stops) + 4

    def __call__(self, tokens: Sequence[int]) -> bool:
        """Say whether the response now holds a stop string."""
        text = self._chat.text(tokens[-self._tail :])
        return any(stop in text for stop in self._stops)

    def cut(self, text: str) -> str:
        """Return the text up to the first stop string."""
        ends = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        return text[: min(ends)] if ends else text

    def safe(self, text: str) -> str:
        """Return the part of a running response's text that no stop string can still take away."""
        for size in range(min(max(map(len, self._stops)) - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return text[:-size]
        return text
