"""Run files, recipes and overrides: read, merged, and checked against each plugin's config class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs


def setting(
    default: Any = attrs.NOTHING,
    *,
    help: str,  # noqa: A002  (the word that command lines use)
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    choices: Sequence[Any] | None = None,
    validator: Callable[[Any, Any, Any], None] | None = None,
) -> Any:
    """Declare one key of a component's config class, with its bounds.

    Args:
        default: The value when a run file does not set it; a callable default (`list`) is a factory.
        help: One line for the docs and for `agentrig plugins show`.
        ge: Smallest allowed value.
        gt: The value must be greater than this.
        le: Greatest allowed value.
        lt: The value must be less than this.
        choices: The only allowed values.
        validator: One more `attrs` validator.

    Returns:
        An `attrs.field`, to be used in a class decorated with `@attrs.frozen(kw_only=True)`.
    """
    v = attrs.validators
    checks: list[Any] = []
    for bound, check in ((ge, v.ge), (gt, v.gt), (le, v.le), (lt, v.lt)):
        if bound is not None:
            checks.append(v.optional(check(bound)))
    if choices is not None:
        checks.append(v.in_(list(choices)))
    if validator is not None:
        checks.append(validator)
    metadata = {"help": help, "choices": choices}
    if callable(default) and default is not attrs.NOTHING:
        return attrs.field(factory=default, validator=checks, metadata=metadata)
    return attrs.field(default=default, validator=checks, metadata=metadata)
