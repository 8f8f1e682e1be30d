"""How far a measurement is: in one line on a terminal, in rare lines elsewhere."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from agentrig.cli.progress import Progress


def test_a_terminal_gets_one_line_that_goes_away(capsys: pytest.CaptureFixture[str]) -> None:
    shown = Progress(2, terminal=True)
    for right in (True, None):
        shown(SimpleNamespace(correct=right))
    shown.clear()
    said = capsys.readouterr().err
    assert said == "\r  1 of 2 rollouts, 1 right\r  2 of 2 rollouts, 1 right\r\x1b[K"


def test_a_file_gets_a_line_each_half_minute(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("agentrig.cli.progress.time.monotonic", lambda: now[0])
    shown = Progress(90, terminal=False)
    for _ in range(90):
        now[0] += 1.0
        shown(SimpleNamespace(correct=True))
    shown.clear()
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"  {n} of 90 rollouts, {n} right" for n in (30, 60, 90)]
