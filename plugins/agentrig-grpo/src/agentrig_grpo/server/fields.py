"""How a request's body becomes Python values: its JSON as a whole, then each field, with errors for the client.

What could harm later is refused as a whole, with its place. Fields are checked by plain functions.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import attrs

from agentrig.errors import AgentrigError
from agentrig.text import json_kind

DEPTH = 64
"""Deepest nesting of lists and objects."""
MOST_VALUES = 100_000
"""Most values in one body: a conversation of thousands of messages has about ten thousand."""

T = TypeVar("T")

Check = Callable[[Any], Any]
"""Returns a field's value as the server uses it, or raises `BadField`. No text is read as a number, no 1 as true."""


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


class BadField(Exception):
    """A field's value does not fit.

    Args:
        words: What is wrong, to be read after the field's name.
        where: The field, as `messages[0].role`. A check leaves out what is above it.
        code: `unsupported_value` for one that other servers take; else ''.
    """

    def __init__(self, words: str, where: str = "", code: str = "") -> None:
        super().__init__(f"{where} {words}")
        self.words, self.where, self.code = words, where, code


def field(check: Check, default: Any = attrs.NOTHING) -> Any:
    """Return a field of an attrs class that `structure` builds; one without a default must be there."""
    return attrs.field(default=default, metadata={"check": check})


def structure(cls: type[T], data: Mapping[str, Any]) -> T:
    """Build an attrs class from a JSON object. A field that is null counts as left out; fields of no name are ignored.

    Raises:
        BadField: The first field of the class that does not fit.
    """
    found = {}
    for each in attrs.fields(cls):  # type: ignore[arg-type]
        value = data.get(each.name)
        if value is not None:
            found[each.name] = inside(each.name, each.metadata["check"], value)
        elif each.default is attrs.NOTHING:
            raise BadField("is missing", each.name)
    return cls(**found)


def inside(name: str, check: Check, value: Any) -> Any:
    """Check what has a name in an object, or a number, as `[0]`, in a list; the error names it."""
    try:
        return check(value)
    except BadField as error:
        dot = "." if error.where and not error.where.startswith("[") else ""
        raise BadField(error.words, f"{name}{dot}{error.where}", error.code) from None


def of_type(kind: type) -> Check:
    """Return the check of values that stay as they are."""

    def check(value: Any) -> Any:
        if not isinstance(value, kind):
            raise BadField(f"must be {json_kind(kind())}, not {json_kind(value)}")
        return value

    return check


def one_of(*choices: str) -> Check:
    """Return the check of a text that must be one of some."""

    def check(value: Any) -> Any:
        if value not in choices:
            raise BadField(f"is {short(value)}; use one of {', '.join(choices)}")
        return value

    return check


def number(kind: type[int] | type[float], low: float, high: float | None = None) -> Check:
    """Return the check of a number between two bounds, both included; a whole number may be written as 2.0."""
    wanted = "an integer" if kind is int else "a number"
    limits = f"at least {low}" if high is None else f"between {low} and {high}"

    def check(value: Any) -> Any:
        if not isinstance(value, int | float) or isinstance(value, bool) or (kind is int and value != int(value)):
            raise BadField(f"must be {wanted}, not {short(value)}")
        if not low <= value or (high is not None and not value <= high):
            raise BadField(f"is {short(value)}; it must be {limits}")
        return kind(value)

    return check


def list_of(item: Check) -> Check:
    """Return the check of a list, which ends at the first item that does not fit."""
    is_list = of_type(list)
    return lambda value: [inside(f"[{i}]", item, each) for i, each in enumerate(is_list(value))]


def object_of(needed: Mapping[str, Check], **optional: Check) -> Check:
    """Return the check of an object: fields that are null count as left out; those that it does not name are kept."""
    checks = {**needed, **optional}

    def check(value: Any) -> Any:
        if not isinstance(value, dict):
            raise BadField(f"must be an object with {' and '.join(needed)}")
        given = {name: item for name, item in value.items() if item is not None}
        return {
            name: inside(name, checks[name], item) if name in checks else item
            for name, item in {**dict.fromkeys(needed), **given}.items()
        }

    return check
