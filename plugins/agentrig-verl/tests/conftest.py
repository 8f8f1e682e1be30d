"""Settings and fixtures for the tests of agentrig-verl."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def needs_verl():
    """Skip where the parts of the GPU stack that run on a CPU are not installed."""
    for name in ("verl", "ray", "transfer_queue", "tensordict", "hydra"):
        pytest.importorskip(name, reason=f"{name} is not installed; docs/gpu.md names what to install for these tests")
