"""An agent that leaves processes behind, and one whose runners cannot be forked."""

from __future__ import annotations

import subprocess
import sys

import beside  # as a user's own plugin does

from agentrig import AgentSpec, hookimpl

DETACH = "import os, sys, time\nif os.fork(): os._exit(0)\nos.setsid()\nif os.fork(): os._exit(0)\ntime.sleep(600)\n"


def parent(task_input, endpoint):
    """Start a child, and a detached grandchild in a session of its own, and answer."""
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    subprocess.run([sys.executable, "-c", DETACH], check=True)
    return beside.ANSWER


def breeder(task_input, endpoint):
    """Start children for ever."""
    while True:
        subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])


@hookimpl
def register_agents():
    yield AgentSpec(name="breeder", summary="Starts processes for ever.", build=lambda config: breeder)
    yield AgentSpec(name="parent", summary="Leaves processes.", build=lambda config: parent, preload=("heavy",))
    yield AgentSpec(name="unforked", summary="Cannot be forked.", build=lambda config: parent, preload=("deadly",))
