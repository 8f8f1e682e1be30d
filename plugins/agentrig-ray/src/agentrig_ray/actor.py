"""What lives in a Ray actor: one agent, built once, and its rollouts."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from agentrig.pools import AgentSource, Job
from agentrig.processes.confine import confine
from agentrig.processes.families import MARK, adopt_orphans, end_families, lead
from agentrig.runners.attempt import build_agent, packed
from agentrig.runners.loops import RunnerLoop


@attrs.frozen
class Place:
    """Where an actor runs: Ray's id of the node, and the node's address."""

    node: str
    ip: str


class Runner:
    """Builds the agent once, then runs rollouts, each in its own thread.

    Args:
        absent: Names of the run's variables that this runner does not get.
        files: The plugin files' texts, by path: a node that has no such file gets a copy.
    """

    def __init__(
        self, plan: AgentSource, variables: Mapping[str, str], absent: Sequence[str], files: Mapping[str, str]
    ) -> None:
        lead()
        if sys.platform == "linux":
            adopt_orphans()  # `end` finds what leaves the agent's family
        confine(("RAY_*", *plan.environment), variables, absent)  # Ray itself needs those
        with with_files(plan, files) as here:
            self._agent, self._broken = build_agent(here)
        self._loop = RunnerLoop()

    def ready(self) -> Place | str:
        """Return where it runs, or why the agent cannot be built."""
        import ray

        return self._broken or Place(ray.get_runtime_context().get_node_id(), str(ray.util.get_node_ip_address()))

    def run(self, job: Job) -> bytes:
        """Run a rollout and return its packed result; failures come back typed."""
        assert self._agent is not None
        return packed(self._agent, job, self._loop)

    def end(self) -> None:
        """End the processes that the agent has started; Ray then ends this one."""
        end_families([os.getpid()], [os.environ.get(MARK, "")])


@contextlib.contextmanager
def with_files(plan: AgentSource, files: Mapping[str, str]) -> Iterator[AgentSource]:
    """Yield the plan with paths that exist here: a file that this node lacks is written until the block ends."""
    if all(Path(path).is_file() for path in plan.files):
        yield plan
        return
    with tempfile.TemporaryDirectory(prefix="agentrig-plugins-") as folder:
        found = []
        for path in plan.files:
            here = Path(path)
            if not here.is_file() and path in files:
                here = Path(folder) / here.name
                here.write_text(files[path], "utf-8")
            found.append(str(here))
        moved: Any = plan
        yield attrs.evolve(moved, files=tuple(found))
