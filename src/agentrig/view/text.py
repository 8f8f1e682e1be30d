"""Formats the numbers of a report."""

from __future__ import annotations

from typing import Any

from agentrig.figures import NOTHING, number


def plain(value: float | None, digits: int) -> str:
    """Return a number with `digits` decimals; a dash for None."""
    return NOTHING if value is None else f"{value:.{digits}f}"


def count(value: Any) -> str:
    """Return a whole number with thousands separators."""
    found = number(value)
    return NOTHING if found is None else f"{int(found):,}".replace(",", "\u2009")


def duration(seconds: float) -> str:
    """Return `3 ms`, `45 s`, `8 min 12 s` or `13 h 4 min`."""
    if seconds < 0.1:
        return f"{max(0.0, 1000 * seconds):.0f} ms"
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def figure(value: float | None) -> str:
    """Return a number with three significant digits; large ones as whole numbers."""
    if value is None:
        return NOTHING
    return count(round(value)) if abs(value) >= 1000 else f"{value:.3g}"
