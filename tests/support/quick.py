"""Parameters of which few run by default."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def quick_first(names: Iterable[str], quick: Collection[str]) -> list[Any]:
    """Return the parameters of a test; those that are not quick get the mark `slow`."""
    return [pytest.param(name, id=name, marks=() if name in quick else pytest.mark.slow) for name in names]
