"""A run that is killed: starts a server in a process of its own, says where it listens, and waits."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

CODE = "from agentrig.testing.server_child import main; main()"
"""The program of the process."""


def main() -> None:
    """Start the server that the first argument describes; print its addresses and its processes; wait for the end."""
    import psutil

    from agentrig.hardware import Cpu, CpuConfig
    from agentrig.plugins.building import built
    from agentrig.plugins.loading import load
    from agentrig.servers import ServerPlan
    from agentrig.settings import structure

    asked: dict[str, Any] = json.loads(sys.argv[1])
    registry = load(block=asked["block"], files=asked["files"])
    component = registry.find("server", asked["name"])
    config: Any = structure(component.spec.config, asked["settings"], owner=asked["name"], section="server")
    plan = ServerPlan(
        model=Path(asked["model"]), name="policy", hardware=Cpu(config=CpuConfig(threads=1)), context=asked["context"]
    )
    with built(component, config)(plan) as server:
        urls = [e.base_url for e in server.endpoints]
        children = [p.pid for p in psutil.Process(os.getpid()).children(recursive=True)]
        print(json.dumps({"urls": urls, "processes": children}), flush=True)
        sys.stdin.read()
