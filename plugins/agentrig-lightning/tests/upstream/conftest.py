"""The checkout of Agent Lightning 0.3.0 that these tests run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

CHECKOUT = "AGENTRIG_AGENT_LIGHTNING"


@pytest.fixture(scope="module")
def checkout() -> Path:
    """The checkout of Agent Lightning 0.3.0; skips if none is named."""
    named = os.environ.get(CHECKOUT)
    if not named:
        pytest.skip(f"{CHECKOUT} does not name a checkout of Agent Lightning 0.3.0")
    assert (Path(named) / "examples" / "spider" / "sql_agent.py").is_file(), f"{CHECKOUT}={named} has no examples"
    return Path(named)
