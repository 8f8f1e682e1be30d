"""A server in a process of its own: start, orders over a channel, end, and errors with the last lines of its log."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import psutil

from agentrig.errors import AgentrigError, OutOfMemory
from agentrig.processes.channel import Channel
from agentrig.processes.ends import ending
from agentrig.text import open_own

TAIL_BYTES = 1 << 16
POLL_S = 0.2
"""Seconds between two questions whether a server is ready, or lives."""

CAUSE = re.compile(r"\b(?:\w+\.)*\w*(?:Error|Exception): \S.*")
SECOND_HAND = "See root cause above"
LOOKED_THROUGH = 400
"""Lines of the log in which the cause of a server's end is looked for: some servers log many after it."""


class ServerError(AgentrigError):
    """A server could not be started, has died, or does not answer; the message ends with its last lines."""


class ServerOutOfMemory(ServerError, OutOfMemory):
    """A server's device has too little memory."""


class ServerProcess:
    """A running server.

    It leads a session of its own: Ctrl-C signals the terminal's whole process group, and a run needs its server until
    its end.

    Args:
        name: What messages call it, as `the LLM server`.
        command: The program and its arguments.
        first: The first message of a channel to it; its end of the channel is the last argument of the command. None
            for a server without one.
        log: File that its output is appended to; None for an unnamed one.
        environment: Its environment; None for this process's.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        first: Mapping[str, Any] | None = None,
        log: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self._log_path = name, log
        self._last_output = ""
        self._asking = threading.Lock()
        self._channel: Channel | None = None
        theirs: Channel | None = None
        if first is not None:
            self._channel, theirs = Channel.pair()
        descriptors = [] if theirs is None else [theirs.fileno()]
        try:
            self._log: IO[bytes] | None = _opened(log)
            self._begins_at = os.fstat(self._log.fileno()).st_size  # earlier lines are another launch's
        except OSError as error:
            raise ServerError(
                f"{name} cannot be started: its log {log} cannot be written: {error.strerror or error}. Move away what "
                "is there, or get write permission"
            ) from None
        try:
            self._process = subprocess.Popen(
                [*command, *map(str, descriptors)],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=descriptors,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            self._log.close()
            if self._channel is not None:
                self._channel.close()
            raise ServerError(f"{name} cannot be started: {error}") from error
        finally:
            if theirs is not None:
                theirs.close()
        if self._channel is not None and first is not None:
            with contextlib.suppress(OSError):  # it has died already: `receive` says so
                self._channel.send(first)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        return self._process.poll()

    def check(self) -> None:
        """Raise `ServerError` if it has died, or was stopped by a signal and so answers nothing."""
        if self.exit_status is not None:
            raise self._died("")
        with contextlib.suppress(psutil.Error):
            if psutil.Process(self.pid).status() == psutil.STATUS_STOPPED:
                stopped = "has been stopped by a signal (SIGSTOP) and answers nothing"
                raise ServerError(f"{self.name} (process {self.pid}) {stopped}")

    def ask(
        self, what: str, message: Mapping[str, Any], timeout_s: float, *, descriptor: int | None = None
    ) -> dict[str, Any]:
        """Send a message over the channel and return the answer; one thread at a time.

        Args:
            what: What the server is to do, for messages: `take new weights`.
            descriptor: An open file that goes with the message; it stays open here.

        Raises:
            ServerError: It has died, or does not answer in time: then it is stopped. Or its answer has an `error`.
        """
        with self._asking:
            if self._channel is not None:
                with contextlib.suppress(OSError):  # its end is closed: `receive` says so
                    self._channel.send(message, descriptor=descriptor)
            return self.receive(what, timeout_s)

    def receive(self, what: str, timeout_s: float) -> dict[str, Any]:
        """Return the next message of its channel; see `ask`."""
        if self._channel is None:
            raise ServerError(f"{self.name} is stopped: it cannot {what}")
        end = time.monotonic() + timeout_s
        try:
            while True:
                dead = self.exit_status is not None  # a child of its own may hold its end of the channel
                with contextlib.suppress(TimeoutError):
                    wait_s = 0.0 if dead else min(POLL_S, end - time.monotonic())
                    answer: dict[str, Any] = self._channel.receive(max(0.0, wait_s))[0]
                    if "error" in answer:
                        raise ServerError(f"{self.name} could not {what}: {answer['error']}{self._where()}")
                    return answer
                if dead:
                    raise EOFError
                if time.monotonic() > end:
                    break
        except (EOFError, OSError):
            self.wait(5.0)  # its end of the channel closes just before its exit status is known
            self.stop()
            raise self._died(f", asked to {what}") from None
        self.stop()
        raise ServerError(f"{self.name} did not {what} within {timeout_s:.0f} s{self.tail()}")

    def _died(self, asked: str) -> ServerError:
        cause = cause_in(self.tail(LOOKED_THROUGH))
        status = f"({ending(self.exit_status)})"
        return ServerError(f"{self.name} has died{asked} {status}{cause}{self._where()}{self.tail()}")

    def _where(self) -> str:
        return f"\n  its log: {self._log_path}" if self._log_path else ""

    def wait_until(self, ready: Callable[[], bool], timeout_s: float) -> None:
        """Return as soon as `ready()` is true; it is asked again and again while the server lives."""
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
        self._last_output = self._output()
        self._log.close()
        self._log = None
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def tail(self, lines: int = 15) -> str:
        """Return the last lines of its log, to be added to a message; '' if it wrote nothing."""
        last = self._output().splitlines()[-lines:]
        return "\n  the end of its output:\n  " + "\n  ".join(last) if last else ""

    def _output(self) -> str:
        if self._log is None:
            return self._last_output
        # Not by seek: the process shares the file's position.
        begin = max(self._begins_at, os.fstat(self._log.fileno()).st_size - TAIL_BYTES)
        return os.pread(self._log.fileno(), TAIL_BYTES, begin).decode(errors="replace")


def cause_in(lines: str) -> str:
    """Return `: ` and the last error in a log that does not only name an earlier one; '' if there is none."""
    found = [match[0] for line in lines.splitlines() if (match := CAUSE.search(line)) and SECOND_HAND not in line]
    return f": {found[-1]}" if found else ""


def _opened(log: Path | None) -> IO[bytes]:
    if log is None:
        return tempfile.TemporaryFile(prefix="agentrig-server-")
    log.parent.mkdir(parents=True, exist_ok=True)
    return open(open_own(log, os.O_RDWR | os.O_APPEND), "a+b")
