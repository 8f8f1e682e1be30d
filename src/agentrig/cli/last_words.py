"""What a command says when a plugin ends its process: no `except` sees `os._exit` or a crash in native code."""

from __future__ import annotations

import faulthandler
import io
import os
import sys
from typing import NoReturn

from agentrig.errors import own_file
from agentrig.plugins.guard import GUARD


def install() -> None:
    """Print the stack if native code crashes, and words if a plugin ends this process or builds without an end."""
    GUARD.install()
    if not faulthandler.is_enabled():
        try:
            faulthandler.enable(all_threads=False)
        except (io.UnsupportedOperation, AttributeError, RuntimeError):
            return  # stderr is no file: there is nowhere to write to
    if getattr(os._exit, "speaks", False):
        return
    leave, process = os._exit, os.getpid()

    def ended(status: int) -> NoReturn:
        frame = sys._getframe(1)
        if os.getpid() == process and own_file(frame.f_code.co_filename, installed=True):
            where = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
            os.write(2, words(status, where, str(frame.f_globals.get("__name__", ""))).encode())
            GUARD.dismiss()
        leave(status)

    ended.speaks = True  # type: ignore[attr-defined]
    os._exit = ended


def words(status: int, where: str, module: str) -> str:
    """Return the message about a call of `os._exit(status)` in a module: whose fault it is, and what to do."""
    from importlib.metadata import entry_points  # here, because every command imports this module

    top = module.partition(".")[0]
    names = [p.name for p in entry_points(group="agentrig") if p.value.partition(":")[0].partition(".")[0] == top]
    file = module.removeprefix("agentrig_file_")
    owner = f" of plugin {names[0] if names else file}" if names or file != module else ""
    return (
        f"agentrig: the code{owner} has ended this process by os._exit({status}) ({where}).\n"
        "  Nothing of the run can be saved then: let it raise an error instead, or use another component\n"
    )
