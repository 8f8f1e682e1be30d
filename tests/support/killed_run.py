"""A training run in a process of its own, which a test may kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Run:
    """One run directory in a folder, trained by `python -m agentrig train` in a process of its own."""

    def __init__(self, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self.path, self.log = folder / "run", folder / "log.txt"
        self._environment = {**os.environ, **(environment or {}), "AGENTRIG_TEST_RUN": str(self.path)}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *words: str) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "agentrig", "train", *words],
                env=self._environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def lines(self) -> list[dict[str, Any]]:
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
        mark = f"AGENTRIG_TEST_RUN={self.path}".encode()
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
            except OSError:
                continue
        return found

    def tail(self) -> str:
        return self.log.read_text("utf-8", errors="replace")[-6000:]
