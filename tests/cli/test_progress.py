"""How far a measurement is: in one line on a terminal, in rare lines elsewhere."""

from __future__ import annotations

import re
import sys
import time
from types import SimpleNamespace

import pytest

from agentrig.cli.progress import READING_S, STARTING, STARTING_S, Progress, progress

RIGHT, WRONG = SimpleNamespace(correct=True), SimpleNamespace(correct=None)


def test_a_terminal_gets_one_line_that_goes_away(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress(2) as shown:
        for rollout in (None, RIGHT, WRONG):
            shown(rollout) if rollout else shown.begin()
            time.sleep(0.6)
    said = capsys.readouterr().err
    seen = re.findall(r"  (\S.*?)(?=[\x1b\r\n])", said)
    assert list(dict.fromkeys(seen))[-2:] == ["1 of 2 rollouts, 1 right", "2 of 2 rollouts, 1 right"]
    assert "  no rollout has ended yet: 0 s" in said
    assert said.endswith("\x1b[1A\x1b[2K"), "the line is gone"


@pytest.mark.parametrize(
    ("ends", "lines", "first_s"),
    [
        ([25, 60], [f"{STARTING}: 10 s", "no rollout has ended yet: 5 s", "1 of 2 rollouts, 1 right",
                    "2 of 2 rollouts, 2 right"], STARTING_S),
        ([1, 2], [], STARTING_S),
        ([14], [f"{STARTING}: 3 s", f"{STARTING}: 13 s", "1 of 1 rollout, 1 right"], READING_S),
        (range(1, 91), [f"{n} of 90 rollouts, {n} right" for n in (30, 60, 90)], STARTING_S),
    ],
)  # fmt: skip
def test_a_file_gets_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    ends: list[int],
    lines: list[str],
    first_s: float,
) -> None:
    now = [100.0]
    monkeypatch.setattr("agentrig.cli.progress.time.monotonic", lambda: now[0])
    shown = Progress(len(ends), first_s=first_s)

    def wait(seconds: float) -> bool:
        """Let a second go by, in which the rollouts begin or end; true once the last has ended."""
        if now[0] == 115 and len(ends) == 2:
            shown.begin()
        now[0] += seconds
        for _ in range(list(ends).count(int(now[0]) - 100)):
            shown(RIGHT)
        return now[0] - 100 >= max(ends)

    shown.tell(SimpleNamespace(wait=wait))  # type: ignore[arg-type]
    assert capsys.readouterr().err == "".join(f"  {line}\n" for line in lines)
