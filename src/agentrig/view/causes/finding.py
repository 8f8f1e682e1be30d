"""Findings about a run: what is fine, what to know, and what held learning back."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs

STOPPED = ("KeyboardInterrupt", "Interrupted")
"""The errors of a run that its user, or a signal, has stopped."""


@attrs.frozen
class Finding:
    """One finding.

    Attributes:
        level: `ok`; `fact`: neither good nor bad; `warn`: know this before you trust the run; `problem`: it held
            learning back.
        cause: A problem's short name, the same in every run; empty for other findings.
        count: How often it was seen.
        unit: What is counted, in the plural, such as `rollouts`.
        since: The first step in which it was seen; None if that is not known.
        settings: The keys to change, the most likely first.
        lost: Share of what could have been learned from that it takes away, 0 to 1.
        explains: Causes that follow from this one.
        follows: The cause that it follows from, if that was found too.
        ended: Whether it ended the run.
    """

    level: Literal["ok", "fact", "warn", "problem"]
    text: str
    cause: str = attrs.field(default="", kw_only=True)
    count: int | None = attrs.field(default=None, kw_only=True)
    of: int | None = attrs.field(default=None, kw_only=True)
    unit: str = attrs.field(default="", kw_only=True)
    since: int | None = attrs.field(default=None, kw_only=True)
    settings: Sequence[str] = attrs.field(default=(), kw_only=True)
    advice: str = attrs.field(default="", kw_only=True)
    lost: float = attrs.field(default=0.0, kw_only=True)
    explains: Sequence[str] = attrs.field(default=(), kw_only=True)
    follows: str = attrs.field(default="", kw_only=True)
    ended: bool = attrs.field(default=False, kw_only=True)


def problem(cause: str, text: str, *, seen: tuple[int, int, str], lost: float | None = None, **more: Any) -> Finding:
    """Return a finding of the level `problem`; `seen` is how often, of how many, and of what."""
    count, of, unit = seen
    lost = count / max(1, of) if lost is None else lost
    return Finding("problem", text, cause=cause, count=count, of=of, unit=unit, lost=lost, **more)


def audited_at(error: Mapping[str, Any]) -> int | None:
    """Return the step in which the auditor found the fault that ended a run; None if it was another error."""
    found = re.match(r"step (\d+): the audit found", str(error.get("message") or ""))
    return int(found[1]) if found and error.get("cause") == "audit" else None
