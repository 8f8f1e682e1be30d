"""What the child of a trial runs: it imports plugins one by one, and reports each before and after (see `trial`)."""

from __future__ import annotations

import faulthandler
import itertools
import json
import os
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, NoReturn

from agentrig.errors import own_file, short_path
from agentrig.plugins.specs import KINDS

GROUP = "agentrig"


def main(given: Mapping[str, Any]) -> None:
    """Import each of `origins`, and call its `register_*` hooks; report to the file descriptor `report`."""
    from agentrig.lightning_import import skip_litellm

    leave = os._exit

    def report(**told: Any) -> None:
        os.write(given["report"], json.dumps(told).encode() + b"\n")

    def ended(status: int) -> NoReturn:
        report(exit=status, place=_caller())
        leave(status)

    skip_litellm()  # a plugin may import Agent Lightning at its top
    os._exit = ended
    faulthandler.enable(sys.stderr, all_threads=False)
    for number, origin in enumerate(given["origins"]):
        _timed(given["slow_s"])
        report(stage="import")
        try:
            plugin = _imported(origin)
            for kind in KINDS.values():
                hook = getattr(plugin, kind.hook, None)
                if hook is not None and hasattr(hook, f"{GROUP}_impl"):
                    _timed(given["slow_s"])
                    report(stage=kind.hook)
                    specs = hook()
                    if isinstance(specs, Iterable):
                        list(itertools.islice(specs, 10_000))
        except BaseException:  # the command meets it again, where it is caught, and says what it was
            pass
        report(done=number + 1)
    faulthandler.cancel_dump_traceback_later()
    leave(0)


def _timed(slow_s: float) -> None:
    """Write the stack to stderr, for the parent's message, if what follows is slow; 0 for never."""
    if slow_s:
        faulthandler.dump_traceback_later(slow_s * 0.9, file=sys.stderr)


def _imported(origin: str) -> Any:
    if origin.endswith(".py"):
        from agentrig.plugins.files import load_file

        return load_file(Path(origin))
    return EntryPoint(name="", value=origin, group=GROUP).load()


def _caller() -> str:
    """Return ` (FILE:LINE in FUNCTION)` of the innermost frame that is a plugin's."""
    frame = sys._getframe(2)
    while frame is not None and not own_file(frame.f_code.co_filename, installed=True):
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None:
        return ""
    return f" ({short_path(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name})"
