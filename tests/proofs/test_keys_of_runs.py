"""Keys whose effect takes seconds to show: in whole runs and served models, which these tests share, or in time."""

from __future__ import annotations

import pytest
from effects.tables import ENTRIES, OF_RUNS


@pytest.mark.slow
@pytest.mark.parametrize(("place", "key"), [pytest.param(*e, id=f"{e[0]}.{e[1]}") for e in OF_RUNS])
def test_a_key_has_its_documented_effect(place: str, key: str) -> None:
    ENTRIES[place, key].check(place, key)
