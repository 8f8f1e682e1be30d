"""What the validator says: the first error of a document, and whether single properties are right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jsonschema import Draft202012Validator


def first_error(schema: Mapping[str, Any], document: Any) -> str:
    """Return the first error as `PROPERTY: MESSAGE`, in the order of the schema's properties; '' if there is none.

    Missing properties come after wrong ones, and unexpected ones last.
    """
    order = {name: i for i, name in enumerate(schema["properties"])}

    def place(error: Any) -> tuple[int, int]:
        if error.path:
            return 0, order.get(str(error.path[0]), 0)
        missing = [i for name, i in order.items() if error.validator == "required" and f"'{name}'" in error.message]
        return (1, missing[0]) if missing else (2, 0)

    errors = sorted(Draft202012Validator(schema).iter_errors(document), key=place)
    if not errors:
        return ""
    where = f"{errors[0].path[0]}: " if errors[0].path else ""
    return f"{where}{errors[0].message}"


def is_right(rule: Mapping[str, Any], value: Any) -> bool:
    """Return whether a value fits the schema of its property."""
    return bool(Draft202012Validator(rule).is_valid(value))
