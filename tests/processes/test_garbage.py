import gc
import subprocess
import sys

import pytest

from agentrig.processes.garbage import LOADING, loading, settle


def full_collections():
    return gc.get_stats()[2]["collections"]


def test_libraries_load_without_a_full_collection_and_are_left_out_of_later_ones():
    before, many = gc.get_threshold(), 400_000
    gc.collect()
    with loading():
        so_far = full_collections()
        kept = [[] for _ in range(many)]
        assert full_collections() == so_far
        settle()
        assert gc.get_freeze_count() >= many
        assert gc.get_threshold()[0] > before[0]
    assert gc.get_freeze_count() == 0
    assert gc.get_threshold() == before
    assert len(kept) == many


def test_a_run_that_never_begins_leaves_collections_as_they_were():
    before = gc.get_threshold()
    with pytest.raises(ZeroDivisionError), loading():
        _ = 1 / 0
    assert gc.get_threshold() == before
    assert gc.isenabled()


def test_a_run_that_never_begins_collects_nevertheless():
    with loading():
        so_far = gc.get_stats()[0]["collections"]
        kept = [[] for _ in range(3 * LOADING)]
        assert gc.get_stats()[0]["collections"] > so_far
    assert kept


def test_a_command_ends_without_a_last_search():
    plain = "class Part:\n  def __del__(self): print('searched', flush=True)\npart = Part(); part.own = part; del part"
    assert "searched" in _said(plain), "Python itself searches at the exit"
    command = "import agentrig.cli.entry as e\ne.main(['plugins'], standalone_mode=False)"
    said = _said(f"{plain.removesuffix('; del part')}\n{command}\ndel part")
    assert "langgraph-sql" in said
    assert "searched" not in said


def _said(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
