"""What the guard runs (see `guard`): a script that imports nothing of agentrig."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import sys
import time
from typing import Any

LOOK_S = 0.5
"""How often it looks whether the command is still there, in seconds."""

GRACE_S = 5.0
"""Seconds that the command has to end after each signal."""


def main(command: int) -> None:
    """Read what begins and ends in the process `command`, until that process has ended."""
    under_way: dict[int, dict[str, Any]] = {}
    text = b""
    while True:
        piece = None
        if select.select([0], [], [], LOOK_S)[0]:
            piece = os.read(0, 65536)
            *lines, text = (text + piece).split(b"\n")
            for line in lines:
                told = json.loads(line)
                if "dismissed" in told:
                    return
                if "begins" in told:
                    under_way[told["begins"]] = {**told, "since": time.monotonic()}
                under_way.pop(told.get("ended", -1), None)
        innermost = under_way[max(under_way)] if under_way else None
        if piece == b"" or os.getppid() != command:
            if innermost is not None:
                say(f"this process has ended in {innermost['what']}. {innermost['cure']}{memory()}")
            return
        late = (w for w in under_way.values() if 0 < w["limit_s"] < time.monotonic() - w["since"])
        if overdue := next(late, None):
            limit = f"has not ended after {overdue['limit_s']:g} s, and the command is ended"
            say(f"{overdue['what']} {limit}. {overdue['cure']}")
            end(command)
            return


def memory() -> str:
    """Return a line about this process's limit of memory, which a library may have ended it for; '' without one."""
    most = resource.getrlimit(resource.RLIMIT_AS)[0]  # the command's too
    if most < 0:
        return ""
    return (
        f"\n  It may use {most / (1 << 30):.1f} GiB of memory (ulimit -v): if that was too little, ulimit -v unlimited"
    )


def say(message: str) -> None:
    """Write a message to stderr, which is the command's."""
    os.write(2, f"agentrig: {message}\n".encode())


def end(command: int) -> None:
    """End the command: politely, then with the stack of what it does, then at once."""
    for number in (signal.SIGTERM, signal.SIGABRT, signal.SIGKILL):
        until = time.monotonic() + GRACE_S
        try:
            os.kill(command, number)
        except ProcessLookupError:
            return
        while os.getppid() == command and time.monotonic() < until:
            if select.select([0], [], [], 0.05)[0] and not os.read(0, 65536):
                return  # it has ended, or is about to
        if os.getppid() != command:
            return


if __name__ == "__main__":
    main(int(sys.argv[1]))
