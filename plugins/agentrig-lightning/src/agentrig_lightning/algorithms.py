"""An `Algorithm` as an algorithm: it gets the run's store, adapter, data and resources."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

from agentrig.endpoints import Endpoint
from agentrig.errors import AgentrigError, place_of
from agentrig.hardware import Hardware
from agentrig.plugins.specs import AlgorithmSpec
from agentrig.rollouts import Rollout
from agentrig.runners.jobs import Result
from agentrig.secrets import Secret
from agentrig.settings import setting
from agentrig.tasks import Task, fingerprint
from agentrig.text import words_of
from agentrig_lightning.adapters import trace_adapter
from agentrig_lightning.sources import algorithm_of, check_form, datasets_for, is_fast
from agentrig_lightning.verl import is_verl, verl_spec
from agentrig_lightning.watched import WatchedAdapter


def algorithm(
    cls: Any,
    *,
    name: str,
    summary: str,
    resource: str = "main_llm",
    adapter: Callable[[], Any] | None = None,
    initial_resources: Mapping[str, Any] | None = None,
) -> AlgorithmSpec:
    """Return the spec of an `Algorithm`.

    It gets the store, the adapter, the training and validation inputs as datasets, if its `run` takes them, and as
    initial resource the endpoint that the run configures. Rewards are stored in the store in the form that it expects.

    Args:
        cls: The `Algorithm` subclass; an instance; a function decorated with `agl.algo`, or one that could be, with any
            of its parameters; or a function without parameters that makes an instance. `agl.VERL(config)` becomes
            the algorithm `verl` of agentrig-verl with that configuration, and `adapter` and the resources don't apply.
        name: The component's name.
        summary: One line about it.
        resource: The resource name under which it gets the endpoint.
        adapter: The `TraceAdapter` class that its script gives to the `Trainer`, or anything that makes an instance
            when called, for example `TraceToMessages` for `APO`. Without it, the algorithm gets the run's adapter.
        initial_resources: What its script gives to the `Trainer`, by name. They are kept: the run's endpoint is added
            under `resource` if there is no LLM among them.

    Raises:
        TypeError: `cls` is something else.
    """
    check_form(cls)
    if is_verl(cls):
        return verl_spec(cls, name=name, summary=summary)

    def build(config: Any) -> Any:
        return _AlgorithmCall(algorithm_of(cls), config, resource, name, adapter, initial_resources)

    return AlgorithmSpec(name=name, summary=summary, config=LightningAlgorithmConfig, build=build)


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

    def __init__(
        self,
        inner: Any,
        config: LightningAlgorithmConfig,
        resource: str,
        name: str,
        adapter: Callable[[], Any] | None = None,
        initial_resources: Mapping[str, Any] | None = None,
    ) -> None:
        self._inner, self._config, self._resource, self._name = inner, config, resource, name
        self._adapter, self._initial = adapter, initial_resources

    def run(self, session: Any) -> None:
        """Pass store, adapter and resources to the algorithm; file its rollouts by mode and step.

        Raises:
            AgentrigError: It raised an exception; the message has the file and the line.
            RunStopped: A guard stops the run.
        """
        from agentrig_lightning.books import ForeignBooks
        from agentrig_lightning.resources import sampling_of
        from agentrig_lightning.store_run import StoreRun

        run = StoreRun(session.runtime)
        own = session.plan.components["adapter"].spec.name if self._adapter is None else f"of {self._name}"
        # In a variable, because an algorithm keeps a weak reference only; so are the store and the trainer.
        watched = WatchedAdapter(
            self._adapter() if self._adapter is not None else trace_adapter(session.engine.adapter), name=own
        )
        session.begin()
        books = ForeignBooks(
            session,
            failure_limit=session.plan.run.failure_limit,
            learns=lambda: watched.gave_triplets and not is_fast(self._inner),
            sampling=lambda resources_id: sampling_of(run.resources(resources_id)),
            unfinished=run.unfinished,
        )
        given = session.engine.given
        known = {_key(given(t)): t for t in (*session.train_tasks, *session.validation_tasks)}

        def judge(result: Result, rollout: Any) -> float | None:
            key = _key(rollout.input)
            task = known.get(key) or Task(id=key[:12], input=_fields(rollout.input))
            mode, step = books.place(rollout.mode, rollout.resources_id)
            waiting = {result.id: (task, f"{mode}-{step}-{task.id}")}
            judged: Rollout = session.engine.judge([result], waiting, step=step, mode=mode)[0]
            books.file(judged)
            return judged.value

        inner = self._inner
        trainer = run.trainer(inner, watched.adapter)
        inner.set_store(run.store)
        inner.set_adapter(watched.adapter)
        inner.set_trainer(trainer)
        resources = self._resources()
        if resources:
            inner.set_initial_resources(resources)
        train, validation = ([given(t) for t in tasks] for tasks in (session.train_tasks, session.validation_tasks))
        datasets = datasets_for(inner.run, train, validation)
        try:
            with run.playing(judge):
                if inner.is_async():
                    asyncio.run(inner.run(**datasets))
                else:
                    inner.run(**datasets)
        except AgentrigError:
            books.save()
            raise
        except Exception as error:
            books.save()
            raise AgentrigError(f"the algorithm {self._name} raised {words_of(error)}{place_of(error)}") from error
        books.end()

    def _resources(self) -> dict[str, Any]:
        """Return the user's initial resources, and the run's endpoint if no LLM is among them."""
        from agentrig_lightning.resources import has_llm, lightning_llm

        given = dict(self._initial if self._initial is not None else self._inner.get_initial_resources() or {})
        if has_llm(given):
            return given
        endpoint = self._config.served()
        if endpoint is None:
            return given
        served = attrs.evolve(endpoint, token_ids=True).with_sampling(temperature=self._config.temperature)
        return {self._resource: lightning_llm(served, ours=False), **given}

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


def _fields(task_input: Any) -> Mapping[str, Any]:
    """Return a task's input as a task of agentrig has it: a text, or another value without names, becomes `input`."""
    return task_input if isinstance(task_input, Mapping) else {"input": task_input}


def _key(task_input: Any) -> str:
    fields = json.loads(json.dumps(dict(_fields(task_input)), default=str))
    return fingerprint([Task(id="", input=fields)])
