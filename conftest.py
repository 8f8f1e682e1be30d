"""How tests share a machine: workers take whole files, and a test marked `alone` runs while no other test does."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent

# Workers have more threads than the machine has cores. OpenMP's would wait by spinning, at the cost of the others.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@pytest.fixture(autouse=True)
def own_plugin_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Forget the folders and modules of a test's plugin files: a command is a process of its own, a test is not."""
    path, base = list(sys.path), str(tmp_path_factory.getbasetemp())
    yield
    if sys.path != path:
        places = (base, str(ROOT / "examples"))
        sys.path[:] = [folder for folder in sys.path if folder in path or not folder.startswith(places)]
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None) or "").startswith(base):
                del sys.modules[name]


def is_alone(item: pytest.Item) -> bool:
    """Whether a test is marked `alone`."""
    return item.get_closest_marker("alone") is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files with such tests last, so that a worker seldom waits for another's long test."""
    last = {item.path for item in items if is_alone(item)}
    items.sort(key=lambda item: item.path in last)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Hold a lock that all tests of this checkout share, and that a test marked `alone` holds for itself."""
    # A test keeps its turn while it waits, so that tests that start later cannot delay a test that must be alone.
    with (ROOT / "pyproject.toml").open() as turn, (ROOT / "conftest.py").open() as tests:
        fcntl.flock(turn, fcntl.LOCK_EX)
        fcntl.flock(tests, fcntl.LOCK_EX if is_alone(item) else fcntl.LOCK_SH)
        fcntl.flock(turn, fcntl.LOCK_UN)
        try:
            return (yield)
        finally:
            fcntl.flock(tests, fcntl.LOCK_UN)
