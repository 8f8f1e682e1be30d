"""The agent that the checks of runners run: it does what its job says, and answers with what it was given."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterable
from typing import Any

import attrs

from agentrig import AgentFailure, AgentSpec, hookimpl
from agentrig.pools import Job

DETACHED = """
import subprocess
print(subprocess.Popen(["sleep", "300"], start_new_session=True, stdout=subprocess.DEVNULL, env={}).pid)
"""


class Doer:
    """Gets whole jobs: an agent with `run_job` does."""

    def __call__(self, task_input: Any, endpoint: Any) -> Any:
        """Refuse: a pool calls `agentrig.runners.attempt.packed`, which gives it the job."""
        raise AgentFailure("the runner called the agent itself; it must run jobs by agentrig.runners.attempt.packed")

    def run_job(self, job: Job) -> Any:
        """Do what the input's `do` says."""
        do = job.input["do"]
        if do == "die" or (do == "die-once" and job.attempt == 1):
            os._exit(9)
        if do == "hang":
            time.sleep(600)
        if do == "raise":
            raise ValueError("this agent raises")
        if do == "object":
            return object()
        if do == "environment":
            return sorted(os.environ)
        if do == "child":
            done = subprocess.run([sys.executable, "-c", DETACHED], stdout=subprocess.PIPE, text=True, check=True)
            return {"runner": os.getpid(), "child": int(done.stdout)}
        return described(job)


def described(job: Job) -> dict[str, Any]:
    """Return what a job has, without its id, as JSON values."""
    found = attrs.asdict(job)
    found.pop("id")
    return found


def _unbuilt(config: Any) -> Any:
    raise RuntimeError("the agent of the kit cannot be built")


@hookimpl
def register_agents() -> Iterable[AgentSpec]:
    """Register the agent, and one that cannot be built."""
    yield AgentSpec(name="kit-doer", summary="Does what its job says.", build=lambda config: Doer())
    yield AgentSpec(name="kit-unbuilt", summary="Cannot be built.", build=_unbuilt)
