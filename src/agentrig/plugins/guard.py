"""The guard: a small process beside a command that says in whose code the command ended, and ends one that hangs.

Native code that crashes, or that never returns and keeps Python's lock, leaves no thread of the command a chance to say
anything. So the guard is told what begins and what has ended. It is started with the first build of a command.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from agentrig.errors import ConfigError

BUILD_S = 300.0
"""Seconds that a build may take, unless the variable says another number."""

VARIABLE = "AGENTRIG_BUILD_S"


class Guard:
    """The guard of this process; does nothing until `install` is called, as the command line does."""

    def __init__(self) -> None:
        self._wanted = False
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def install(self) -> None:
        """Guard the builds of this process."""
        self._wanted = True

    @contextlib.contextmanager
    def watching(self, what: str, *, cure: str, limit_s: float = 0.0) -> Iterator[None]:
        """Let the guard say what this process ended in, if it ends in this block.

        Args:
            what: What runs in the block, for the message.
            cure: What to do about it.
            limit_s: Seconds after which the guard ends the process if the block has not ended; 0 for no limit.
        """
        if not self._wanted:
            yield
            return
        number = next(self._numbers)
        self._tell({"begins": number, "what": what, "cure": cure, "limit_s": limit_s})
        try:
            yield
        finally:
            self._tell({"ended": number})

    def dismiss(self) -> None:
        """Let the guard go: what follows ends this process on purpose."""
        process, self._process = self._process, None
        if process is not None and process.stdin is not None and self._owner == os.getpid():
            with contextlib.suppress(OSError):
                process.stdin.write(b'{"dismissed": true}\n')
                process.stdin.close()
            process.wait()

    def _tell(self, told: dict[str, object]) -> None:
        with self._lock:
            if self._owner != os.getpid():  # first use, or a fork of the process that started it
                self._process, self._owner = self._start(), os.getpid()
            if self._process is not None and self._process.stdin is not None:
                with contextlib.suppress(OSError):  # it was killed: the command goes on without it
                    self._process.stdin.write(json.dumps(told).encode() + b"\n")

    def _start(self) -> subprocess.Popen[bytes]:
        script = str(Path(__file__).with_name("guarding.py"))
        command = [sys.executable, "-I", "-S", script, str(os.getpid())]
        atexit.register(self.dismiss)
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, bufsize=0, start_new_session=True
        )


def build_limit_s() -> float:
    """Return the seconds that a build may take; 0 for no limit.

    Raises:
        ConfigError: The variable is no number.
    """
    text = os.environ.get(VARIABLE, "")
    try:
        limit = float(text) if text else BUILD_S
    except ValueError:
        limit = -1.0
    if limit < 0:
        raise ConfigError(f"{VARIABLE}={text} must be a number of seconds, or 0 for no limit")
    return limit


GUARD = Guard()
"""The only one of this process."""
