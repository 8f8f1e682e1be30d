"""Settings: the keys that a component declares, and how their values are checked."""

from __future__ import annotations

import difflib
import json
import math
import re
import shlex
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, cast, get_args, get_origin

import attrs

from agentrig.errors import ConfigError, nearest
from agentrig.secrets import Secret

if TYPE_CHECKING:
    import cattrs


C = TypeVar("C")

SYNONYMS: Mapping[str, Sequence[str]] = {
    "learning_rate": ("lr",),
    "batch_size": ("tasks_per_step", "mini_batches"),
    "train_batch_size": ("tasks_per_step",),
    "ppo_mini_batch_size": ("mini_batches",),
    "per_device_train_batch_size": ("tokens_per_batch",),
    "gradient_accumulation_steps": ("tokens_per_batch",),
    "epochs": ("steps", "ppo_epochs"),
    "num_train_epochs": ("steps",),
    "total_epochs": ("steps",),
    "max_steps": ("steps",),
    "num_iterations": ("ppo_epochs",),
    "num_generations": ("group_size",),
    "rollout_n": ("group_size",),
    "beta": ("kl_loss_coef",),
    "kl_coef": ("kl_loss_coef",),
    "epsilon": ("clip_low", "clip_high"),
    "clip_ratio": ("clip_low", "clip_high"),
    "epsilon_high": ("clip_high",),
    "max_new_tokens": ("max_tokens",),
    "max_completion_length": ("max_tokens",),
    "max_response_length": ("max_tokens",),
    "max_model_len": ("max_length",),
    "model_name_or_path": ("model",),
    "lora_r": ("lora_rank",),
    "eval_steps": ("validate_every",),
    "save_steps": ("save_every",),
}
"""What other trainers call a key, to what ours are called, for messages."""


def setting(
    default: Any = attrs.NOTHING,
    *,
    help: str,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    choices: Sequence[Any] | None = None,
    validator: Callable[[Any, Any, Any], None] | None = None,
    secret: bool = False,
    one: bool = False,
) -> Any:
    """Declare one key of a component's config class, with its bounds.

    Args:
        default: The value when a run file does not set it; a callable default (`list`) is a factory.
        help: One line for the docs and for `agentrig plugins show`.
        ge: Smallest allowed value.
        gt: The value must be greater than this.
        le: Greatest allowed value; `math.inf` where infinity has a meaning: a number must be finite otherwise.
        lt: The value must be less than this.
        choices: The only allowed values.
        validator: One more `attrs` validator.
        secret: Whether it is a password or a key. Declare its type as `Secret | None` (or `Secret`, without a default)
            and read it by `reveal()`. A run file or an override says where it is stored: `{env = "NAME"}` or
            `{file = "PATH"}`; the value itself is an error there, and a run never writes or shows it.
        one: For a list of texts: a single text is a list of that one, and an empty text an empty list.

    Returns:
        An `attrs.field`, to be used in a class decorated with `@attrs.frozen(kw_only=True)`.
    """
    v = attrs.validators
    checks: list[Any] = []
    for bound, check in ((ge, v.ge), (gt, v.gt), (le, v.le), (lt, v.lt)):
        if bound is not None:
            checks.append(_unless_word(check(bound)))
    if choices is not None:
        checks.append(v.in_(list(choices)))
    if validator is not None:
        checks.append(validator)
    bounds = {sign: b for sign, b in ((">=", ge), (">", gt), ("<=", le), ("<", lt)) if b is not None}
    metadata = {"help": help, "choices": choices, "secret": secret, "bounds": bounds, "one": one}
    if callable(default) and default is not attrs.NOTHING:
        return attrs.field(factory=default, validator=checks, metadata=metadata)
    return attrs.field(default=default, validator=checks, metadata=metadata)


def structure(
    cls: type[C],
    keys: Mapping[str, Any],
    *,
    owner: str,
    section: str,
    elsewhere: Callable[[str], str] = lambda key: "",
    shown: str = "",
) -> C:
    """Build a config object from a section's keys, checking names, types and bounds.

    Args:
        owner: Whose keys they are, for messages.
        section: The section's name, for messages.
        elsewhere: Called with an unknown key; returns ` It is a key of …` where another section has it, or ''.
        shown: What to give to `agentrig plugins show` to see the keys; '' if it does not show them.

    Raises:
        ConfigError: Unknown key (with the section that has it, or the nearest one, else all keys), missing key, wrong
            type, value out of range.
    """
    fields = {f.name: f for f in attrs.fields(attrs.resolve_types(cast(Any, cls)))}
    values = {}
    for key, value in keys.items():
        if key not in fields:
            meant_key = elsewhere(key) or _similar(key, [*fields.values()])
            known = f"its keys: {', '.join(fields) or 'none'}"
            if meant_key and shown:
                known = f"agentrig plugins show {shown} lists its keys"
            raise ConfigError(f'[{section}] {owner} has no key "{key}".{meant_key}\n  {known}', key=(section, key))
        if fields[key].metadata.get("secret"):
            values[key] = _secret(value, f"[{section}] {key} of {owner}")
            continue
        if fields[key].metadata.get("one") and isinstance(value, str):
            value = [value] if value else []
        try:
            unlimited = value == math.inf == fields[key].metadata.get("bounds", {}).get("<=")
            values[key] = value if unlimited else _converter().structure(value, fields[key].type)
        except Exception as error:
            odd = isinstance(value, float) and not math.isfinite(value) and _fits(1.0, fields[key].type)
            raise ConfigError(
                f"[{section}] {key} = {_shown(value)} does not fit {owner}: expected "
                f"{'a finite number' if odd else type_words(fields[key].type)}"
                f" ({fields[key].metadata.get('help', '')}){meant(value, fields[key].type, f'{section}.{key}')}",
                key=(section, key),
            ) from error
    missing = [n for n, f in fields.items() if f.default is attrs.NOTHING and n not in values]
    if missing:
        hint = fields[missing[0]].metadata.get("help", "")
        raise ConfigError(f"[{section}] {owner} needs {', '.join(missing)}: {hint}")
    try:
        return cls(**values)
    except (ValueError, TypeError) as error:
        said = f"{error.args[0] if error.args else error}"
        wrong = next((name for name in fields if f"'{name}'" in said), "")
        raise ConfigError(f"[{section}] {owner}: {said}", key=(section, wrong)) from error


def _similar(key: str, fields: Sequence[attrs.Attribute[Any]]) -> str:
    """Return `` Did you mean "lr"?``: for what others call `key`, or for the nearest name or description; or ''."""
    known = [field.name for field in fields]
    ours = [f'"{name}"' for name in SYNONYMS.get(key, ()) if name in known]
    if ours:
        return f" Did you mean {' or '.join(ours)}?"
    return nearest(key, known) or _described(key, fields)


def _described(key: str, fields: Sequence[attrs.Attribute[Any]]) -> str:
    """Return `` Did you mean "lr"?`` for the key whose description begins nearly as `key` reads; or ''."""
    words = key.split("_")
    begins = {" ".join(str(field.metadata.get("help", "")).split()[: len(words)]): field.name for field in fields}
    close = difflib.get_close_matches(" ".join(words), begins, n=1, cutoff=0.8)
    return f' Did you mean "{begins[close[0]]}"?' if close else ""


def check_any(
    classes: Sequence[type], keys: Mapping[str, Any], *, owner: str, section: str, elsewhere: Callable[[str], str]
) -> None:
    """Reject keys that none of several config classes has; see `structure` for the other arguments.

    Args:
        classes: Config classes, of which one will be chosen later.
        owner: Who has no such key, for the message: `no hardware for grpo`.

    Raises:
        ConfigError: None has such a key.
    """
    fields = {f.name: f for config in classes for f in attrs.fields(config)}
    known = sorted(fields)
    for key in keys:
        if key not in known:
            meant_key = elsewhere(key) or _similar(key, [*fields.values()])
            keys_of = f"their keys: {', '.join(known) or 'none'}"
            if meant_key:
                keys_of = f"agentrig plugins show {section} names them, and agentrig plugins show NAME lists their keys"
            raise ConfigError(f'[{section}] {owner} has a key "{key}".{meant_key}\n  {keys_of}', key=(section, key))


def _secret(source: Any, where: str) -> Secret | None:
    try:
        return None if source is None else Secret.read(source)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None


def meant(value: Any, type_: Any, key: str) -> str:
    """Return what to write for a value that was pasted as Python or with quotes (`True`, `"2e-6"`, `1e2`), or ''.

    For one value in place of a list, that is the list of it, and `[]` for an empty text; for a number in place of text,
    its text.
    """
    short = key.rpartition(".")[2]

    def told(written: str, it: str = "") -> str:
        return f"\n  Write {it}{short} = {written}; on the command line: {shlex.quote(f'{key}={written}')}"

    if _listed(type_) and not isinstance(value, list | tuple | Mapping):
        with suppress(Exception):  # that is no value of the list either
            _converter().structure([value], type_)
            return told(json.dumps([] if value == "" else [value], ensure_ascii=False))
    if isinstance(value, (bool, int, float)) and _fits("text", type_):
        return told(json.dumps(_shown(value)), "it in quotes: ")
    text = str(value).strip().strip("\"'")
    for written in (text, text.lower(), text.removesuffix(".0")):
        try:
            _converter().structure(tomllib.loads(f"x = {written}")["x"], type_)
        except Exception:  # this guess is wrong: try the next
            continue
        return told(written)
    if isinstance(value, float) and value.is_integer() and type_ is int:
        return told(str(int(value)))
    return ""


def _fits(value: Any, type_: Any) -> bool:
    """Whether a type takes a value."""
    try:
        _converter().structure(value, type_)
    except Exception:  # whatever a converter raises
        return False
    return True


def meant_in_file(text: str, error: tomllib.TOMLDecodeError) -> str:
    """Return what to write in the line of a run file that is not TOML because of a pasted Python value, or ''."""
    if "Cannot overwrite a value" in str(error):
        return "\n  The file has this key twice: delete one of the lines"
    place = re.search(r"at line (\d+)", str(error))
    line = text.split("\n")[int(place[1]) - 1] if place else ""
    if re.search(r"[\x00-\x08\x0b-\x1f\x7f]", line.removesuffix("\r")):
        return "\n  The line has a character that is not text: delete it"
    key, _, rest = (part.strip() for part in line.partition("="))
    value = rest.partition("#")[0].strip().removeprefix("=").strip()
    if value == "None":
        return f"\n  Leave {key} out, or write a value"
    for written in (re.sub(r"\b(True|False)\b", lambda word: word[0].lower(), value), json.dumps(value)):
        try:
            tomllib.loads(f"{key} = {written}")
        except tomllib.TOMLDecodeError:  # this guess is wrong: try the next
            continue
        return f"\n  Write {key} = {written}" if value else ""
    return ""


def _unless_word(check: Callable[[Any, Any, Any], None]) -> Callable[[Any, Any, Any], None]:
    """Return a validator that leaves out None, and a word that stands in place of a number (`"auto"`)."""

    def checked(owner: Any, field: Any, value: Any) -> None:
        if value is not None and value != "auto":
            check(owner, field, value)

    return checked


def _words_and_type(type_: Any) -> tuple[tuple[Any, ...], type] | None:
    """Return the words and the type of `Literal[WORD] | TYPE`; None for any other type."""
    if get_origin(type_) not in (Union, UnionType):
        return None
    words = [part for part in get_args(type_) if get_origin(part) is Literal]
    types = [part for part in get_args(type_) if get_origin(part) is not Literal]
    return (get_args(words[0]), types[0]) if len(words) == len(types) == 1 else None


WORDS: Mapping[Any, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    Secret: "a secret",
    Any: "any value",
}
"""What a key of each type holds, in the words of whoever writes a run file."""

OF_MANY: Mapping[Any, str] = {int: " of integers", float: " of numbers", str: " of texts"}


def type_words(type_: Any) -> str:
    """Return what a key of a type holds: `an integer`, `a list of texts`, `"auto" or an integer`, `a table`."""
    origin, inside = get_origin(type_) or type_, [part for part in get_args(type_) if part not in (..., NoneType)]
    if origin in (Union, UnionType):
        return " or ".join(map(type_words, inside))
    if origin is Literal:
        return " or ".join(map(json.dumps, inside))
    if _listed(type_):
        return f"a list{OF_MANY.get(inside[0], '') if len(set(inside)) == 1 else ''}"
    if isinstance(origin, type) and (issubclass(origin, Mapping) or attrs.has(origin)):
        return f"a table{OF_MANY.get(inside[-1], '') if inside else ''}"
    return WORDS.get(type_) or str(getattr(type_, "__name__", type_))


def _shown(value: Any) -> str:
    """Return a value for a message: `true`, not `True`, as TOML has it."""
    return json.dumps(value) if isinstance(value, bool) else repr(value)


def _listed(type_: Any) -> bool:
    """Whether a type is of lists: Python takes a text, or a table, for a list of its letters, or of its keys."""
    return (get_origin(type_) or type_) in (list, tuple, Sequence)


def _strict(type_: type, accepted: tuple[type, ...]) -> Callable[[Any, Any], Any]:
    def convert(value: Any, _: Any) -> Any:
        if isinstance(value, bool) and type_ is not bool:
            raise TypeError(f"expected {type_.__name__}, got a bool")
        if not isinstance(value, accepted):
            raise TypeError(f"expected {type_.__name__}, got {type(value).__name__}")
        if type_ is float and not math.isfinite(cast(float, value)):
            raise ValueError("expected a finite number")
        return type_(value)

    return convert


@cache
def _converter() -> cattrs.Converter:
    import cattrs

    converter = cattrs.Converter(forbid_extra_keys=True)
    for type_, accepted in ((bool, (bool,)), (int, (int,)), (float, (int, float)), (str, (str,))):
        converter.register_structure_hook(type_, _strict(type_, accepted))

    def word_or_number(type_: Any) -> Callable[[Any, Any], Any]:
        words, other = cast(Any, _words_and_type(type_))
        return lambda value, _: value if value in words else converter.structure(value, other)

    def listed(type_: Any) -> Callable[[Any, Any], Any]:
        make, kinds = get_origin(type_) or type_, get_args(type_) or (Any, ...)
        each = None if make is tuple and kinds[-1] is not ... else kinds[0]

        def convert(value: Any, _: Any) -> Any:
            if not isinstance(value, list | tuple):
                raise TypeError(f"expected a list, got {type(value).__name__}")
            pairs = zip(value, kinds, strict=True) if each is None else ((item, each) for item in value)
            items = [converter.structure(item, kind) for item, kind in pairs]
            return tuple(items) if make is tuple else items

        return convert

    converter.register_structure_hook_factory(lambda type_: _words_and_type(type_) is not None, word_or_number)
    converter.register_structure_hook_factory(_listed, listed)
    return converter
