"""Every key has an effect: each key of each first-party component gets two values, and its effect is checked."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from effects import Elsewhere, Flip, configs, grpo_learning, keys
from effects.tables import ENTRIES, OF_RUNS, TABLES

QUICK = [entry for entry in ENTRIES if entry not in OF_RUNS]  # tests/proofs/test_keys_of_runs.py has the others


def test_every_key_has_an_entry_and_every_entry_a_key() -> None:
    assert TABLES.keys() <= configs().keys()
    missing, gone = keys() - ENTRIES.keys(), ENTRIES.keys() - keys()
    assert not missing, f"new keys need an entry in tests/support/effects: {sorted(missing)}"
    assert not gone, f"these keys are no longer there: {sorted(gone)}"


@pytest.mark.parametrize(("place", "key"), [pytest.param(*e, id=f"{e[0]}.{e[1]}") for e in QUICK])
def test_a_key_has_its_documented_effect(place: str, key: str) -> None:
    ENTRIES[place, key].check(place, key)


def test_a_key_without_an_effect_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    class Deaf(grpo_learning.Learner):
        """A learner that ignores the learning rate."""

        def __init__(self, model: Any, config: Any, **more: Any) -> None:
            super().__init__(model, attrs.evolve(config, lr=1e-3), **more)

    monkeypatch.setattr(grpo_learning, "_LEARNED", {})
    monkeypatch.setattr(grpo_learning, "Learner", Deaf)
    with pytest.raises(AssertionError, match=r"algorithm\.grpo lr does not do what it says"):
        ENTRIES["algorithm.grpo", "lr"].check("algorithm.grpo", "lr")


def test_an_entry_that_proves_nothing_fails() -> None:
    blind = Flip(a=1e-4, b=1e-3, look=lambda settings: settings["lr"], shows=lambda a, b: True)
    with pytest.raises(AssertionError, match="would pass for a key without an effect"):
        blind.check("algorithm.grpo", "lr")
    with pytest.raises(AssertionError, match="there is no test"):
        Elsewhere("tests/proofs/test_keys.py::test_nothing", "it is gone").check("algorithm.grpo", "lr")
