"""Text to token ids and back: the chat template, detokenization, stop strings."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

from agentrig_grpo.server.tools import Form, form_of

KEPT_TOKENS = 1 << 20
"""Tokens of prompts that are kept for the next request with the same messages; about 36 bytes each."""


SURELY = 16
"""Characters a token by which a prompt's beginning is tokenized first, to refuse what is much too long early."""


class TooLong(Exception):
    """A prompt is longer than the context.

    Args:
        tokens: How many it has at least.
    """

    def __init__(self, tokens: int) -> None:
        super().__init__(tokens)
        self.tokens = tokens


def _key(conversation: str) -> bytes:
    return hashlib.blake2b(conversation.encode(), digest_size=16).digest()


class Chat:
    """A tokenizer with the few things that the server needs, cached.

    Args:
        tokenizer: A fast Hugging Face tokenizer with a chat template.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        # A group sends the same prompt n times; it is rendered once.
        self._prompts: OrderedDict[bytes, tuple[int, ...]] = OrderedDict()
        self._kept = 0
        # A token's text has at most as many characters as its name: byte-level names have one per byte.
        self._longest = max(map(len, tokenizer.get_vocab()))
        self._piece = lru_cache(maxsize=None)(self._decode_one)
        added = self._backend.get_added_tokens_decoder()
        self._special = {token: made.content for token, made in added.items() if made.special}

    @cached_property
    def tool_form(self) -> Form | str:
        """How the chat template writes tool calls, or why this server can't serve tools with it."""
        return form_of(lambda messages, tools: self._text_of(messages, tools, add_generation_prompt=False))

    def prompt_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        max_length: int = 1 << 24,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        **options: Any,
    ) -> tuple[int, ...]:
        """Return the token ids of messages at once, kept or rendered; see `render` for the errors."""
        conversation = self.conversation(messages, tools, **options)
        ids = self.kept(conversation)
        if ids is None:
            ids = self.render(conversation, max_length)
            self.keep(conversation, ids)
        return ids

    def ids(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a text as it is, without a template and without special tokens around it."""
        return tuple(self._backend.encode(text, add_special_tokens=False).ids)

    def conversation(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), **options: Any
    ) -> str:
        """Return messages, tools and the template's options as the text that `kept`, `render` and `keep` take."""
        # Their order of keys is the template's too: a model was trained on one.
        return json.dumps([messages, list(tools), options])

    def kept(self, conversation: str) -> tuple[int, ...] | None:
        """Return the cached token ids of a recent conversation, or None."""
        key = _key(conversation)
        ids = self._prompts.get(key)
        if ids is not None:
            self._prompts.move_to_end(key)
        return ids

    def keep(self, conversation: str, ids: tuple[int, ...]) -> None:
        """Cache the token ids of a conversation for the next request with it."""
        self._kept += len(ids) - len(self._prompts.pop(_key(conversation), ()))
        self._prompts[_key(conversation)] = ids
        while self._kept > KEPT_TOKENS:
            self._kept -= len(self._prompts.popitem(last=False)[1])

    def render(self, conversation: str, max_length: int) -> tuple[int, ...]:
        """Return the token ids of a conversation, by default with the generation prompt; may be called in any thread.

        Raises:
            TooLong: It surely has more than `max_length` tokens; a text of that length is not tokenized to its end.
            ValueError: The template refuses the conversation (roles out of order, …), or the tokenizer does.
        """
        try:
            messages, tools, options = json.loads(conversation)
            text = self._text_of(messages, tools, **{"add_generation_prompt": True, **options})
        except Exception as error:  # a template can raise anything, and does so about these messages
            raise ValueError(f"the chat template refuses these messages: {type(error).__name__}: {error}") from error
        if len(text) > max_length * self._longest:
            raise TooLong(len(text) // self._longest)
        start = text[: SURELY * max_length]
        if len(start) < len(text):
            tokens = len(self._encode(start))
            if tokens > 2 * max_length:
                raise TooLong(tokens)
        return self._encode(text)

    def _text_of(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], **options: bool
    ) -> str:
        return str(self.tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=False, **options))

    def _encode(self, text: str) -> tuple[int, ...]:
        try:
            # The template writes the special tokens itself.
            return tuple(self._backend.encode(text, add_special_tokens=False).ids)
        except BaseException as error:  # a panic of the tokenizer's own language is no Exception
            raise ValueError(f"the tokenizer refuses this prompt: {type(error).__name__}: {error}") from error

    def text(self, ids: Sequence[int], *, keep: Collection[str] = ()) -> str:
        """Return the text of token ids, special tokens left out but those to keep."""
        if not any(token in keep for token in self._special.values()):
            return str(self._backend.decode(list(ids), skip_special_tokens=True))
        shown = [i for i in ids if i not in self._special or self._special[i] in keep]
        return str(self._backend.decode(shown, skip_special_tokens=False))

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
        """Return whether the response now contains a stop string."""
        text = self._chat.text(tokens[-self._tail :])
        return any(stop in text for stop in self._stops)

    def first(self, text: str) -> str | None:
        """Return the stop string that comes first in a text; None if it has none."""
        found = [(text.find(stop), stop) for stop in self._stops if stop in text]
        return min(found, key=lambda each: each[0])[1] if found else None

    def cut(self, text: str) -> str:
        """Return the text up to the first stop string."""
        stop = self.first(text)
        return text if stop is None else text[: text.find(stop)]

    def safe(self, text: str) -> str:
        """Return the part of a running response's text that no later stop string can remove."""
        for size in range(min(max(map(len, self._stops)) - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return text[:-size]
        return text
