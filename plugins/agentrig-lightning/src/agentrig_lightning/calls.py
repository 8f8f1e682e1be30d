"""Calls a `LitAgent` for a rollout, as Agent Lightning's own runner does."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import logging
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentrig.agents import Judged
from agentrig.endpoints import Endpoint
from agentrig.errors import AgentrigError
from agentrig.pools import Job
from agentrig.traces import Trace
from agentrig.tracing.recorder import Recorder, current
from agentrig_lightning.instances import FORMS, AgentSlot, AgentSlots, copies, factory, is_instance

log = logging.getLogger(__name__)


class LitAgentCall:
    """Makes a `LitAgent` callable, as agentrig expects; most arguments are those of `agentrig_lightning.agent`.

    Args:
        tracer: A tracer of Agent Lightning, or None for agentrig's. It records one rollout at a time.
        judges: Whether the agent's number is its own reward only, and no answer.
    """

    reads_own_trace = True
    """Hooks and `answer` read the trace while the rollout runs: its calls are recorded here, not by the gateway."""

    def __init__(
        self,
        source: Any,
        *,
        resource: str = "main_llm",
        initial_resources: Mapping[str, Any] | None = None,
        tracer: Any = None,
        hooks: Sequence[Any] = (),
        answer: Callable[[Trace], Any] | None = None,
        judges: bool = False,
    ) -> None:
        self._resource, self._initial = resource, dict(initial_resources or {})
        self._tracer = tracer
        self._answer, self._judges = answer, judges
        self.records_itself = tracer is not None
        self._active = tracer or _recorder_tracer()
        if tracer is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # warnings about integrations that are not installed
                tracer.init()
                tracer.init_worker(0)
        agent, several = factory(source)
        copied, more = copies(list(hooks), "a hook", "hooks whose objects can be copied")
        numbers = itertools.count()
        self._slots = AgentSlots(lambda: _slot(agent(), copied(), Host(self._active, next(numbers))))
        self._async = bool(self._slots.first.agent.is_async())
        self._alone = not (several and more) or tracer is not None
        self._lock, self._turn = threading.Lock(), asyncio.Lock()

    def __call__(self, task_input: Any, endpoint: Endpoint) -> Any:
        """Run a rollout outside of a run, as the first attempt of a training rollout."""
        recorder = current()
        return self.run_job(
            Job(id=recorder.rollout_id if recorder else uuid.uuid4().hex, input=task_input, endpoint=endpoint)
        )

    def run_job(self, job: Job) -> Any:
        """Return the number that the agent returned or emitted, or None, or a `Judged`; an `async` agent's coroutine.

        The rollouts of an `async` agent share the runner's event loop, as in Agent Lightning, so that the agent can
        reuse a client.
        """
        if self._async:
            return self._in_loop(job)
        if not self._alone:
            return asyncio.run(self._rollout(self._slots.of_thread(), job))
        with self._lock:
            return asyncio.run(self._rollout(self._slots.first, job))

    async def _in_loop(self, job: Job) -> Any:
        if self._alone:
            async with self._turn:
                return await self._rollout(self._slots.first, job)
        with self._slots.borrowed() as slot:
            return await self._rollout(slot, job)

    async def _rollout(self, slot: AgentSlot, job: Job) -> Any:
        """Run a rollout with its hooks, in the order of Agent Lightning's runner."""
        from agentrig_lightning.resources import rollout_of

        rollout = rollout_of(job, start=time.time())
        seen: dict[str, Any] = {"agent": slot.agent, "runner": slot.host, "rollout": rollout}
        spans: list[Any] = []
        await _tell(slot, "on_rollout_start", **seen)
        try:
            number, spans = await self._traced(slot, job, seen)
        finally:
            await _tell(slot, "on_rollout_end", **seen, spans=spans)
        if not self._judges:
            return number
        recorder = current()
        found = self._answer(recorder.trace()) if self._answer is not None and recorder is not None else None
        return Judged(answer=found, reward=number)

    async def _traced(self, slot: AgentSlot, job: Job, seen: Mapping[str, Any]) -> tuple[Any, list[Any]]:
        """Run a rollout under the tracer; return its answer and the spans."""
        from agentrig_lightning.spans import from_lightning, reported, to_lightning

        rollout = seen["rollout"]
        recorder = current() or Recorder(job.id, token_ids=False)  # outside of a run nobody reads it
        tracing = self._tracer.trace_context(name=job.id) if self._tracer is not None else contextlib.nullcontext()
        try:
            async with tracing:
                await _tell(slot, "on_trace_start", **seen, tracer=self._active)
                result = await self._called(slot.agent, job, rollout)
                await _tell(slot, "on_trace_end", **seen, tracer=self._active)
        finally:
            if self._tracer is not None:
                recorder.adopt(from_lightning(job.id, self._tracer.get_last_trace()).spans)
        # As in Agent Lightning, hooks get the spans before a returned number becomes one.
        spans = to_lightning(recorder.trace(), job.id, rollout.attempt.attempt_id) if slot.hooks else []
        return reported(result, recorder), spans

    async def _called(self, agent: Any, job: Job, rollout: Any) -> Any:
        """Call the agent's method for the rollout's mode; everything but `train` is a validation."""
        resources = self._resources(job)
        name = "training_rollout" if job.mode == "train" else "validation_rollout"
        method = getattr(agent, f"{name}_async" if self._async else name)
        result = _bound(method, rollout.input, resources, rollout)()
        return await result if self._async else result

    def _resources(self, job: Job) -> Mapping[str, Any]:
        """Return what an algorithm of Agent Lightning gave the rollout; else the endpoint, and the agent's own."""
        from agentrig_lightning.resources import lightning_llm, resources_of, templates_of

        if job.resources:
            given: Mapping[str, Any] = resources_of(job)
            return given
        llm = lightning_llm(job.endpoint, own_fields=False)
        return {**self._initial, **templates_of(job.prompts), self._resource: llm}


class Host:
    """The object that a `LitAgent` gets as its runner and its trainer.

    Attributes:
        tracer: The tracer that is active during rollouts.
        worker_id: The number of this agent in its process, from 0.
    """

    def __init__(self, tracer: Any, worker_id: int) -> None:
        self.tracer, self.worker_id = tracer, worker_id

    def get_worker_id(self) -> str:
        """Return the worker's name."""
        return f"Worker-{self.worker_id}"

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"an agent's runner and trainer have tracer, worker_id and get_worker_id() in agentrig, and no {name!r}"
        )


def _recorder_tracer() -> Any:
    """Return agentrig's tracer, which is this process's active one: `emit_reward` and similar functions find it."""
    from agentlightning.tracer.base import get_active_tracer, set_active_tracer

    from agentrig_lightning.recorder_tracer import RecorderTracer

    active = get_active_tracer()
    if isinstance(active, RecorderTracer):
        return active
    tracer = RecorderTracer()
    tracer.init_worker(0)
    set_active_tracer(tracer)
    return tracer


def _slot(agent: Any, hooks: Sequence[Any], host: Host) -> AgentSlot:
    """Connect an agent as Agent Lightning's Trainer and runner would."""
    if not is_instance(agent):
        raise AgentrigError(f"lightning.agent takes {FORMS}; this function made {agent!r:.100}, which is no LitAgent")
    agent.set_runner(host)  # weak references: the slot keeps the host
    agent.set_trainer(host)
    return AgentSlot(agent, hooks, host)


def _bound(method: Callable[..., Any], task_input: Any, resources: Any, rollout: Any) -> Callable[[], Any]:
    """Return the call as Agent Lightning makes it, by name; a method with other names gets them by position."""
    try:
        inspect.signature(method).bind(task_input, resources=resources, rollout=rollout)
    except TypeError:
        return lambda: method(task_input, resources, rollout)
    return lambda: method(task_input, resources=resources, rollout=rollout)


async def _tell(slot: AgentSlot, what: str, **seen: Any) -> None:
    """Call the hooks; one that raises is logged, and stops nothing, as in Agent Lightning."""
    for hook in slot.hooks:
        try:
            await getattr(hook, what)(**seen)
        except Exception:
            log.exception("rollout %s: %s of the hook %r raised", seen["rollout"].rollout_id, what, hook)
