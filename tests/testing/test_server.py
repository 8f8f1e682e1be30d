"""The checks of a server: each catches its own fault and no other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from quick import quick_first

from agentrig.testing import check_server
from agentrig.testing.server import TABLE
from agentrig.testing.tiny_model import make_tiny_model

BROKEN = Path(__file__).parent / "broken" / "servers.py"
CHECKS = [declared.name.partition(".")[2] for declared in TABLE]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A tiny model, with one thread for torch: more only wait for each other."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield make_tiny_model(tmp_path_factory.mktemp("model"))
    torch.set_num_threads(threads)


@pytest.mark.parametrize("fault", quick_first(CHECKS, ("token-ids", "takes-weights")))
def test_each_fault_is_caught_by_its_own_check_alone(fault: str, model: Path) -> None:
    report = check_server(f"{BROKEN}:breaks-{fault}", raise_failed=False, model=model, end_s=1.0)
    assert [r.check for r in report.failed] == [f"server.{fault}"], report
    assert "what to do: " in report.failed[0].message
