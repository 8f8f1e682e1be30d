"""The fields of a chat completion's request below its top level, and the refusal of those that nobody knows."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from agentrig.errors import nearest
from agentrig.http_server import Refused

Fields = Mapping[str, Collection[str]]
"""The names that objects at a place of a body may have; `[]` in a place stands for each item of a list."""

CACHE = "cache_control"
"""Says what a provider may keep of a prompt; without effect on what is sampled."""

CHAT: Fields = {
    "messages[]": frozenset(
        (
            *("role", "content", "name", "tool_calls", "tool_call_id", "function_call", CACHE),
            # what clients send back of an answer
            *("refusal", "annotations", "audio", "parsed", "provider_specific_fields"),
            *("reasoning", "reasoning_content", "reasoning_details", "thinking", "thinking_blocks"),
        )
    ),
    "messages[].content[]": frozenset(
        (
            *("type", "text", "refusal", "image_url", "input_audio", "audio_url", "video_url", "file", "uuid"),
            *("id", "index", "annotations", CACHE),
        )
    ),
    "messages[].tool_calls[]": frozenset(("id", "type", "index", "function", "provider_specific_fields")),
    "messages[].tool_calls[].function": frozenset(("name", "arguments", "parsed_arguments")),
    "stream_options": frozenset(("include_usage", "include_obfuscation", "continuous_usage_stats")),
    "tools[]": frozenset(("type", "function", CACHE)),
    "tools[].function": frozenset(("name", "description", "parameters", "strict", CACHE)),
    "response_format": frozenset(("type", "json_schema", "format", "structures", "triggers")),
    "response_format.json_schema": frozenset(("name", "description", "schema", "strict")),
}
"""OpenAI's fields, those that chat templates read, and those that clients send back of an answer."""


def check_nested(body: Mapping[str, Any], fields: Fields) -> None:
    """Refuse fields below the top level that have a value and are not known.

    Raises:
        Refused: There is one; `param` is its path, as `messages[0].banana`.
    """
    for place, known in fields.items():
        for path, found in objects(body, place):
            for name, value in found.items():
                if name not in known and value not in (None, False, [], {}, ""):
                    where = f"{path}.{name[:100]}"
                    text = f"unknown field {where!r}.{nearest(name[:100], known)}"
                    raise Refused(text, status=400, code="unknown_parameter", param=where)


def objects(body: Any, place: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield path and value of each object at a place of a body."""
    yield from _below(body, place.split("."), "")


def without_cache(body: Mapping[str, Any], fields: Fields) -> bool:
    """Remove `cache_control` from the objects of a body, in place; return whether there was one."""
    found = [
        each.pop(CACHE) for place, known in fields.items() if CACHE in known
        for _, each in objects(body, place) if CACHE in each
    ]  # fmt: skip
    return any(value is not None for value in found)


def _below(value: Any, steps: list[str], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if not steps:
        if isinstance(value, dict):
            yield path, value
        return
    name, several = steps[0].removesuffix("[]"), steps[0].endswith("[]")
    inner = value.get(name) if isinstance(value, dict) else None
    where = f"{path}.{name}" if path else name
    if not several:
        yield from _below(inner, steps[1:], where)
    elif isinstance(inner, list):
        for i, each in enumerate(inner):
            yield from _below(each, steps[1:], f"{where}[{i}]")
