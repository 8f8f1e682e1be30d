"""A training run that is killed on the way and resumed; what is left is checked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ONE_UPDATE = ("algorithm.ppo_epochs=1", "algorithm.mini_batches=1", "algorithm.warmup_steps=0")
"""The ratios are then those of the server's log-probabilities to the learner's for the same weights."""


class Run:
    """One run directory, trained by `python -m agentrig train` in a process of its own.

    Args:
        folder: Where the run directory `run` and the log are made.
        environment: Variables to add.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self.path, self.log = folder / "run", folder / "log.txt"
        self.peak = 0
        self._environment = {**os.environ, **(environment or {}), "AGENTRIG_RANDOM_POLICY": str(self.path)}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *words: str) -> None:
        """Start `agentrig train` with these words."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "agentrig", "train", *words],
                env=self._environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def lines(self) -> list[dict[str, Any]]:
        """Return the lines of `metrics.jsonl`."""
        file = self.path / "metrics.jsonl"
        text = file.read_text("utf-8").split("\n") if file.is_file() else []
        return [json.loads(line) for line in text if line.endswith("}")]

    def wait_for_step(self, step: int, *, timeout_s: float) -> None:
        """Wait until a step's checkpoint is there; a run that ends before is an error."""
        self._wait(lambda: any((self.path / "checkpoints").glob(f"*{step:05d}/trainer/state.json")), timeout_s)

    def wait(self, *, timeout_s: float) -> None:
        """Wait for the end of the run; any exit status but 0 is an error."""
        self._wait(lambda: self._process is not None and self._process.poll() == 0, timeout_s)

    def _wait(self, done: Any, timeout_s: float) -> None:
        assert self._process is not None
        end = time.monotonic() + timeout_s
        while not done():
            status = self._process.poll()
            if status not in (None, 0) or (status == 0 and not done()) or time.monotonic() > end:
                self.kill()
                raise SystemExit(f"the run ended with status {status} or took too long\n{self.tail()}")
            self.peak = max(self.peak, sum(_resident(pid) for pid in self.members()))
            time.sleep(0.1)

    def kill(self) -> None:
        """Send SIGKILL to the run's main process, and wait until what it had started is gone too."""
        assert self._process is not None
        if self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait(timeout=30)
        self.wait_for_children()

    def wait_for_children(self, timeout_s: float = 30.0) -> None:
        """Wait until every process that the run started is gone; one that stays is killed, and an error."""
        end = time.monotonic() + timeout_s
        while left := self.members():
            if time.monotonic() > end:
                commands = [Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode() for pid in left]
                for pid in left:
                    os.kill(pid, signal.SIGKILL)
                raise SystemExit(f"processes outlived the run: {', '.join(commands)}")
            time.sleep(0.1)

    def members(self) -> list[int]:
        """Return the ids of the run's processes, found by a variable that all of them inherit."""
        mark = f"AGENTRIG_RANDOM_POLICY={self.path}".encode()
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
            except OSError:
                continue
        return found

    def tail(self) -> str:
        """Return the end of the run's output."""
        return self.log.read_text("utf-8", errors="replace")[-6000:]


def _resident(pid: int) -> int:
    """Return the memory that a process has for itself, bytes: resident less what it shares with files."""
    try:
        fields = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0
    return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")


def kill_and_resume(
    run: Run, words: Sequence[str], *, after: int, steps: int, pause_s: float, timeout_s: float
) -> list[dict[str, Any]]:
    """Train, kill the run `pause_s` seconds after a step's checkpoint, resume it, and check what is left.

    Args:
        run: Not started yet.
        words: For `agentrig train`.
        after: The step whose checkpoint is waited for.
        steps: That the run has in all.
        pause_s: Seconds to wait, so that the next step has begun.
        timeout_s: Longest wait for each half.

    Returns:
        The lines of the finished run's `metrics.jsonl`.
    """
    run.start(
        *words, *ONE_UPDATE, f"run.directory={run.path.parent}", f"run.name={run.path.name}", f"algorithm.steps={steps}"
    )
    run.wait_for_step(after, timeout_s=timeout_s)
    time.sleep(pause_s)
    run.kill()
    before = [line["step"] for line in run.lines()]
    if before != list(range(1, after + 1)):
        raise SystemExit(f"killed too late: steps {before} had ended")
    run.start("--resume", str(run.path))
    run.wait(timeout_s=timeout_s)
    lines = run.lines()
    if [line["step"] for line in lines] != list(range(1, steps + 1)):
        raise SystemExit(f"the steps are {[line['step'] for line in lines]}\n{run.tail()}")
    still = [line["step"] for line in lines if not line["algorithm"]["weight_change"] > 0]
    if still:
        raise SystemExit(f"the weights did not change in steps {still}")
    if not json.loads((run.path / "summary.json").read_text("utf-8"))["complete"]:
        raise SystemExit("summary.json does not say that the run is complete")
    run.wait_for_children()
    return lines


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the figures of each step as Markdown."""
    head = [
        "step",
        "s",
        "rollout s",
        "update s",
        "push s",
        "calls",
        "prompt tokens",
        "reply tokens",
        "reward",
        "ratio_max",
    ]
    rows = [head, ["---"] * len(head)]
    for line in lines:
        times, learned = line["time_s"], line["algorithm"]
        rows.append(
            [
                str(line["step"]),
                f"{line['step_s']:.1f}",
                *(f"{times.get(part, 0.0):.1f}" for part in ("rollout", "update", "push")),
                f"{line['transitions_per_rollout'] * line['rollouts']:.0f}",
                f"{line['prompt_tokens']:.0f}",
                f"{line['response_tokens']:.0f}",
                f"{line['reward']:.3f}",
                f"{learned['ratio_max']:.4f}",
            ]
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
