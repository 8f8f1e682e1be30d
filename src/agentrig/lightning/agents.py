"""A `LitAgent` as an agent: what it gets for a rollout, and how its tracer's spans arrive."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from agentrig.endpoints import Endpoint
from agentrig.plugins.specs import AgentSpec
from agentrig.tracing.recorder import current

Factory = Callable[[], Any]


def agent(
    cls: Factory,
    *,
    name: str,
    summary: str,
    resource: str = "main_llm",
    tracer: Factory | None = None,
    environment: Sequence[str] = (),
) -> AgentSpec:
    """Return the spec of a `LitAgent`.

    Its `training_rollout` gets the task's input and one resource, the endpoint. The number that it returns
    (or emits) is the rollout's answer. The reward `own` uses it as the score; other rewards score the answer.

    Args:
        cls: The `LitAgent` subclass, or anything that makes an instance when called.
        name: The component's name.
        summary: One line about it.
        resource: The resource name under which the agent looks up the endpoint.
        tracer: A tracer class of Agent Lightning, used instead of agentrig's tracer.
        environment: Environment variables that the agent needs; see `AgentSpec`.
    """

    def build(config: Any) -> Any:
        return _LitAgentCall(cls(), resource, tracer() if tracer is not None else None)

    preload = ("agentrig.runners.runtime", "openai")
    return AgentSpec(name=name, summary=summary, build=build, preload=preload, environment=environment)


def tracer(
    cls: Factory,
    agent_cls: Factory,
    *,
    name: str,
    summary: str,
    resource: str = "main_llm",
    environment: Sequence[str] = (),
) -> AgentSpec:
    """Return the spec of a `LitAgent` that a tracer of Agent Lightning traces."""
    return agent(agent_cls, name=name, summary=summary, resource=resource, tracer=cls, environment=environment)


class _LitAgentCall:
    """Makes a `LitAgent` callable, as agentrig expects."""

    def __init__(self, lit_agent: Any, resource: str, tracer: Any) -> None:
        from agentlightning.tracer.base import set_active_tracer

        from agentrig.runners.lightning_tracer import RecorderTracer

        self._agent, self._resource = lit_agent, resource
        self._tracer = tracer
        self.records_itself = tracer is not None
        self._lock, self._turn = threading.Lock(), asyncio.Lock()
        self._host = _Host(tracer or RecorderTracer())  # LitAgent keeps weak references only
        lit_agent.set_runner(self._host)
        lit_agent.set_trainer(self._host)
        if tracer is None:
            set_active_tracer(self._host.tracer)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # warnings about integrations that are not installed
                tracer.init()
                tracer.init_worker(0)

    def __call__(self, task_input: Mapping[str, Any], endpoint: Endpoint) -> Any:
        """Return the number that the agent returned or emitted, or None; a coroutine for an `async` agent.

        The rollouts of an `async` agent share the runner's event loop, as in Agent Lightning, so that the agent can
        reuse a client.
        """
        if self._agent.is_async():
            return self._run(task_input, endpoint) if self._tracer is None else self._queued(task_input, endpoint)
        if self._tracer is None:
            return asyncio.run(self._run(task_input, endpoint))
        with self._lock:  # their tracers record one rollout at a time
            return asyncio.run(self._traced(task_input, endpoint))

    async def _queued(self, task_input: Mapping[str, Any], endpoint: Endpoint) -> Any:
        async with self._turn:
            return await self._traced(task_input, endpoint)

    async def _traced(self, task_input: Mapping[str, Any], endpoint: Endpoint) -> Any:
        from agentrig.runners.lightning_spans import final_reward, from_lightning

        recorder = current()
        try:
            async with self._tracer.trace_context(name=recorder.rollout_id if recorder else "rollout"):
                answer = await self._run(task_input, endpoint)
        finally:
            spans = self._tracer.get_last_trace()
            if recorder is not None:
                recorder.adopt(from_lightning(recorder.rollout_id, spans).spans)
        return final_reward(spans) if answer is None else answer

    async def _run(self, task_input: Mapping[str, Any], endpoint: Endpoint) -> Any:
        from agentlightning import Attempt, AttemptedRollout

        from agentrig.runners.lightning_spans import final_reward, lightning_llm, to_lightning

        recorder = current()
        rollout_id = recorder.rollout_id if recorder else uuid.uuid4().hex
        now = time.time()
        attempt = Attempt(rollout_id=rollout_id, attempt_id=f"{rollout_id}-0", sequence_id=1, start_time=now)
        rollout = AttemptedRollout(
            rollout_id=rollout_id, input=dict(task_input), start_time=now, mode="train", attempt=attempt
        )
        resources = {self._resource: lightning_llm(endpoint, ours=False)}
        if self._agent.is_async():
            result = await self._agent.training_rollout_async(dict(task_input), resources, rollout)
        else:
            result = self._agent.training_rollout(dict(task_input), resources, rollout)
        if isinstance(result, int | float):
            return float(result)
        if result is None and recorder is not None and self._tracer is None:
            return final_reward(to_lightning(recorder.trace(), rollout_id, attempt.attempt_id))
        return final_reward(result) if result else None


@attrs.define
class _Host:
    """The object that a `LitAgent` gets as its runner and its trainer."""

    tracer: Any
    __weakref__: Any = attrs.field(init=False, hash=False, repr=False, eq=False)
