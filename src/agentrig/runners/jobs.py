"""Jobs: the data sent to a runner process, and the result that it returns."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from agentrig.agents import Agent, Outcome
from agentrig.endpoints import Endpoint
from agentrig.traces import Trace

log = logging.getLogger(__name__)


@attrs.frozen(kw_only=True)
class AgentPlan:
    """How a runner process builds its agent: by name, so that only plain values are sent.

    Attributes:
        name: The agent's name.
        config: Its settings.
        files: Plugin files to load.
        block: Plugins not to load.
        environment: Names or patterns of the variables that the agent gets beside `agentrig.processes.confine.BASE`.
    """

    name: str
    config: Mapping[str, Any]
    files: Sequence[str] = ()
    block: Sequence[str] = ()
    environment: Sequence[str] = ()

    def build(self) -> Agent:
        """Load the plugins and build the agent.

        Raises:
            agentrig.errors.AgentrigError: It cannot be built; the message names the plugin's file and line.
        """
        from agentrig.plugins.building import built
        from agentrig.plugins.loading import load
        from agentrig.settings import structure

        component = load(files=self.files, block=self.block).find("agent", self.name)
        config: Any = structure(component.spec.config, self.config, owner=self.name, section="agent")
        agent: Agent = built(component, config)
        return agent


@attrs.frozen(kw_only=True)
class Job:
    """One rollout to run; of the task, a runner gets only `input`."""

    id: str
    input: Mapping[str, Any]
    endpoint: Endpoint

    def failed(self, kind: str, message: str, started: float) -> Result:
        """Return the failed result of a job that did not finish; `started` is on the monotonic clock."""
        duration = time.monotonic() - started
        return Result(
            id=self.id,
            outcome=Outcome(failure=kind, message=message),
            trace=Trace(rollout_id=self.id),
            start=time.time() - duration,
            duration_s=duration,
        )


@attrs.frozen(kw_only=True)
class Result:
    """The result of a job. `start` is Unix time, `duration_s` the agent's wall time."""

    id: str
    outcome: Outcome
    trace: Trace
    start: float
    duration_s: float
