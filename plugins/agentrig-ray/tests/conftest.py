"""Fixtures for the tests of agentrig-ray: a Ray cluster of several nodes on this machine."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import Any

import pytest

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """A cluster whose head and first node have one CPU each; `add_node` and `remove_node` change it."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    logging.getLogger("ray").setLevel(logging.ERROR)
    head = {"num_cpus": 1, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        cluster.add_node(num_cpus=1)
        cluster._shutdown_at_exit = False  # of nodes that join: in other threads no signal handler can be set
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
