"""How the fields of a request's body become Python values: cattrs with JSON's own types, and errors for the client."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, is_typeddict

import attrs
import cattrs
from cattrs.dispatch import StructureHook
from cattrs.errors import AttributeValidationNote, BaseValidationError, IterableValidationError, IterableValidationNote
from cattrs.gen.typeddicts import make_dict_structure_fn

from agentrig.text import json_kind
from agentrig_grpo.server.values import short

T = TypeVar("T")


class BadField(Exception):
    """A field's value does not fit.

    Args:
        words: What is wrong, to be read after the field's name.
        where: The field, as `messages[0].role`. The rule of a type leaves it out: cattrs knows it.
        code: `unsupported_value` for one that other servers take; else ''.
    """

    def __init__(self, words: str, where: str = "", code: str = "") -> None:
        super().__init__(f"{where} {words}")
        self.words, self.where, self.code = words, where, code


@attrs.frozen
class Between:
    """The bounds of a number, both included: `Annotated[int, Between(1, 128)]`."""

    low: float
    high: float | None = None


def structure(cls: type[T], data: Mapping[str, Any], rules: cattrs.Converter) -> T:
    """Build an attrs class from a JSON object. A field that is null counts as left out; fields of no name are ignored.

    Raises:
        BadField: The first field of the class that does not fit.
    """
    try:
        return rules.structure({name: value for name, value in data.items() if value is not None}, cls)
    except BaseValidationError as error:
        raise _first(error) from None


def converter() -> cattrs.Converter:
    """Return a converter that takes values as JSON has them: no text is read as a number, and no 1 as true."""
    made = cattrs.Converter()
    for type_ in (bool, str):
        made.register_structure_hook(type_, _same)
    made.register_structure_hook_factory(_is(dict), lambda type_: lambda value, _: _same(value, dict))
    made.register_structure_hook_factory(_is(Literal), _choice)
    made.register_structure_hook_factory(_is(Annotated), _number)
    made.register_structure_hook_factory(_is(list), _list)
    made.register_structure_hook_factory(is_typeddict, _object)
    return made


def _first(error: Exception) -> BadField:
    """Return the first of the errors that cattrs collected, with the place that its notes name."""
    where = ""
    while isinstance(error, BaseValidationError):
        error = error.exceptions[0]
        for note in getattr(error, "__notes__", ()):
            if isinstance(note, AttributeValidationNote):
                where += f".{note.name}" if where else note.name
            elif isinstance(note, IterableValidationNote):
                where += f"[{note.index}]"
    if isinstance(error, KeyError):
        return BadField("is missing", where)
    if isinstance(error, BadField):
        return BadField(error.words, error.where or where, error.code)
    raise error


def _is(origin: Any) -> Callable[[Any], bool]:
    return lambda type_: get_origin(type_) is origin


def _same(value: Any, type_: type[T]) -> T:
    if not isinstance(value, type_):
        raise BadField(f"must be {json_kind(type_())}, not {json_kind(value)}")
    return value


def _choice(type_: Any) -> StructureHook:
    choices = get_args(type_)

    def choice(value: Any, _: Any) -> Any:
        if value not in choices:
            raise BadField(f"is {short(value)}; use one of {', '.join(choices)}")
        return value

    return choice


def _number(type_: Any) -> StructureHook:
    kind, bounds = get_args(type_)
    wanted = "an integer" if kind is int else "a number"
    limits = f"at least {bounds.low}" if bounds.high is None else f"between {bounds.low} and {bounds.high}"

    def number(value: Any, _: Any) -> Any:
        if not isinstance(value, int | float) or isinstance(value, bool) or (kind is int and value != int(value)):
            raise BadField(f"must be {wanted}, not {short(value)}")
        if not bounds.low <= value or (bounds.high is not None and not value <= bounds.high):
            raise BadField(f"is {short(value)}; it must be {limits}")
        return kind(value)

    return number


def _list(type_: Any, rules: cattrs.BaseConverter) -> StructureHook:
    (kind,) = get_args(type_)
    item = rules.get_structure_hook(kind)

    def list_(value: Any, _: Any) -> Any:
        items = []
        for i, each in enumerate(_same(value, list)):
            try:
                items.append(item(each, kind))
            except Exception as error:  # cattrs' own list goes on to the last item: seconds, where each is wrong
                error.add_note(IterableValidationNote(f"item {i}", i, kind))
                raise IterableValidationError("the first item that does not fit", [error], type_) from None
        return items

    return list_


def _object(type_: Any, rules: cattrs.BaseConverter) -> StructureHook:
    """Return the hook of a TypedDict: fields that are null count as left out; those that it does not name are kept."""
    fields = make_dict_structure_fn(type_, rules)
    names = sorted(type_.__required_keys__, key=list(type_.__annotations__).index)

    def object_(value: Any, _: Any) -> Any:
        if not isinstance(value, dict):
            raise BadField(f"must be an object with {' and '.join(names)}")
        given = {name: item for name, item in value.items() if item is not None}
        return fields({**dict.fromkeys(names), **given}, type_)

    return object_
