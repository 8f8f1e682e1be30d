"""The kit's entrances: a list of checks for pytest, and a report of all checks of one component."""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from agentrig.errors import ConfigError, nearest
from agentrig.testing.checks import Check, Report
from agentrig.testing.table import Table

CHECKED: Sequence[str] = (
    "tasks",
    "agent",
    "reward",
    "adapter",
    "algorithm",
    "server",
    "hardware",
    "runners",
    "observer",
    "recipe",
)
"""The kinds that have checks; the module of each is `agentrig.testing.KIND`, with its `TABLE`."""


def table_of(kind: str) -> Table[Any]:
    """Return the table of a kind's checks.

    Raises:
        ConfigError: There are no checks of that kind.
    """
    if kind not in CHECKED:
        raise ConfigError(f'there are no checks of a "{kind}".{nearest(kind, CHECKED)} Kinds: {", ".join(CHECKED)}')
    table: Table[Any] = import_module(f"agentrig.testing.{kind}").TABLE
    return table


def checks(
    kind: str, subject: Any, *, settings: Any = None, only: Sequence[str] | None = None, **options: Any
) -> list[Check]:
    """Return the checks of a component, for `pytest.mark.parametrize`. The component is loaded by the first one.

    Args:
        kind: The component's kind: `reward`, `agent` …
        subject: The name of an installed component, `FILE.py:name`, its spec, or the component itself.
        settings: Its keys, as in a run file.
        only: Names of checks, with or without the kind, or patterns (`same-*`); None for all.
        options: The options of this kind's checks (docs/tutorials/publish-it.md).

    Raises:
        ConfigError: There is no such kind, check or option.

    Example:
        ```python
        @pytest.mark.parametrize("check", checks("reward", "my-reward"), ids=str)
        def test_reward(check):
            check()
        ```
    """
    table = table_of(kind)
    bench = table.open(subject, settings, options)
    atexit.register(bench.close)  # pytest calls the checks one by one: nobody says when the last one has ended
    return table.made(bench, only)


def check(
    kind: str,
    subject: Any,
    *,
    settings: Any = None,
    only: Sequence[str] | None = None,
    raise_failed: bool = True,
    **options: Any,
) -> Report:
    """Run the checks of a component and return the report; `check_reward` and the others are this, for one kind.

    Args:
        kind: The component's kind.
        subject: See `checks`.
        settings: See `checks`.
        only: See `checks`.
        raise_failed: Whether a failed check raises `ChecksFailed`, with the whole table.
        options: See `checks`.

    Raises:
        ChecksFailed: A check failed.
        ConfigError: There is no such kind, check or option.
    """
    return table_of(kind).check_all(subject, settings, only, raise_failed, options)
