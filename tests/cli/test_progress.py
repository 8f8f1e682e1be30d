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


@pytest.mark.parametrize("terminal", [True, False])
def test_the_seconds_before_the_first_rollout_are_counted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    now = [80.0]
    monkeypatch.setattr("agentrig.cli.progress.time.monotonic", lambda: now[0])
    shown = Progress(2, terminal=terminal)

    def sleep(seconds: float) -> bool:
        now[0] += seconds
        if now[0] == 100:
            shown.begin()
        if now[0] >= 120:
            shown(SimpleNamespace(correct=True))
        return False

    shown.wait(SimpleNamespace(wait=sleep))  # type: ignore[arg-type]
    said = capsys.readouterr().err
    if terminal:
        assert said.startswith("\r  starting: 1 s\r  starting: 2 s")
        assert "\r  no rollout has ended yet: 0 s\r  no rollout has ended yet: 1 s" in said
        assert said.endswith(" 19 s\r\x1b[K\r  1 of 2 rollouts, 1 right")
    else:
        first = "  1 of 2 rollouts, 1 right\n"
        assert said == "  starting: 10 s\n  no rollout has ended yet: 0 s\n  no rollout has ended yet: 10 s\n" + first
        shown(SimpleNamespace(correct=None))
        shown.clear()
        assert capsys.readouterr().err == "  2 of 2 rollouts, 1 right\n"


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
