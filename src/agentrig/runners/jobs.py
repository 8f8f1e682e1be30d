"""Jobs: the data sent to a runner process, and the result that it returns."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from agentrig.agents import Agent, Outcome
from agentrig.endpoints import Endpoint
from agentrig.traces import Span, Trace

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
    """One rollout to run; of the task, a runner gets only `input`.

    An agent is called with `input` and `endpoint`. One with a method `run_job` is called with the whole job instead.

    Attributes:
        id: The rollout's id.
        input: JSON values; a mapping, except under an algorithm of Agent Lightning, which may enqueue anything.
        endpoint: The model's server.
        mode: `train`, `val` or `test`, as Agent Lightning has them; None if an algorithm set none.
        attempt: The number of this attempt, from 1; a rollout whose runner died has more than one.
        attempt_id: The id of the store's attempt; empty outside Agent Lightning's store. A rollout whose runner died
            keeps it; one that the store hands out again has another.
        config: The rollout's `RolloutConfig`, as JSON values; empty for the default.
        metadata: What an algorithm stored with the rollout.
        resources: The resources that an algorithm of Agent Lightning stored, by name, as JSON values; empty if there
            are none besides the endpoint.
        resources_id: Their id in the store.
    """

    id: str
    input: Any
    endpoint: Endpoint
    mode: str | None = "train"
    attempt: int = 1
    attempt_id: str = ""
    config: Mapping[str, Any] = attrs.field(factory=dict)
    metadata: Mapping[str, Any] | None = None
    resources: Mapping[str, Mapping[str, Any]] = attrs.field(factory=dict, repr=False)
    resources_id: str | None = None

    def again(self) -> Job:
        """Return the job of the next attempt, after its runner died or was killed."""
        return attrs.evolve(self, attempt=self.attempt + 1)

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

    def sendable(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "outcome": attrs.asdict(self.outcome),
            "start": self.start,
            "duration_s": self.duration_s,
            "spans": [
                {field.name: getattr(span, field.name) for field in attrs.fields(Span)} for span in self.trace.spans
            ],
        }

    @classmethod
    def received(cls, id: str, sent: Mapping[str, Any]) -> Result:
        """Return the result that `sendable` described.

        Raises:
            ValueError: It has another form.
        """
        try:
            return cls(
                id=id,
                outcome=Outcome(**sent["outcome"]),
                trace=Trace(rollout_id=id, spans=tuple(Span(**span) for span in sent["spans"])),
                start=float(sent["start"]),
                duration_s=float(sent["duration_s"]),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"the result of rollout {id} has another form: {error}") from None
