"""Ends a command whose interpreter is held by native code that never returns, and tells of one that native code ended.

Nothing inside the command could do that.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import time
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import attrs
import psutil

from agentrig.processes.ends import before_end
from agentrig.processes.forks import start_process

LOOK_S = 0.5
"""Seconds between two looks at the limit."""

CONTINUED_S = 2.0
"""Seconds in which a command that was stopped, by Ctrl-Z for example, must set a new limit when it goes on."""

LONGEST = 1000
"""Bytes of the words on what is under way."""


class Watch:
    """A process that kills this one if it lets a limit pass: then no thread and no signal handler of it can run.

    The limit is in memory that both have: to set it costs nothing.

    If this one ends without an order of its own before the limit, the watching process says so.

    Args:
        why: What is printed when the limit passes: what happened, and what to do; `{during}` is replaced, see `during`.
        died: What is printed when this process ends before it; '' for nothing.
        record: The run's `error.json`, which gets the same words; None outside of a run.

    Raises:
        AgentrigError: No process can be started.
    """

    def __init__(self, why: str, died: str = "", record: Path | None = None) -> None:
        context = multiprocessing.get_context("forkserver")
        self._limit = context.RawValue("d", 0.0)  # in `time.monotonic`, which all processes share; 0 for no limit
        self._during = context.RawArray("c", LONGEST + 1)
        told = Told(why=why, died=died, record=None if record is None else str(record.absolute()))
        self._pipe, self._process = start_process(context, watch, os.getpid(), told, self._limit, self._during)
        self._end_told = partial(self.beat, None)
        before_end.append(self._end_told)

    def beat(self, limit_s: float | None) -> None:
        """Give a sign of life.

        Args:
            limit_s: Seconds in which the next one must come; None for no limit.
        """
        self._limit.value = 0.0 if limit_s is None else time.monotonic() + limit_s

    def during(self, names: Sequence[str]) -> None:
        """Say what is under way, for the message."""
        self._during.value = ", ".join(names).encode("utf-8", "replace")[:LONGEST].replace(b"\0", b"")

    def close(self) -> None:
        """End the watching process."""
        before_end.remove(self._end_told)
        self._pipe.close()
        self._process.kill()  # what the reward has forked may have the pipe too
        self._process.join()


@attrs.frozen(kw_only=True)
class Told:
    """The words of a `Watch`, and the file that gets them."""

    why: str
    died: str
    record: str | None

    def tell(self, text: str, during: bytes) -> None:
        """Print a text, and record it unless the run has recorded an error itself."""
        text = text.replace("{during}", during.decode("utf-8", "replace"))
        os.write(2, f"\nagentrig: {text}\n".encode())
        if self.record is not None and not os.path.lexists(self.record):
            Path(self.record).write_text(json.dumps({"error": "RewardError", "message": text, "cause": ""}), "utf-8")


def watch(pipe: Connection, watched: int, told: Told, limit: Any, during: Any) -> None:
    """Run in the watching process: look at the limit until the other process ends.

    Args:
        pipe: Of the other process; it says nothing, and its end is closed when that ends.
        watched: Its id.
        told: See `Watch`.
        limit: Shared: when the next sign of life must have come; 0 for no limit.
        during: Shared: what is under way.
    """
    with contextlib.suppress(EOFError, OSError, psutil.Error):  # it has ended
        process, late_s, looked = psutil.Process(watched), 0.0, time.monotonic()
        closed = False
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            try:
                if closed:
                    time.sleep(LOOK_S)
                elif pipe.poll(LOOK_S):
                    closed = True  # that process has ended, or a plugin's code has closed its descriptors
            except OSError:
                closed = True
            before, looked = looked, time.monotonic()
            if not limit.value or looked < limit.value:
                late_s = 0.0
            elif process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                late_s += min(looked - before, 2 * LOOK_S)  # this process may have been stopped with it
            if late_s > CONTINUED_S:
                told.tell(told.why, during.value)
                process.kill()
                return
    if limit.value and told.died:
        with contextlib.suppress(OSError):
            told.tell(told.died, during.value)
