"""Storable text: turns text of agents, models and rewards into text that every file format can hold."""

from __future__ import annotations

import errno
import inspect
import json
import math
import os
import re
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import orjson

from agentrig.errors import AgentrigError, nearest, place_of

LONE_SURROGATE = re.compile("[\ud800-\udfff]")
"""Half of a UTF-16 character: Python strings and JSON escapes can hold one, but UTF-8 files can't."""

CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""What a terminal obeys and does not show, but for tabs and ends of lines; also what turns the direction of text."""

LINE_LIMIT = 2000
"""Longest line of a message, in characters; a text of the user's, such as an id, may be longer."""

MESSAGE_LIMIT = 20_000
"""Longest message of a failure that is kept, in characters."""

GROUP_SHOWN = 5
"""So many exceptions of a group are in its message."""


def check_regular(path: Path) -> None:
    """Refuse to read or write what is no file, such as a pipe, at which `open` would wait for ever.

    Raises:
        OSError: It is there, and neither a regular file nor a directory, for which `open` has an error of its own.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))


def open_own(path: Path, flags: int) -> int:
    """Open a file of a run for writing, and return its descriptor; it is made if it is not there.

    Args:
        flags: What to open it for, as `os.open` has it.

    Raises:
        OSError: It cannot be opened, or is no regular file, or is a symbolic link: that may lead out of the run.
    """
    if path.is_symlink():
        raise OSError(errno.ELOOP, "it is a symbolic link, and a run writes into no other file", str(path))
    check_regular(path)
    return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)


def read_text(path: Path, errors: str = "strict") -> str:
    """Return the text of a file of a run, in UTF-8.

    Args:
        errors: What to do with bytes that are no text, as `open` has it.
    """
    check_regular(path)
    return path.read_text("utf-8", errors)


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


def whole_characters(values: Any) -> Any:
    """Return JSON values with U+FFFD for each lone surrogate, which UTF-8 cannot encode."""
    return json.loads(LONE_SURROGATE.sub("\ufffd", json.dumps(values, ensure_ascii=False)))


def whole_json(text: str) -> Any:
    """Return the values of a JSON text, with U+FFFD for each lone surrogate, also for one that is an escape."""
    values = json.loads(text)
    may_have = "\\ud" in text or "\\uD" in text or (not text.isascii() and LONE_SURROGATE.search(text))
    return whole_characters(values) if may_have else values


def check_characters(values: Any, what: str) -> None:
    """Raise `ValueError` if JSON values have a lone surrogate, in a text or in a key; `what` says whose they are."""
    if not _is_simple(values) and (half := LONE_SURROGATE.search(json.dumps(values, ensure_ascii=False))):
        raise ValueError(f"{what} has a lone surrogate, {half[0]!a}, half of a character: no text has one")


def names_secret(text: str) -> bool:
    """Return whether a text has the name of a secret in it, as `storable` leaves it."""
    return any(name in text for name in _masks.values())


def printable(text: str) -> str:
    """Return storable text for a terminal: control characters, which it would obey, as escapes such as `\\x1b`."""
    return CONTROLS.sub(lambda found: repr(found[0])[1:-1], storable(text))


def one_line(text: str) -> str:
    """Return printable text on one line, for a name: an end of a line in it is an escape too."""
    return printable(text).replace("\n", "\\n")


def message_lines(text: str) -> str:
    """Return a message for a terminal, printable; each line is cut to `LINE_LIMIT`."""
    return "\n".join(cut(line, LINE_LIMIT) for line in printable(text).split("\n"))


def parsed(content: bytes) -> tuple[Any, bool]:
    """Return the value of a JSON text, and whether orjson can read it: whether it has no NaN and no lone surrogate.

    What orjson refuses is read by the standard library, which takes several times as long for lists of numbers. Whole
    numbers beyond 64 bits become floats.
    """
    try:
        return orjson.loads(content), True
    except orjson.JSONDecodeError:
        return json.loads(content), False


def read_fault(error: Exception) -> str:
    """Return why a file of a run could not be read, in words of the file and not of Python's."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, UnicodeDecodeError):
        line = error.object.count(b"\n", 0, error.start) + 1
        return f"line {line} has the byte {error.object[error.start]:#04x}, which is not UTF-8"
    if isinstance(error, KeyError) and error.args:
        return f"it has no {error.args[0]}"
    if isinstance(error, RecursionError):
        return "it is nested too deep"
    if isinstance(error, TypeError | AttributeError):
        return "a value in it has another type than a run writes"
    if isinstance(error, json.JSONDecodeError) and not error.doc.strip():
        return "it is empty"
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def json_fault(error: Exception) -> str:
    """Return what a text has or is for which `json.loads` raised: `is not JSON: …`."""
    if isinstance(error, RecursionError):
        return "is nested too deep"
    if isinstance(error, UnicodeDecodeError):
        return f"is not UTF-8 (byte {error.start})"
    if "sys.set_int_max_str_digits" in str(error):
        return f"has a whole number of more than {sys.get_int_max_str_digits()} digits"
    return f"is not JSON: {error}"


def json_text(value: Any) -> str:
    """Return a value as storable JSON text; never raises: what is no JSON value becomes text, as in `plain_values`."""
    try:
        return storable(json.dumps(value, default=str, ensure_ascii=False))
    except Exception:  # keys that are not text, cycles, a `__str__` that raises
        return storable(json.dumps(plain_values(value), ensure_ascii=False))


class TooLong(Exception):
    """A value has more characters of JSON than are allowed."""


class Room:
    """How many characters a value may still take as JSON; escapes are not counted."""

    def __init__(self, characters: int) -> None:
        self._left = characters

    def take(self, characters: int) -> None:
        """Use some of it; raise `TooLong` if there is not so much left."""
        self._left -= characters
        if self._left < 0:
            raise TooLong


def plain_values(value: Any, around: tuple[int, ...] = (), *, room: Room | None = None) -> Any:
    """Return JSON values: other keys and values become text, as does what contains itself or is deep.

    Args:
        around: The `id` of each list or dict around it, at most `PLAIN_DEPTH`.
        room: How long it may be; by default there is no limit, and nothing is raised.

    Raises:
        TooLong: It is longer; the rest of it is not looked at.
    """
    try:
        if isinstance(value, Mapping | list | tuple):
            if room is not None:
                room.take(len("[]"))
            if id(value) in around or len(around) == PLAIN_DEPTH:
                raise ValueError("it contains itself, or is nested too deep")
            inner = (*around, id(value))
            if isinstance(value, Mapping):
                return {_key(k, room): plain_values(v, inner, room=room) for k, v in value.items()}
            return [plain_values(each, inner, room=room) for each in value]
        number = isinstance(value, float) or (isinstance(value, int) and abs(value) < TOO_LARGE)
        plain = value if value is None or number or isinstance(value, str) else str(value)
        if room is not None:
            room.take(len(plain) if isinstance(plain, str) else 1)
        return plain
    except TooLong:
        raise
    except Exception as error:
        return f"({type(value).__name__} that cannot be written: {words_of(error)})"


def _key(key: Any, room: Room | None) -> str:
    text = key if isinstance(key, str) else str(key)
    if room is not None:
        room.take(len(text))
    return text


def copied(value: Any) -> Any:
    """Return plain data with lists and dicts of its own."""
    if isinstance(value, Mapping):
        return {key: copied(part) for key, part in value.items()}
    return type(value)(map(copied, value)) if type(value) in (list, tuple) else value


def spreadsheet_text(cell: Any) -> Any:
    """Return a cell that a spreadsheet does not take for a formula; what is no text is returned as it is."""
    formula = isinstance(cell, str) and cell.startswith(("=", "+", "-", "@", "\t", "\r"))
    return f"'{cell}" if formula else cell


def flat(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings, each with its keys joined by dots."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def without_nan(value: Any) -> Any:
    """Return plain data with None in the place of NaN and infinities, which JSON can't hold; other numbers as floats.

    Raises:
        TypeError: It holds what is neither plain data nor a number.
    """
    if isinstance(value, Mapping):
        return {key: without_nan(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(part) for part in value]
    if value is None or isinstance(value, str | int):  # bool too
        return value
    value = float(value)  # a number of numpy or torch too
    return value if math.isfinite(value) else None


DEPTH_LIMIT = 254
"""Most levels of lists and dicts in plain data, as orjson has it: what reads and writes it is recursive."""


PLAIN_DEPTH = 100
"""Most levels of lists and dicts in what `plain_values` returns: it goes into data of `DEPTH_LIMIT` levels."""


TOO_LARGE = 10**4300
"""A whole number of more digits than Python reads and writes (`sys.get_int_max_str_digits`)."""

LARGE_WORDS = "a whole number of more than 4300 digits"
"""What messages call a number from `TOO_LARGE` on."""

DEEP_WORDS = "is nested too deep for JSON"
"""What messages say of lists and dicts of more levels than Python reads."""


_AS_GIVEN = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_SUBCLASS


def plain_json(value: Any, what: str, *, strict: bool = False, around: int = 0) -> str:
    """Return plain data as JSON text, with whole numbers of any size.

    Args:
        value: Text, numbers, booleans, None, and lists, tuples and dicts of them.
        what: What an error calls the value.
        strict: Whether NaN, infinities and keys that are not text are errors too: no other reader of JSON knows them.
        around: Levels that it has around data of `DEPTH_LIMIT` levels.

    Raises:
        ValueError: It is no plain data, or contains itself; the message has the place, the type and the cure.
    """
    try:
        text = orjson.dumps(value, option=_AS_GIVEN)
        if orjson.loads(text) == value:  # it has no NaN, which orjson writes as null, and no tuple
            return text.decode()
    except (TypeError, ValueError):  # json.dumps takes more: NaN, tuples, subclasses, large numbers, lone surrogates
        pass
    if not _is_simple(value):
        keys = [key for part in list(_containers(value, what, around)) if isinstance(part, dict) for key in part]
        if strict and not all(isinstance(key, str) for key in keys):
            raise ValueError(_not_plain(value, what, strict))
    try:
        return json.dumps(value, allow_nan=not strict)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(_not_plain(value, what, strict) or f"{what}: {words_of(error)}") from None


def check_depth(value: Any, what: str, *, around: int = 0) -> None:
    """Raise `ValueError` if plain data is nested deeper than `DEPTH_LIMIT` and the levels around it."""
    if not _is_simple(value):
        for _ in _containers(value, what, around):
            pass


def _is_simple(value: Any) -> bool:
    """Return whether orjson takes a value: then its keys are text, and it is not nested too deep. A quick look."""
    try:
        orjson.dumps(value)
        return True
    except TypeError:
        return False


def _containers(value: Any, what: str, around: int = 0) -> Iterator[Any]:
    """Yield the lists, tuples and dicts in plain data; raise `ValueError` if it is nested too deep."""
    level: list[Any] = [[value]]
    for _ in range(DEPTH_LIMIT + around + 1):
        inner = (x for v in level for x in (v.values() if _is_a(v, dict) else v) if _is_a(x, *_CONTAINERS))
        level = list({id(x): x for x in inner}.values())  # each once: two in each other are four, eight and so on
        if not level:
            return
        yield from level
    raise ValueError(f"{what} contains itself, or is nested deeper than {DEPTH_LIMIT} lists or dicts")


_CONTAINERS = (dict, list, tuple)
_SCALARS = (str, int, float, type(None))


def _not_plain(value: Any, what: str, strict: bool) -> str:
    """Return the first place in a value that JSON has no form for, or ''; it is not nested too deep."""
    todo = [(what, value)]
    while todo:
        place, part = todo.pop()
        if _is_a(part, dict):
            for key in part:
                if not _is_a(key, *((str,) if strict else _SCALARS)):
                    return f"{place} has a key of the type {_type_name(key)}; return text as keys"
            todo += [(f"{place}[{json.dumps(key)}]", inner) for key, inner in reversed(part.items())]
        elif _is_a(part, list, tuple):
            todo += [(f"{place}[{i}]", part[i]) for i in reversed(range(len(part)))]
        elif strict and _is_a(part, float) and not math.isfinite(part):
            return f"{place} is {float(part)}, which JSON can't hold; return None or text"
        elif _is_a(part, int) and abs(part) >= TOO_LARGE:
            return f"{place} is {LARGE_WORDS}, which no reader takes; return it as hex()"
        elif not _is_a(part, *_SCALARS):
            methods = (name for name in ("tolist", "decode", "isoformat") if hasattr(type(part), name))
            cure = next((f"return its .{name}()" for name in methods), "return text, numbers, lists or dicts")
            cure = "return a list of it" if _is_a(part, set, frozenset) else cure
            return f"{place} is of the type {_type_name(part)}; {cure}"
    return ""


def _is_a(value: Any, *types: type) -> bool:
    """`isinstance` for JSON, which is not asked of the value: a mock may say that it is a dict, and holds nothing."""
    return issubclass(type(value), types)


def _type_name(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def json_kind(value: Any) -> str:
    """Return what JSON calls a value: `null`, `true or false`, `a number`, `text`, `a list` or `an object`."""
    if value is None:
        return "null"
    names: Mapping[type, str] = {bool: "true or false", str: "text", list: "a list", dict: "an object"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else f"a {_type_name(value)}")


def with_kind(value: Any) -> str:
    """Return a value and what JSON calls it, for a message: `the text '27.79'`, `the number 27.79`."""
    kind = json_kind(value)
    shown = repr(value) if isinstance(value, str) else json_text(value)
    return ("the text " if kind == "text" else "the number " if kind == "a number" else "") + cut(shown, 80)


def differs_in_kind_only(one: Any, other: Any) -> bool:
    """Whether a text and a value that is no text look alike when printed: '27.79' and 27.79."""
    return isinstance(one, str) != isinstance(other, str) and str(one) == str(other)


def differs_in_form_only(answer: Any, gold: Any) -> bool:
    """Whether an answer is a right one but for its form: text or number, JSON around it, quotes, case, a final period.

    Of a JSON object, only one field counts, or the field `answer`.
    """
    read = answer
    if isinstance(answer, str):
        with suppress(ValueError, RecursionError):
            read = json.loads(answer)
    found = [read]
    if isinstance(read, Mapping):
        found.append(next(iter(read.values())) if len(read) == 1 else read.get("answer"))
    bare = _bare(gold)
    return answer != gold and bare != "" and any(_bare(each) == bare for each in found if each is not None)


def _bare(value: Any) -> str:
    text = value if isinstance(value, str) else json_text(value)
    return text.strip(" \t\r\n\"'`.").casefold()


def words_of(error: BaseException) -> str:
    """Return `TYPE: message` of an exception as storable text, cut to `MESSAGE_LIMIT`; never raises.

    Of a group of exceptions, such as that of `asyncio.TaskGroup`, the first of them follow, each with its place.
    """
    try:
        text = f"{type(error).__name__}: {error}{_meant_argument(error)}"
        if isinstance(error, BaseExceptionGroup):
            text += f": {'; '.join(words_of(each) + place_of(each) for each in error.exceptions[:GROUP_SHOWN])}"
    except KeyboardInterrupt:
        raise
    except BaseException as broken:  # its own `__str__`, which may call sys.exit
        text = f"{type(error).__name__}: (its message raised {type(broken).__name__})"
    return cut(storable(text.removesuffix(": ")), MESSAGE_LIMIT)  # of many errors the message is empty


def account_of(error: BaseException, *, installed: bool = False) -> str:
    """Return what an error says: agentrig's own message, or type, message and place of any other; see `place_of`."""
    return str(error) if isinstance(error, AgentrigError) else words_of(error) + place_of(error, installed=installed)


def _meant_argument(error: BaseException) -> str:
    """Return the nearest of the arguments that a function or class has, if it was called with one it has not.

    It is looked up by its name where it was called.
    """
    if not isinstance(error, TypeError) or error.__traceback__ is None:
        return ""
    found = re.search(r"(\w+)(?:\.__init__)?\(\) got an unexpected keyword argument '(\w+)'", str(error))
    if found is None:
        return ""
    frame = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][-1]
    called: Any = {**frame.f_builtins, **frame.f_globals, **frame.f_locals}.get(found[1])
    try:
        meant = nearest(found[2], inspect.signature(called).parameters)
    except (TypeError, ValueError):  # it is not called by that name there, or written in C
        return ""
    return meant and f".{meant}"


def cut(text: str, limit: int) -> str:
    """Return text cut to a number of characters, with a note if it was cut."""
    return text if len(text) <= limit else f"{text[:limit]} … (cut from {len(text)} characters)"


TRACEBACK = "Traceback (most recent call last):"
"""How Python begins what it writes about an exception that nothing has handled."""


VARYING = re.compile(r"""(\.py:\d+)|\d+|"[^"]*"|'[^']*'""")
"""What differs between messages of the same cause; a line of code does not."""


def alike(message: str) -> str:
    """Return what messages of the same cause have in common: all but names and numbers."""
    return VARYING.sub(lambda found: found[1] or "…", message)


def gist(message: str, limit: int) -> str:
    """Return a message of several lines on one: the first, and what says the cause, which programs write at the end.

    Of a traceback that is the line with the exception, and of other text the last one. Each is cut, to `limit`
    characters together.
    """
    first, *rest = [line for line in message.splitlines() if re.search(r"\w", line)] or [""]
    if not rest:
        return cut(first.strip(), limit)
    places = [n for n, line in enumerate(rest) if line.startswith('  File "')]
    after = rest[places[-1] + 1 :] if places else []
    cause = next((line for line in after if not line.startswith(" ")), rest[-1])
    return f"{cut(first.removesuffix(TRACEBACK).strip(), limit // 2)} … {cut(cause.strip(), limit // 2)}"


def amount(n: int | str, noun: str) -> str:
    """Return a number of things: `1 step`, `2 steps`; `n` may be a number as text, such as `1 234`."""
    return f"{n} {noun}" if str(n) == "1" else f"{n} {noun}s"
