"""Wraps components that were written for Agent Lightning 0.3 as agentrig specs, in one line each.

```python
@hookimpl
def register_agents():
    yield lightning.agent(MyLitAgent, name="mine", summary="My LitAgent, unchanged.")
```
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

from agentrig.adapters import Triplet
from agentrig.endpoints import Endpoint
from agentrig.errors import AgentrigError
from agentrig.hardware import Hardware
from agentrig.lightning_import import skip_litellm
from agentrig.plugins.specs import AdapterSpec, AgentSpec, AlgorithmSpec
from agentrig.rollouts import Rollout
from agentrig.runners.jobs import Result
from agentrig.secrets import Secret
from agentrig.settings import setting
from agentrig.tasks import Task, fingerprint
from agentrig.traces import Trace
from agentrig.tracing.recorder import current

skip_litellm()
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


def adapter(cls: Factory, *, name: str, summary: str) -> AdapterSpec:
    """Return the spec of a `TraceAdapter` whose `adapt` gives triplets with token ids."""

    def build(config: Any) -> Any:
        return _AdapterCall(cls())

    return AdapterSpec(name=name, summary=summary, build=build)


def algorithm(cls: Factory, *, name: str, summary: str, resource: str = "main_llm") -> AlgorithmSpec:
    """Return the spec of an `Algorithm`.

    It gets the store, the adapter, the training and validation inputs as datasets, and as initial resource
    the endpoint that the run configures. Rewards are stored in the store in the form that it expects.
    """

    def build(config: Any) -> Any:
        return _AlgorithmCall(cls(), config, resource)

    return AlgorithmSpec(name=name, summary=summary, config=LightningAlgorithmConfig, build=build)


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

        from agentrig.runners.runtime import RecorderTracer

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


class _AdapterCall:
    """Makes a `TraceAdapter` callable as `adapter(trace)`."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __call__(self, trace: Trace) -> Sequence[Triplet]:
        """Return the triplets; an empty trace is not passed to the adapter, which would raise."""
        from agentrig.runners.lightning_spans import to_lightning

        if not trace.llm_calls():
            return ()
        found: list[Triplet] = []
        taken: set[str] = set()
        for triplet in self.inner.adapt(to_lightning(trace, trace.rollout_id, f"{trace.rollout_id}-0")):
            prompt, response = _ids(triplet.prompt), _ids(triplet.response)
            if not prompt or not response:
                continue
            call = next(
                (
                    c
                    for c in trace.llm_calls()
                    if c.id not in taken
                    and list(c.attributes.get("response_token_ids", ())) == list(response)
                    and list(c.attributes.get("prompt_token_ids", ())) == list(prompt)
                ),
                None,
            )
            taken.update({call.id} if call is not None else ())
            logprobs = call.attributes.get("response_logprobs") if call is not None else None
            found.append(
                Triplet(
                    prompt_ids=tuple(prompt),
                    response_ids=tuple(response),
                    logprobs=tuple(logprobs) if logprobs else None,
                    reward=triplet.reward,
                    node=str(triplet.metadata.get("agent_name") or ""),
                    span_id=call.id if call is not None else "",
                )
            )
        return found


def _ids(part: Any) -> Sequence[int]:
    return part.get("token_ids") or () if isinstance(part, Mapping) else ()


@attrs.frozen(kw_only=True)
class LightningAlgorithmConfig:
    """Settings of an algorithm that was written for Agent Lightning."""

    endpoint: str = setting("", help="an OpenAI-compatible server (…/v1); empty for OPENAI_BASE_URL, if that is set")
    model: str = setting("", help="the model to ask it for; empty for its first")
    api_key: Secret | None = setting(None, secret=True, help="the server's key; OPENAI_API_KEY when it is not set")
    temperature: float = setting(1.0, help="sampling temperature", ge=0)

    def served(self) -> Endpoint | None:
        """Return the server from the run's settings or the environment, or None."""
        from agentrig.endpoints import environment_endpoint

        key = self.api_key.reveal() if self.api_key else None
        return environment_endpoint(self.endpoint or None, model=self.model or None, api_key=key)


class _AlgorithmCall:
    """Runs an `Algorithm` of Agent Lightning on a session."""

    def __init__(self, inner: Any, config: LightningAlgorithmConfig, resource: str) -> None:
        self._inner, self._config, self._resource = inner, config, resource

    def run(self, session: Any) -> None:
        """Pass store, adapter and resources to the algorithm; store its rollouts as one step."""
        from agentrig.runners.lightning_spans import lightning_llm
        from agentrig.runners.runtime import SpanAdapter

        session.plan_steps(1)
        endpoint = self._config.served()
        known = {_key(t.input): t for t in (*session.train_tasks, *session.validation_tasks)}
        ended: list[Rollout] = []

        def reward_of(result: Result, task_input: Mapping[str, Any]) -> float | None:
            task = known.get(_key(task_input)) or Task(id=_key(task_input)[:12], input=task_input)
            rollout = session.engine.judge([result], {result.id: (task, task.id)}, step=1, mode="train")[0]
            ended.append(rollout)
            value: float | None = rollout.value
            return value

        session.runtime.reward_of = reward_of
        adapter = SpanAdapter(session.engine.adapter)
        inner = self._inner
        inner.set_store(session.runtime.store)
        inner.set_adapter(adapter)
        inner.set_trainer(session.runtime.trainer)
        if endpoint is not None:
            served = attrs.evolve(endpoint, token_ids=True).with_sampling(temperature=self._config.temperature)
            inner.set_initial_resources({self._resource: lightning_llm(served, ours=False)})
        train = [dict(t.input) for t in session.train_tasks]
        validation = [dict(t.input) for t in session.validation_tasks]
        if inner.is_async():
            asyncio.run(inner.run(train_dataset=train, val_dataset=validation))
        else:
            inner.run(train_dataset=train, val_dataset=validation)
        session.end_foreign(ended)

    @contextmanager
    def serve(self, *, hardware: Hardware, checkpoint: Path | None) -> Iterator[Endpoint]:
        """Yield the endpoint that the run configures.

        Raises:
            AgentrigError: The run configures none, or a checkpoint was given.
        """
        endpoint = self._config.served()
        if endpoint is None or checkpoint is not None:
            raise AgentrigError("this algorithm serves no checkpoints; give algorithm.endpoint or OPENAI_BASE_URL")
        yield endpoint


def _key(task_input: Mapping[str, Any]) -> str:
    return fingerprint([Task(id="", input=json.loads(json.dumps(dict(task_input))))])


__all__ = ["LightningAlgorithmConfig", "adapter", "agent", "algorithm", "tracer"]
