"""A request's JSON, looked at as a whole before any field: what could harm later is refused here, with its place."""

from __future__ import annotations

import json
import math
import sys
from functools import partial
from typing import Any

from agentrig.errors import AgentrigError

DEPTH = 64
"""Deepest nesting of lists and objects."""
MOST_VALUES = 100_000
"""Most values in one body: a conversation of thousands of messages has about ten thousand."""


class BadValue(AgentrigError):
    """A body is no JSON, or holds what no request may; `where` names the place, empty for the whole body."""

    def __init__(self, message: str, where: str = "") -> None:
        super().__init__(message)
        self.where = where


def read(body: bytes, what: str = "the body") -> Any:
    """Return the value of a JSON text, which errors call `what`.

    Raises:
        BadValue: The body is not UTF-8 or not JSON, is nested too deeply, has too many values, a number that is
            infinite, NaN or too long, or a string with a lone surrogate, which is no text and cannot be tokenized.
    """
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=partial(_constant, what))
    except UnicodeDecodeError as error:
        raise BadValue(f"{what} is not UTF-8: {error}") from None
    except RecursionError:
        raise BadValue(f"{what} is nested too deeply: at most {DEPTH} lists and objects in one another") from None
    except json.JSONDecodeError as error:
        raise BadValue(f"{what} is not JSON: {error}") from None
    except ValueError:
        raise BadValue(f"{what} has a whole number of more than {sys.get_int_max_str_digits()} digits") from None
    _check(value, what)
    return value


def short(value: Any) -> str:
    """Return a value as Python writes it, cut where it is long: messages stay readable."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:80]}… ({len(text)} characters)"


def _constant(what: str, name: str) -> float:
    raise BadValue(f"{what} is not JSON: {name} is no JSON number")


def _check(value: Any, what: str) -> None:
    todo: list[tuple[Any, str, int]] = [(value, "", 0)]
    seen = 0
    while todo:
        item, where, depth = todo.pop()
        seen += 1
        if seen > MOST_VALUES:
            raise BadValue(f"{what} has more than {MOST_VALUES} values")
        if isinstance(item, str):
            _check_text(item, where)
        elif isinstance(item, float) and not math.isfinite(item):
            raise BadValue(f"{where or what} is {item}; it must be finite", where)
        elif isinstance(item, dict | list):
            if depth == DEPTH:
                raise BadValue(f"{what} is nested too deeply: at most {DEPTH} lists and objects in one another")
            if isinstance(item, dict):
                for name in item:
                    _check_text(name, "a field's name")
                todo += [
                    (inner, f"{where}.{name[:40]}" if where else name[:40], depth + 1) for name, inner in item.items()
                ]
            else:
                todo += [(inner, f"{where}[{i}]", depth + 1) for i, inner in enumerate(item)]


def _check_text(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadValue(
            f"{where} holds a lone surrogate, {text[error.start]!a}, at character {error.start}: no text has one; "
            "replace it (Python: text.encode('utf-8', 'replace'))",
            where,
        ) from None
