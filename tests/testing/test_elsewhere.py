"""Another process: what it says of a component that breaks it."""

from __future__ import annotations

import os
import subprocess

import psutil
import pytest

from agentrig.testing.elsewhere import EndedElsewhere, elsewhere


def test_a_component_that_closes_descriptors_is_named_without_a_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(EndedElsewhere, match="closed descriptors that it did not open"):
        elsewhere(os.closerange, 3, 256)
    assert "Traceback" not in capfd.readouterr().err


def test_what_a_component_started_is_ended_in_a_session_of_its_own_too() -> None:
    left = elsewhere(lambda: subprocess.Popen(["sleep", "60"], start_new_session=True).pid)
    assert not psutil.pid_exists(left) or psutil.Process(left).status() == psutil.STATUS_ZOMBIE
