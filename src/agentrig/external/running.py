"""Runs a program under its supervisor: what it wrote, how it ended, and that nothing of it is left."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

import attrs

from agentrig.external.config import CommandConfig
from agentrig.processes import supervisor
from agentrig.processes.ends import signal_name
from agentrig.processes.families import marked
from agentrig.text import storable

SUPERVISOR = Path(supervisor.__file__)

MARK = "AGENTRIG_PROGRAM"
"""Environment variable that identifies the rollout that started a process."""

LOOK_S = 0.2
"""Seconds between two calls of `finished`."""

DRAIN_S = 2.0
"""How long to read what is left in the pipes after the end, seconds; the writers are dead."""

LINGER_S = 5.0
"""How long a program may go on after `finished`, seconds."""

TAIL = 64 << 10
"""Bytes of stderr that are kept: half from its start, half from its end."""

TOLD = 500
"""Characters of the end of stderr in a message."""

MIB = 1 << 20


@attrs.frozen(kw_only=True)
class Ending:
    """How a program ended.

    Attributes:
        status: Its exit code; negative for the signal that killed it.
        exceeded: The limit that ended it (`time`, `memory`, `disk`, `processes`, `output`); `stopped` if it went on
            after its answer; '' if it ended by itself.
        observed: What was measured against that limit: seconds, bytes or processes.
        left: How many processes it left when it ended; they were killed.
        stdout: All that it wrote there.
        stderr: The same; the middle of a long text is missing.
        seconds: Wall time.
        cpu_s: CPU seconds of all its processes; 0 in a container.
        peak_mb: Most memory at once, MiB; in a container as the looks at its limit saw it.
    """

    status: int
    exceeded: str
    observed: float
    left: int
    stdout: bytes = attrs.field(repr=False)
    stderr: bytes = attrs.field(repr=False)
    seconds: float
    cpu_s: float
    peak_mb: float


@attrs.frozen(kw_only=True)
class Container:
    """The container that a program runs in.

    Attributes:
        id_file: Where docker or podman writes its id.
        remove: The command that removes it, whether it runs or not.
        out_of_memory: The command that writes `true` if a process of it was ended because its memory was too small.
    """

    id_file: str
    remove: Sequence[str]
    out_of_memory: Sequence[str]


class CannotStart(Exception):
    """A program cannot be started; the message says why."""


class SupervisionFailed(Exception):
    """Processes of a program could not be killed, or its supervisor failed; neither is the program's fault."""


class _Tail:
    """The start and the end of a stream, and its length."""

    def __init__(self, keep: int | None) -> None:
        self.keep, self.length = keep, 0
        self._head, self._tail = bytearray(), bytearray()

    def add(self, data: bytes) -> None:
        self.length += len(data)
        if self.keep is None:
            self._head += data
            return
        room = max(0, self.keep // 2 - len(self._head))
        self._head += data[:room]
        self._tail += data[room:]
        del self._tail[: max(0, len(self._tail) - self.keep // 2)]

    def text(self) -> bytes:
        missing = self.length - len(self._head) - len(self._tail)
        middle = f"\n… ({missing} bytes are left out) …\n".encode() if missing else b""
        return bytes(self._head) + middle + bytes(self._tail)


def run(
    words: Sequence[str],
    *,
    container: Container | None = None,
    folder: Path,
    environment: Mapping[str, str],
    stdin: bytes,
    limits: CommandConfig,
    finished: Callable[[], bool] = lambda: False,
) -> Ending:
    """Run a program to its end; when this returns, no process of it is left.

    Args:
        words: The program and its arguments.
        container: What `words` run it in, if that is one; it is removed too.
        folder: Its working directory, whose size is limited.
        environment: All its variables.
        stdin: What it can read there.
        limits: What it may use: seconds, MiB and processes.
        finished: Whether its work is done, asked several times a second: it then ends within `LINGER_S`.

    Raises:
        CannotStart: There is no such program, or it cannot be executed.
        SupervisionFailed: A process does not die, or the supervisor ended without a report.
    """
    mark = uuid.uuid4().hex
    ours, theirs = socket.socketpair()
    sizes = (limits.time_s, limits.memory_mb * MIB, limits.disk_mb * MIB, limits.processes)
    supervisor = [sys.executable, "-I", "-S", str(SUPERVISOR), str(theirs.fileno()), *map(str, sizes), str(folder)]
    supervisor += [json.dumps(attrs.asdict(container)) if container is not None else ""]
    start = time.monotonic()
    try:
        with ours, theirs, _input(stdin) as given:
            process = subprocess.Popen(
                [*supervisor, *words],
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                cwd=folder,
                env={**environment, MARK: mark},
                start_new_session=True,
            )
            theirs.close()
            ending = _Run(process, ours, limits.output_mb, finished).ending()
    except OSError as error:
        raise CannotStart(_reason(words, error)) from error
    report, stdout, stderr = ending
    if not report:
        for orphan in marked(MARK, mark):
            with contextlib.suppress(Exception):
                orphan.kill()
        how = f"killed by {signal_name(-process.returncode)}" if process.returncode < 0 else "a fault of agentrig's own"
        text = storable(stderr.decode("utf-8", "replace")).strip()[-TOLD:]
        raise SupervisionFailed(
            f"the process that supervises the program ended without a report (exit code {process.returncode}: {how})"
            + (f"; the end of its and the program's stderr: {text}" if text else "")
        )
    failed, status, exceeded, observed, left, undead, cpu, peak = report
    if int(failed):
        raise CannotStart(_reason(words, OSError(int(failed), os.strerror(int(failed)))))
    if int(undead):
        passed = f"; it had passed its limit of {exceeded}" if exceeded != "-" else ""
        raise SupervisionFailed(f"{undead} processes of the program have not ended after SIGKILL{passed}")
    return Ending(
        status=int(status),
        exceeded="" if exceeded == "-" else exceeded,
        observed=float(observed),
        left=int(left),
        stdout=stdout,
        stderr=stderr,
        seconds=time.monotonic() - start,
        cpu_s=float(cpu),
        peak_mb=int(peak) / MIB,
    )


def _input(data: bytes) -> IO[bytes]:
    """Return a file with the program's input: nobody has to write it while the program may not read it."""
    descriptor = os.memfd_create("input", os.MFD_CLOEXEC)
    file = os.fdopen(descriptor, "w+b")
    file.write(data)
    file.seek(0)
    return file


def _reason(words: Sequence[str], error: OSError) -> str:
    if error.errno == errno.E2BIG:
        return "its variables or arguments are too long for the system: give it the input on stdin or in a file"
    return f"{words[0]} cannot be started: {error.strerror}"


class _Run:
    """Reads what a program writes until its supervisor reports its end."""

    def __init__(
        self, process: subprocess.Popen[bytes], channel: socket.socket, output_mb: float, finished: Callable[[], bool]
    ) -> None:
        self._process, self._channel, self._finished = process, channel, finished
        self._limit = int(output_mb * MIB)
        self._stdout, self._stderr = _Tail(None), _Tail(TAIL)
        self._report = b""
        self._stopped = False
        self._exceeded: tuple[str, int] | None = None

    def ending(self) -> tuple[list[str], bytes, bytes]:
        """Return the words of the report, none if there is none; stdout and stderr."""
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        with self._process.stdout as out, self._process.stderr as err, selectors.DefaultSelector() as selector:
            for stream, kept in ((out, self._stdout), (err, self._stderr)):
                os.set_blocking(stream.fileno(), False)
                selector.register(stream, selectors.EVENT_READ, kept)
            selector.register(self._channel, selectors.EVENT_READ, None)
            self._read(selector)
        try:
            self._process.wait(DRAIN_S)
        except subprocess.TimeoutExpired:
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()
        words = self._report.decode().split()
        if words and self._exceeded is not None:
            words[2:4] = [self._exceeded[0], str(self._exceeded[1])]
        return words, self._stdout.text(), self._stderr.text()

    def _read(self, selector: selectors.BaseSelector) -> None:
        """Read until the report is there and the streams are at their end."""
        linger = drain = None
        while selector.get_map():
            now = time.monotonic()
            if drain is not None and now > drain:
                return
            if linger is None and self._finished():
                linger = now + LINGER_S
            if linger is not None and now > linger:
                self._stop()
            for key, _ in selector.select(LOOK_S):
                if key.data is None:
                    data = self._channel.recv(4096)
                    self._report += data
                    if not data or data.endswith(b"\n"):
                        selector.unregister(self._channel)
                        drain = time.monotonic() + DRAIN_S
                    continue
                try:
                    data = os.read(key.fd, 1 << 16)
                except BlockingIOError:
                    continue
                if not data:
                    selector.unregister(key.fileobj)
                self._keep(key.data, data)

    def _keep(self, kept: _Tail, data: bytes) -> None:
        """Keep what was read, unless it is too much."""
        if self._exceeded is not None:
            return
        kept.add(data)
        if kept.length > self._limit:
            self._exceeded = ("output", kept.length)
            self._stop()

    def _stop(self) -> None:
        if not self._stopped:
            self._stopped = True
            with contextlib.suppress(OSError):  # it has ended
                self._channel.shutdown(socket.SHUT_WR)
