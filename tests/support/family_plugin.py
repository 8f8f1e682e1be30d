"""An agent that leaves processes behind, and one whose runners cannot be forked."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import beside  # as a user's own plugin does

from agentrig import AgentSpec, hookimpl

DETACH = """
import os, sys
if child := os.fork():
    os.waitpid(child, 0)
    os._exit(0)
os.setsid()
if grandchild := os.fork():
    print(grandchild, flush=True)
    os._exit(0)
os.close(1)
os.execve(sys.executable, ["python", "-S", "-c", "import time; time.sleep(600)"], {})
"""


def parent(task_input, endpoint):
    """Start a child, and a detached grandchild in a session of its own, and answer; note both in a file beside this."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    detached = subprocess.run([sys.executable, "-c", DETACH], check=True, stdout=subprocess.PIPE, text=True)
    with Path(__file__).with_name("started").open("a", encoding="utf-8") as file:
        file.write(f"{child.pid}\n{detached.stdout.strip()}\n")
    return beside.ANSWER


def staying(task_input, endpoint):
    """Leave processes as `parent` does, and never answer."""
    parent(task_input, endpoint)
    time.sleep(600)


def breeder(task_input, endpoint):
    """Start children for ever."""
    while True:
        subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])


@hookimpl
def register_agents():
    yield AgentSpec(name="breeder", summary="Starts processes for ever.", build=lambda config: breeder)
    yield AgentSpec(name="parent", summary="Leaves processes.", build=lambda config: parent, preload=("heavy",))
    yield AgentSpec(name="staying", summary="Leaves processes.", build=lambda config: staying, preload=("heavy",))
    yield AgentSpec(name="unforked", summary="Cannot be forked.", build=lambda config: parent, preload=("deadly",))
