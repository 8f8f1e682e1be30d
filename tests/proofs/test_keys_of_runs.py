"""Keys whose effect shows in whole runs and in served models, which the tests of this file share."""

from __future__ import annotations

import pytest
from effects.tables import ENTRIES, OF_RUNS


@pytest.mark.parametrize(("place", "key"), [pytest.param(*e, id=f"{e[0]}.{e[1]}") for e in OF_RUNS])
def test_a_key_has_its_documented_effect(place: str, key: str) -> None:
    ENTRIES[place, key].check(place, key)
