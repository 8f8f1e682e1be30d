"""A plugin file for the tests: an agent whose rollouts leave a detached process behind."""

from __future__ import annotations

import subprocess
import sys

from agentrig import AgentSpec, hookimpl

DETACHED = """
import subprocess
print(subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=subprocess.DEVNULL).pid)
"""


def leave(task_input, endpoint):
    """Start a process through one that ends, and return its id."""
    done = subprocess.run([sys.executable, "-c", DETACHED], stdout=subprocess.PIPE, text=True, check=True)
    return int(done.stdout)


@hookimpl
def register_agents():
    yield AgentSpec(name="children", summary="Leaves a process behind.", build=lambda config: leave)
