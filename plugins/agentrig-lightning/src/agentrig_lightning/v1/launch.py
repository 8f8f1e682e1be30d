"""Starts an agent of Agent Lightning 1.x: `python launch.py MODULE.CLASS`; it needs only the standard library."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import sys


def main(name: str) -> None:
    """Import the class, make one, and call its `run`; an exception is exit code 1 with its traceback on stderr."""
    sys.path[0] = os.environ.get("AGENTRIG_AGENT_FOLDER", "") or sys.path[0]
    module, _, found = name.partition(":") if ":" in name else name.rpartition(".")
    agent = getattr(importlib.import_module(module), found)
    if not isinstance(agent, type):
        raise TypeError(f"{name} is not a class")
    result = agent().run()
    if inspect.isawaitable(result):

        async def wait() -> None:
            await result

        asyncio.run(wait())


if __name__ == "__main__":
    main(sys.argv[1])
