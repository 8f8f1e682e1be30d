"""A server in a process of its own: started, waited for, ended, and the last lines of its log for its errors."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from agentrig.errors import AgentrigError

TAIL_BYTES = 1 << 16
POLL_S = 0.2
"""Seconds between two questions whether a server is ready."""


class ServerError(AgentrigError):
    """A server could not be started, has died, or does not answer; the message ends with its last lines."""


class ServerProcess:
    """A running server.

    It leads a session of its own: Ctrl-C signals the terminal's whole process group, and a run needs its server until
    its end.

    Args:
        name: What messages call it, as `the LLM server`.
        command: The program and its arguments.
        log: File that its output is appended to; None for an unnamed one.
        environment: Its environment; None for this process's.
        descriptors: Open files that it inherits.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log: Path | None = None,
        environment: Mapping[str, str] | None = None,
        descriptors: Sequence[int] = (),
    ) -> None:
        self.name = name
        self._last_output = ""
        self._log: IO[bytes] | None = _opened(log)
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=tuple(descriptors),
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            self._log.close()
            raise ServerError(f"{name} cannot be started: {error}") from error

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        return self._process.poll()

    def check(self) -> None:
        """Raise `ServerError` if it has died."""
        if self.exit_status is not None:
            raise ServerError(f"{self.name} has died (exit status {self.exit_status}){self.tail()}")

    def wait_until(self, ready: Callable[[], bool], timeout_s: float) -> None:
        """Return as soon as `ready()` is true; it is asked again and again while the server lives.

        Raises:
            ServerError: It died, or was not ready in time.
        """
        end = time.monotonic() + timeout_s
        while True:
            self.check()
            if ready():
                return
            if time.monotonic() > end:
                raise ServerError(f"{self.name} did not start within {timeout_s:g} s{self.tail()}")
            time.sleep(POLL_S)

    def wait(self, timeout_s: float) -> int | None:
        """Wait for its end, at most so long; return its exit status, None if it still runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return self.exit_status

    def stop(self, grace_s: float = 0.0) -> None:
        """End it and what it has started; harmless when it has ended.

        Args:
            grace_s: How long it may take to end by itself after SIGTERM; 0 kills it at once.
        """
        if self._log is None:  # stopped before
            return
        if self.exit_status is None and grace_s > 0:
            self._process.terminate()
            self.wait(grace_s)
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: PermissionError for a zombie
            os.killpg(self.pid, signal.SIGKILL)  # its own group: what it started would outlive it
        self._process.wait()
        self._last_output = self.tail()
        self._log.close()
        self._log = None

    def tail(self, lines: int = 15) -> str:
        """Return the last lines of its log, to be added to a message; '' if it wrote nothing."""
        if self._log is None:
            return self._last_output
        # Not by seek: the process shares the file's position.
        size = os.fstat(self._log.fileno()).st_size
        text = os.pread(self._log.fileno(), TAIL_BYTES, max(0, size - TAIL_BYTES)).decode(errors="replace")
        last = text.splitlines()[-lines:]
        return "\n  the end of its output:\n  " + "\n  ".join(last) if last else ""


def _opened(log: Path | None) -> IO[bytes]:
    if log is None:
        return tempfile.TemporaryFile(prefix="agentrig-server-")
    log.parent.mkdir(parents=True, exist_ok=True)
    return log.open("a+b")
