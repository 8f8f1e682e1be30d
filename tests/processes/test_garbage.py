import gc
import subprocess
import sys

import pytest

from agentrig.processes.garbage import loading


@pytest.fixture(autouse=True)
def collecting():
    yield
    gc.unfreeze()
    gc.enable()


def test_nothing_is_collected_while_libraries_load():
    often = gc.get_threshold()
    with loading() as loaded:
        assert not gc.isenabled()
        loaded()
        assert gc.isenabled()
        assert gc.get_threshold()[0] > often[0]
        assert gc.get_freeze_count() > 1000
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    assert gc.get_threshold() == often


def test_a_run_that_never_begins_leaves_collections_as_they_were():
    with pytest.raises(ZeroDivisionError), loading():
        _ = 1 / 0
    assert gc.isenabled()


def test_who_has_turned_collections_off_keeps_them_off():
    gc.disable()
    with loading() as loaded:
        loaded()
        assert not gc.isenabled()
    assert not gc.isenabled()


def test_a_command_ends_without_a_last_search():
    plain = "class Part:\n  def __del__(self): print('searched', flush=True)\npart = Part(); part.own = part; del part"
    assert "searched" in _said(plain), "Python itself searches at the exit"
    command = "import agentrig.cli.entry as e\ne.main(['plugins'], standalone_mode=False)"
    said = _said(f"{plain.removesuffix('; del part')}\n{command}\ndel part")
    assert "langgraph-sql" in said
    assert "searched" not in said


def _said(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
