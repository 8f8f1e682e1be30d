"""How the fields of a request's body become Python values: checks of JSON's own types, with errors for the client."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import attrs

from agentrig_grpo.server.values import short

T = TypeVar("T")

Check = Callable[[Any], Any]
"""Returns a field's value as the server uses it, or raises `BadField`. No text is read as a number, no 1 as true."""


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
            raise BadField(f"must be of type {kind.__name__}, not {type(value).__name__}")
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
