"""Plays an agent as a run does: in runner processes, which a check may end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import attrs
import cloudpickle

from agentrig.agents import Agent
from agentrig.errors import AgentFailure, AgentrigError
from agentrig.gateway.process import Gateway
from agentrig.gateway.settings import GatewaySettings
from agentrig.pools import Job, Result
from agentrig.runners.processes import Pool
from agentrig.testing.elsewhere import packed
from agentrig.testing.subject import Subject

START_S = 120.0
"""Seconds until an agent must be built, its imports included."""


@attrs.frozen(kw_only=True)
class SentAgent:
    """How a runner process builds the agent under test: an `agentrig.pools.AgentSource`.

    Attributes:
        name: The agent's name.
        pickled: The subject.
        environment: Names or patterns of variables that the agent gets.
        files: Not used: the subject has its file.
    """

    name: str
    pickled: bytes = attrs.field(repr=False)
    environment: Sequence[str] = ()
    files: Sequence[str] = ()

    def build(self) -> Agent:
        """Load and build the agent."""
        subject: Subject = cloudpickle.loads(self.pickled)
        agent: Agent = subject.made
        return agent


class Players:
    """Runner processes with the agent under test, and a gateway if its spec or the settings ask for one.

    Args:
        subject: The agent.
        n: Processes.
        threads: Rollouts at once in each.
        deadline_s: Wall seconds for a rollout.
        gateway: The gateway's settings.
    """

    def __init__(
        self, subject: Subject, *, n: int, threads: int, deadline_s: float, gateway: GatewaySettings | None = None
    ) -> None:
        spec = subject.spec
        source = SentAgent(
            name=str(subject),
            pickled=packed(subject.sendable()),
            environment=tuple(spec.environment) if spec else (),
        )
        preload = spec.preload if spec else ()
        self.pool = Pool(source, n=n, threads=threads, deadline_s=deadline_s, retries=0, preload=preload)
        self._ending = ExitStack()
        self._ending.callback(self.pool.close)
        self._settings = gateway or GatewaySettings()
        asks = bool(self._settings.models) or (spec is not None and spec.calls == "gateway")
        self._needs_gateway = asks if self._settings.use == "auto" else self._settings.use == "on"
        self._gateway: Gateway | None = None

    def __enter__(self) -> Players:
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.close()

    def start(self) -> None:
        """Wait until a runner has built the agent.

        Raises:
            AgentrigError: It cannot be built, or takes longer than `START_S`.
        """
        if not self.pool.build_first(START_S):
            raise AgentrigError(f"it has not been built after {START_S:g} s")

    def play(self, jobs: Sequence[Job]) -> list[Result]:
        """Run jobs and return their results, in their order; a job that fails is a result too."""
        done: dict[str, Result] = {}
        if self._needs_gateway and self._gateway is None:
            self._gateway = self._ending.enter_context(Gateway(self._settings))
        for job in jobs:
            if self._gateway is not None:
                job = attrs.evolve(job, endpoint=attrs.evolve(job.endpoint, gateway=self._gateway.address))
            self.pool.submit(job)
        end = time.monotonic() + START_S + self.pool.deadline_s * len(jobs)
        while len(done) < len(jobs):
            done |= {result.id: result for result in self.pool.poll(0.2)}
            if time.monotonic() > end:
                raise AgentrigError(f"{len(jobs) - len(done)} of {len(jobs)} rollouts have not ended")
        return [done[job.id] for job in jobs]


class Screaming(dict[str, Any]):
    """A task's input that ends the rollout when its reader asks for a key of `private`."""

    def __init__(self, given: Any, private: Sequence[str]) -> None:
        super().__init__(given)
        self.private = sorted(set(private) - set(given))

    def __reduce__(self) -> Any:
        """Pickle with the keys."""
        return Screaming, (dict(self), self.private)

    def __missing__(self, key: Any) -> Any:
        self._scream(key)
        raise KeyError(key)

    def __contains__(self, key: Any) -> bool:
        self._scream(key)
        return super().__contains__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        """Return a key's value."""
        self._scream(key)
        return super().get(key, default)

    def _scream(self, key: Any) -> None:
        if key in self.private:
            raise AgentFailure(f'the agent asks for private["{key}"]', kind=READ_PRIVATE)


READ_PRIVATE = "read-private"
"""Failure kind of an agent that asks for a key of `private`."""
