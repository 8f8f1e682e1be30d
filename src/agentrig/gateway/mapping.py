"""What the other APIs' translations share: checks of fields, and the parts of a streamed chat completion."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from agentrig.http_server import Refused

SAMPLING = frozenset(
    (
        "frequency_penalty",
        "min_p",
        "min_tokens",
        "presence_penalty",
        "repetition_penalty",
        "return_token_ids",
        "seed",
        "stop",
        "temperature",
        "top_k",
        "top_p",
    )
)
"""Fields that go to the model's server as they are, whatever API a request speaks: a run's sampling may have them."""


ELSEWHERE = 'to send it to a model that is not trained, name that in [gateway.models] with api = "own"'
"""What to do about something that the run's model cannot be asked."""


def unfit(what: str, param: str = "") -> Refused:
    """Return the refusal of something that does not map to a chat completion."""
    text = f"{what} does not map to a chat completion, which is what the run's model is asked for; {ELSEWHERE}"
    return Refused(text, status=400, code="unsupported", param=param)


def check_fields(body: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuse fields that have a value and are not known."""
    for name in body.keys() - set(known) - SAMPLING:
        if body[name] not in (None, False, [], {}):
            raise unfit(f"the field {name}", name)


def listed(value: Any, what: str) -> list[dict[str, Any]]:
    """Return a list of objects, as it is.

    Raises:
        Refused: It is none.
    """
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise Refused(f"{what} must be a list of objects", status=400, code="invalid_type")
    return value


def content_of(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return the content of a message: one text if the parts are nothing but texts, else the parts."""
    if all(part["type"] == "text" for part in parts):
        return "\n".join(str(part["text"]) for part in parts)
    return parts


def sampled(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that go to the model's server as they are."""
    return {name: body[name] for name in sorted(body.keys() & SAMPLING) if body[name] is not None}


def choice_of(completion: Mapping[str, Any]) -> dict[str, Any]:
    """Return the one choice of a completion, or of an event of a stream; empty if it has none."""
    choices = completion.get("choices") or [{}]
    found: dict[str, Any] = choices[0]
    return found


def error_in(data: str) -> str:
    """Return the message of an error in a stream, '' if the data is none."""
    try:
        error = json.loads(data).get("error")
    except (ValueError, AttributeError):
        return ""
    return str(error.get("message", error)) if isinstance(error, dict) else str(error or "")
