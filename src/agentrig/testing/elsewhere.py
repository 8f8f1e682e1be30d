"""Another process, with another hash seed: what a component does there, and whether it survives.

One clean process is kept; each call runs in a fork of it, so that nothing of one call reaches the next.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from typing import Any, NoReturn, TypeVar

import cloudpickle

from agentrig.errors import AgentrigError

R = TypeVar("R")

HASH_SEED = "1"
"""The hash seed there; the order of a set of texts is another one than here."""

START_S = 60.0
"""Seconds that the clean process may take to start."""


class EndedElsewhere(AgentrigError):
    """The other process ended, or was killed at its deadline, before it returned."""


class _Other:
    """The clean process."""

    def __init__(self) -> None:
        ours, theirs = Pipe()
        command = "import sys; from agentrig.testing.elsewhere import serve; serve(int(sys.argv[1]))"
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", command, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONHASHSEED": HASH_SEED, "OMP_NUM_THREADS": "1"},
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        self.pipe = ours

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.pipe.close()


_lock = threading.Lock()
_other: _Other | None = None


def elsewhere(function: Callable[..., R], *arguments: Any, deadline_s: float) -> R:
    """Call a function in another process and return what it returns.

    Args:
        function: Sent by name if it can be imported there, else by value, as are the arguments.
        arguments: Its arguments.
        deadline_s: Wall seconds until the process is killed; the first call also waits for a process to start.

    Raises:
        EndedElsewhere: The process ended or was killed.
        agentrig.errors.AgentrigError: The function or its result cannot be sent.
        BaseException: What the function raised.
    """
    global _other
    request = pickle.dumps((os.getcwd(), sys.path, packed((function, arguments))))  # a path given here is right there
    with _lock:
        if _other is None or _other.process.poll() is not None:
            _other = _Other()
            atexit.register(_other.end)
            if not _other.pipe.poll(START_S):
                raise AgentrigError(f"a process for the checks has not started after {START_S:g} s")
            _other.pipe.recv_bytes()
        _other.pipe.send_bytes(request)
        try:
            if not _other.pipe.poll(deadline_s):
                _other.end()
                raise EndedElsewhere(f"it has not returned after {deadline_s:g} s")
            how, value = cloudpickle.loads(_other.pipe.recv_bytes())
        except (EOFError, OSError) as error:
            _other.end()
            raise EndedElsewhere("the process that the checks run in ended") from error
    if how == "ended":
        raise EndedElsewhere(f"it ended its process ({_status(value)})")
    if how == "raised":
        raise value
    result: R = value
    return result


def packed(value: Any) -> bytes:
    """Pickle a value for another process, functions and classes by name if they can be imported there.

    Raises:
        AgentrigError: It cannot be pickled.
    """
    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:
        raise AgentrigError(f"it cannot be sent to another process: {type(error).__name__}: {error}") from error


def _status(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


def serve(number: int) -> NoReturn:
    """Run in the clean process: answer each request in a fork."""
    import agentrig.plugins.builtin
    import agentrig.runners.scorer
    import agentrig.tracing.recording  # noqa: F401  each fork would import them again

    pipe = Connection(number)
    pipe.send_bytes(b"ready")
    while True:
        try:
            request = pipe.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)
        answers, own = Pipe(duplex=False)
        child = os.fork()
        if child == 0:
            _answer(own, request)
        own.close()
        try:
            answer = answers.recv_bytes()
        except EOFError:
            answer = b""
        answers.close()
        _, status = os.waitpid(child, 0)
        pipe.send_bytes(answer or cloudpickle.dumps(("ended", status)))


def _answer(pipe: Connection, request: bytes) -> NoReturn:
    """Do one request, send the answer, and end this process."""
    try:
        try:
            folder, sys.path[:], inner = pickle.loads(request)
            os.chdir(folder)
            function, arguments = cloudpickle.loads(inner)
            answer = cloudpickle.dumps(("returned", function(*arguments)))
        except (Exception, SystemExit) as error:
            answer = cloudpickle.dumps(("raised", _sendable(error)))
        pipe.send_bytes(answer)
    finally:
        os._exit(0)


def _sendable(error: BaseException) -> BaseException:
    """Return an exception that can be pickled: itself, or one with its text."""
    from agentrig.errors import place_of
    from agentrig.text import words_of

    if isinstance(error, AgentrigError):
        with contextlib.suppress(Exception):
            cloudpickle.loads(cloudpickle.dumps(error))
            return error
    return AgentrigError(words_of(error) + place_of(error))
