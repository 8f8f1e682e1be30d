"""Another process, with another hash seed: what a component does there, and whether it survives."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import cloudpickle
import psutil

from agentrig.errors import AgentrigError, place_of
from agentrig.processes.families import MARK, end_families
from agentrig.processes.supervisor import end_with_parent
from agentrig.text import words_of

R = TypeVar("R")

DEADLINE_S = 120.0
"""Wall seconds that a call there may take, with its imports; then its process is killed."""

CLOSED = 88
"""Exit status of a process whose component has closed the file for its answer."""


class EndedElsewhere(AgentrigError):
    """The other process ended, or was killed at its deadline, before it returned."""


def elsewhere(
    function: Callable[..., R],
    *arguments: Any,
    environment: Mapping[str, str] | None = None,
    ends_all: bool = True,
) -> R:
    """Call a function in a fresh interpreter and return what it returns.

    Args:
        function: Sent by name if it can be imported there, else by value, as are the arguments.
        arguments: Its arguments.
        environment: More variables that the interpreter starts with.
        ends_all: Whether to end what it has started, too.

    Raises:
        EndedElsewhere: The process ended or was killed.
        agentrig.errors.AgentrigError: The function or its result cannot be sent.
        BaseException: What the function raised.
    """
    mark = uuid.uuid4().hex  # a process that leads a session of its own has it too
    with tempfile.TemporaryFile() as answers:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", "from agentrig.testing.elsewhere import main; main()"],
            # with this seed a set of texts has another order than here
            env={**os.environ, "PYTHONHASHSEED": "1", "OMP_NUM_THREADS": "1", MARK: mark, **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=answers,
            start_new_session=True,
        )
        try:
            process.communicate(pickle.dumps((sys.path, packed((function, arguments)))), timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise EndedElsewhere(f"it has not returned after {DEADLINE_S:g} s") from None
        finally:
            process.kill()
            process.wait()
            if ends_all:
                end_families([process.pid], [mark])
        answers.seek(0)
        answer = answers.read()
    if not answer:
        code = process.returncode
        if code == CLOSED:
            raise EndedElsewhere("it has closed descriptors that it did not open")
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        raise EndedElsewhere(f"it ended its process ({how})")
    raised, value = cloudpickle.loads(answer)
    if raised:
        raise value
    result: R = value
    return result


def left(find: Callable[[], Sequence[R]], within_s: float) -> Sequence[R]:
    """Wait until `find()` is empty; return what it still finds at the end."""
    end = time.monotonic() + within_s
    while (found := find()) and time.monotonic() < end:
        time.sleep(0.05)
    return found


def living(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Return those that still run."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # it ends just now
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def packed(value: Any) -> bytes:
    """Pickle a value for another process, functions and classes by name if they can be imported there.

    Raises:
        AgentrigError: It cannot be pickled.
    """
    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:
        raise AgentrigError(f"it cannot be sent to another process: {type(error).__name__}: {error}") from error


def main() -> None:
    """Run in the other process: do the request on stdin, and write the answer to what stdout was."""
    end_with_parent(os.getppid())
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the component prints is no answer
    sys.path[:], request = pickle.load(sys.stdin.buffer)
    try:
        function, arguments = cloudpickle.loads(request)
        answer = cloudpickle.dumps((False, function(*arguments)))
    except BaseException as error:  # SystemExit and KeyboardInterrupt too: the component raised them
        answer = cloudpickle.dumps((True, _sendable(error)))
    try:
        answers.write(answer)
        answers.flush()
    except OSError:  # there is nowhere left to say so
        os._exit(CLOSED)
    os._exit(0)


def _sendable(error: BaseException) -> BaseException:
    """Return an exception that can be pickled: itself if it is one of agentrig's, or one with its text."""
    if isinstance(error, AgentrigError) or type(error).__module__.startswith("agentrig."):
        with contextlib.suppress(Exception):
            cloudpickle.loads(cloudpickle.dumps(error))
            return error
    return AgentrigError(words_of(error) + place_of(error))
