"""Tests what `fake-accelerator` does."""

import pytest
from agentrig_fake_accelerator import Accelerator


def test_a_broken_accelerator_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_ACCELERATORS", "2")
    assert len(Accelerator().probe().devices) == 2
    monkeypatch.setenv("FAKE_ACCELERATORS", "two")
    (problem,) = Accelerator().probe().problems
    assert "export FAKE_ACCELERATORS=1" in problem
