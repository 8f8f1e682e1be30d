"""How tests share a machine, and which slow tests `--touched` adds.

Workers take whole files, and a test marked `alone` runs while no other test does.
"""

from __future__ import annotations

import fcntl
import gc
import importlib.metadata
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent

# Hundreds of processes import agentrig. Each would compile it again where the environment says to write no byte code.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Each HTTP client reads every certificate authority of the machine: 10 ms of CPU in each of thousands of calls. No test
# asks a server over TLS; programs that download get the variable's own value, see tests/support/downloads.py.
os.environ.setdefault("OWN_SSL_CERT_FILE", os.environ.get("SSL_CERT_FILE", ""))
os.environ["SSL_CERT_FILE"] = str(ROOT / "tests" / "support" / "nobody.pem")
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


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Search for no cycles while hundreds of thousands of objects are made that stay, nor among these later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True, scope="session")
def shared_plugins() -> None:
    """Let the process that runners are forked from import the plugins; else each of hundreds of runners does."""
    from agentrig.plugins.loading import GROUP
    from agentrig.runners import processes

    processes.PRELOAD += tuple(point.module for point in importlib.metadata.entry_points(group=GROUP))


def is_alone(item: pytest.Item) -> bool:
    """Whether a test is marked `alone`."""
    return item.get_closest_marker("alone") is not None


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--touched`, which `.ci/run` uses."""
    text = "with the slow tests of the code that changed: since $CI_BASE, or in the last three hours of commits"
    parser.addoption("--touched", action="store_true", help=text)


def is_slow(item: pytest.Item) -> bool:
    """Whether a test is marked `slow`."""
    return item.get_closest_marker("slow") is not None


def is_longer(item: pytest.Item) -> bool:
    """Whether a test may take more time than others."""
    own = item.get_closest_marker("timeout")
    return own is not None and own.args[0] > float(item.config.getini("timeout"))


def changed_files() -> list[str]:
    """Return the files that changed between `$CI_BASE` and HEAD; without it, in the three hours before HEAD's date."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout

    if base := os.environ.get("CI_BASE"):
        return git("diff", "--name-only", f"{base}...HEAD").split("\n")
    since = int(git("log", "-1", "--format=%ct")) - 3 * 3600
    return git("log", f"--since={since}", "--name-only", "--format=").split("\n")


def tests_of(file: str) -> str:
    """Return what the paths of a file's tests begin with: `tests/` mirrors `src/agentrig/`, a plugin has its own."""
    parts = file.split("/")
    if parts[0] == "plugins":
        return f"plugins/{parts[1]}/tests/"
    if parts[:2] == ["src", "agentrig"]:
        return f"tests/{parts[2]}/" if len(parts) > 3 else f"tests/test_{parts[2]}"
    return "tests/docs/" if parts[0] == "docs" else file


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose the slow tests of `--touched`; put them last, and after them those that are `alone`.

    So a worker seldom waits for another's long test.
    """
    if config.getoption("--touched"):
        places = tuple({tests_of(file) for file in changed_files() if file})
        left_out = [
            i for i in items if is_slow(i) and (is_longer(i) or not str(i.path.relative_to(ROOT)).startswith(places))
        ]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
        config.option.markexpr = ""  # the default is "not slow"
    alone = {item.path for item in items if is_alone(item)}
    items.sort(key=lambda item: (item.path in alone, is_slow(item)))


SLOW_S = 10.0  # what each worker may spend on the slow tests of `--touched`, and one test more
spent_s = 0.0


def is_bounded(item: pytest.Item) -> bool:
    """Whether a test counts against `SLOW_S`."""
    return item.config.getoption("--touched") and is_slow(item)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a slow test when this worker has spent its time for them."""
    if is_bounded(item) and spent_s > SLOW_S:
        pytest.skip(f"{spent_s:.0f} s of slow tests have run on this worker; `make test-slow` runs all")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Hold a lock that all tests of this checkout share, and that a test marked `alone` holds for itself.

    Count the time of slow tests.
    """
    global spent_s
    # A test keeps its turn while it waits, so that tests that start later cannot delay a test that must be alone.
    with (ROOT / "pyproject.toml").open() as turn, (ROOT / "conftest.py").open() as tests:
        fcntl.flock(turn, fcntl.LOCK_EX)
        fcntl.flock(tests, fcntl.LOCK_EX if is_alone(item) else fcntl.LOCK_SH)
        fcntl.flock(turn, fcntl.LOCK_UN)
        start = time.monotonic()
        try:
            return (yield)
        finally:
            spent_s += (time.monotonic() - start) * is_bounded(item)
            fcntl.flock(tests, fcntl.LOCK_UN)
