"""The pytest plugin: fixtures for the tests of plugins, and skipped checks as skipped tests.

pytest finds it by its entry point, in every environment that has agentrig. It imports what a fixture needs when a test
asks for it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from agentrig.testing.scripted import ScriptedServer
    from agentrig.traces import Trace


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
    """Report a check that does not apply as a skipped test, and a failed one by its message.

    The traceback is shown only if the component itself raised: otherwise it has agentrig's lines and no other.
    """
    from agentrig.errors import AgentrigError
    from agentrig.testing.subject import CheckFailed, CheckSkipped

    try:
        return (yield)
    except CheckSkipped as skipped:
        pytest.skip(str(skipped))
    except CheckFailed as failed:
        if not failed.check or not isinstance(failed.__cause__, AgentrigError | None):
            raise
        message = str(failed)
    pytest.fail(message, pytrace=False)  # outside of the block: pytest would show what was caught there, too


@pytest.fixture
def one_table_database(tmp_path: Path) -> Path:
    """A SQLite file with one table, `animal` (`agentrig.testing.databases`)."""
    from agentrig.testing.databases import one_table_database

    return one_table_database(tmp_path)


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    """The directory of a finished run of three steps (`agentrig.testing.run_directory.write_run`)."""
    from agentrig.testing.run_directory import write_run

    return write_run(tmp_path / "run", steps=3, held_out=8)


@pytest.fixture
def recorded_traces() -> dict[str, Trace]:
    """Traces of small agents of five frameworks, by framework (`agentrig.testing.recorded`)."""
    from agentrig.testing.recorded import recorded_traces

    return recorded_traces()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny random model with a tokenizer (`agentrig.testing.tiny_model`); skips without torch."""
    for needed in ("torch", "transformers"):
        pytest.importorskip(needed)
    from agentrig.testing.tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def scripted_server() -> Iterator[ScriptedServer]:
    """An OpenAI-compatible server that answers `ok`; set its `script` (`agentrig.testing.scripted`)."""
    from agentrig.testing.scripted import scripted_server

    with scripted_server() as server:
        yield server
