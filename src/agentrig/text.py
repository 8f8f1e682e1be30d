"""Storable text: turns text of agents, models and rewards into text that every file format can hold."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import orjson

LONE_SURROGATE = re.compile("[\ud800-\udfff]")
"""Half of a UTF-16 character: Python strings and JSON escapes can hold one, but UTF-8 files can't."""

MESSAGE_LIMIT = 20_000
"""Longest message of a failure that is kept, in characters."""


SHORTEST_MASKED = 6
"""Shorter secrets are not searched for in text: they would match ordinary words."""

_masks: dict[str, str] = {}
_changes = threading.RLock()


def mask(secret: str, name: str) -> None:
    """Make `storable` replace this secret by a name."""
    global _masks
    if len(secret) < SHORTEST_MASKED:
        return
    with _changes:
        _masks = {secret: name, **_masks}  # a new dict: another thread may be reading the former one


@contextmanager
def masked(secret: str, name: str) -> Iterator[None]:
    """Make `storable` replace this secret by a name in this block, in all threads; an empty one changes nothing."""
    global _masks
    mask(secret, name)
    try:
        yield
    finally:
        with _changes:
            _masks = {other: name for other, name in _masks.items() if other != secret}


def storable(text: str) -> str:
    """Return text in a form that may be stored and that UTF-8 can encode.

    Each lone surrogate becomes U+FFFD, the replacement character. Each secret of this process's settings, for example
    in a server's error message, becomes its name.
    """
    for secret, name in _masks.items():
        if secret in text:
            text = text.replace(secret, name)
    return text if text.isascii() else LONE_SURROGATE.sub("\ufffd", text)


def parsed(content: bytes) -> tuple[Any, bool]:
    """Return the value of a JSON text, and whether orjson can read it: whether it has no NaN and no lone surrogate.

    What orjson refuses is read by the standard library, which takes several times as long for lists of numbers. Whole
    numbers beyond 64 bits become floats.

    Raises:
        ValueError: It is not JSON.
        RecursionError: It is nested too deep.
    """
    try:
        return orjson.loads(content), True
    except orjson.JSONDecodeError:
        return json.loads(content), False


def json_text(value: Any) -> str:
    """Return a value as storable JSON text; never raises: a value that is not JSON is replaced by its `repr`."""
    try:
        return storable(json.dumps(value, default=str, ensure_ascii=False))
    except Exception:  # keys that are not text, cycles, a `__str__` that raises
        return json.dumps(storable(_described(value)), ensure_ascii=False)


def _described(value: Any) -> str:
    try:
        return repr(value)
    except Exception as error:  # nested too deep, or a `__repr__` that raises
        return f"({type(value).__name__} that cannot be written: {words_of(error)})"


def words_of(error: BaseException) -> str:
    """Return `TYPE: message` of an exception as storable text, cut to `MESSAGE_LIMIT`; never raises."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception as broken:  # its own `__str__`
        text = f"{type(error).__name__}: (its message raised {type(broken).__name__})"
    return cut(storable(text), MESSAGE_LIMIT)


def cut(text: str, limit: int) -> str:
    """Return text cut to a number of characters, with a note if it was cut."""
    return text if len(text) <= limit else f"{text[:limit]} … (cut from {len(text)} characters)"
