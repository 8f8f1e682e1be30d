"""Fixtures for the tests of agentrig-ray: a Ray cluster of several nodes on this machine."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")  # by default 15: too slow beside other work


@contextmanager
def cluster_of(*nodes: dict[str, Any]) -> Iterator[Any]:
    """Start a cluster: a head with one CPU, and nodes with one CPU each and what is given for them."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    logging.getLogger("ray").setLevel(logging.ERROR)
    head = {"num_cpus": 1, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for given in nodes:
            cluster.add_node(num_cpus=1, **given)
        cluster._shutdown_at_exit = False  # of nodes that join: in other threads no signal handler can be set
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """A cluster of a head and one node; `add_node` and `remove_node` change it."""
    with cluster_of({}) as cluster:
        yield cluster


@pytest.fixture
def apart() -> Iterator[Any]:
    """A cluster of three nodes that have different addresses, as on three machines."""
    with cluster_of({"node_ip_address": "127.0.0.2"}, {"node_ip_address": "127.0.0.3"}) as cluster:
        yield cluster
