"""The task set's own solver: what a right repair of one error is."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from agentrig_json_repair.validation import first_error, is_right


def solved(schema: Mapping[str, Any], document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document with all errors repaired."""
    found = dict(document)
    while first_error(schema, found):
        found = patched(found, patch(schema, found))
    return found


def patch(schema: Mapping[str, Any], document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the merge patch that repairs the document's first error, in the order of `first_error`."""
    rules = schema["properties"]
    wrong = [name for name in rules if name in document and not is_right(rules[name], document[name])]
    missing = [name for name in rules if name not in document]
    if wrong or missing:
        name = (wrong or missing)[0]
        return {name: _right(rules[name], document.get(name))}
    return dict.fromkeys([name for name in document if name not in rules], None)


def patched(document: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a flat document with a merge patch applied (RFC 7396): null removes a property."""
    return {name: value for name, value in {**document, **changes}.items() if value is not None}


def _right(rule: Mapping[str, Any], value: Any) -> Any:
    """Return the value of a property that is nearest to a wrong one."""
    if "enum" in rule:
        text = str(value).lower()
        return (difflib.get_close_matches(text, rule["enum"], n=1) or rule["enum"])[0]
    if rule["type"] == "integer":
        number = int(value) if str(value).lstrip("-").isdigit() else rule["minimum"]
        return min(max(number, rule["minimum"]), rule["maximum"])
    if rule["type"] == "boolean":
        return str(value).lower() == "true"
    return "" if value is None else str(value)
