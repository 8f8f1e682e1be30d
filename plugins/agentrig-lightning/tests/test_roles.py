"""Variables of Agent Lightning for a run on several machines are honoured, or refused with a message."""

from __future__ import annotations

import pytest
from agentrig_lightning.joining import LightningRunners, wanted, with_roles

from agentrig.errors import ConfigError
from agentrig.plan import resolve


@pytest.mark.parametrize(
    ("environment", "runners", "store", "n"),
    [
        ({}, "processes", "127.0.0.1:4747", 2),
        ({"AGL_CURRENT_ROLE": "both"}, "processes", "127.0.0.1:4747", 2),
        ({"AGL_CURRENT_ROLE": "algorithm"}, "lightning", "127.0.0.1:4747", 0),
        ({"AGL_SERVER_PORT": "9000"}, "lightning", "127.0.0.1:9000", 2),
        ({"AGL_SERVER_HOST": "10.0.0.5", "AGL_CURRENT_ROLE": "algorithm"}, "lightning", "10.0.0.5:4747", 0),
    ],
)
def test_a_role_is_honoured(
    environment: dict[str, str], runners: str, store: str, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variables choose the runners `lightning`, unless the run names others."""
    asked = with_roles(LightningRunners(), environment)
    assert (asked.store, asked.n) == (store, n)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert resolve("mini").components["runners"].spec.name == runners
    assert resolve("mini", uses={"runners": "processes"}).components["runners"].spec.name == "processes"


def test_the_run_s_own_address_counts_more() -> None:
    own = LightningRunners(store="127.0.0.1:1")
    assert with_roles(own, {"AGL_SERVER_PORT": "9000"}).store == "127.0.0.1:1"


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        ({"AGL_CURRENT_ROLE": "runner", "AGL_SERVER_PORT": "9000"}, "agentrig runner --store http://127.0.0.1:9000"),
        ({"AGL_CURRENT_ROLE": "boss"}, "none of algorithm, runner, both"),
        ({"AGL_SERVER_PORT": "x"}, "no port"),
        ({"AGL_MANAGED_STORE": "false"}, "a store of its own"),
    ],
)
def test_what_train_cannot_be_is_refused(environment: dict[str, str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        with_roles(LightningRunners(), environment)
    assert wanted(environment), "else nobody says it"
