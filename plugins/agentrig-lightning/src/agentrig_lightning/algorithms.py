"""An `Algorithm` as an algorithm: it gets the run's store, adapter, data and resources."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

from agentrig.endpoints import Endpoint
from agentrig.errors import AgentrigError, place_of
from agentrig.hardware import Hardware
from agentrig.plugins.specs import AlgorithmSpec
from agentrig.pools import Result
from agentrig.rollouts import Rollout
from agentrig.secrets import Secret
from agentrig.settings import setting
from agentrig.tasks import Task, fingerprint
from agentrig.text import words_of
from agentrig_lightning.adapters import trace_adapter, watched
from agentrig_lightning.instances import parameters_of
from agentrig_lightning.verl import is_verl, verl_spec

PARTS = ("store", "adapter", "llm_proxy", "initial_resources", "train_dataset", "val_dataset")
"""The parameters that a function for `agl.algo` may have."""

FORMS = "an Algorithm class, an instance, a function for agl.algo, or a function without parameters that makes one"


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
    return spec_of(cls, name, summary, resource=resource, adapter=adapter, initial=initial_resources)


def spec_of(source: Any, name: str, summary: str, **more: Any) -> AlgorithmSpec:
    """Return the spec; the other arguments are those of `AlgorithmCall`."""

    def build(config: Any) -> AlgorithmCall:
        return AlgorithmCall(algorithm_of(source), config, name=name, **more)

    return AlgorithmSpec(name=name, summary=summary, config=LightningAlgorithmConfig, build=build)


def check_form(source: Any) -> None:
    """Raise `TypeError` if no algorithm can be made from something, without making one."""
    if _is_algorithm(source) or isinstance(source, type):
        return
    if not callable(source):
        raise TypeError(f"lightning.algorithm takes {FORMS}; this is {source!r:.100}")
    odd = [name for name in parameters_of(source, required=True) if name not in PARTS]
    if odd:
        raise TypeError(
            f"lightning.algorithm: the function {getattr(source, '__name__', source)} has the parameter "
            f"{', '.join(odd)}, which no algorithm gets; it can have {', '.join(PARTS)}"
        )


def _is_algorithm(source: Any) -> bool:
    return not isinstance(source, type) and hasattr(type(source), "set_initial_resources")


def algorithm_of(source: Any) -> Any:
    """Return the `Algorithm`: an instance is used itself."""
    if _is_algorithm(source):
        return source
    if not isinstance(source, type) and any(name in PARTS for name in parameters_of(source)):
        from agentlightning import algo

        return algo(source)
    made = source()
    if not _is_algorithm(made):
        raise AgentrigError(f"lightning.algorithm takes {FORMS}; this one made {made!r:.100}, which is no Algorithm")
    return made


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


@attrs.frozen
class Script:
    """A script's `Trainer`, and the datasets that it gave to `fit` or `dev`."""

    trainer: Any
    train: Any
    validation: Any


class AlgorithmCall:
    """Runs an `Algorithm` on a session; one of a script gets the script's own datasets, resources and proxy."""

    def __init__(
        self,
        inner: Any,
        config: LightningAlgorithmConfig,
        *,
        name: str,
        resource: str = "main_llm",
        adapter: Callable[[], Any] | None = None,
        initial: Mapping[str, Any] | None = None,
        script: Script | None = None,
    ) -> None:
        self._inner, self._config, self._name, self._resource = inner, config, name, resource
        self._adapter, self._initial, self._script = adapter, initial, script

    def run(self, session: Any) -> None:
        """Pass store, adapter and resources to the algorithm; file its rollouts by mode and step."""
        from agentlightning.algorithm import FastAlgorithm

        from agentrig_lightning.store_pool import store_pool
        from agentrig_lightning.store_run import StepRecords

        inner = self._inner
        pool = store_pool(session.runtime)
        store = pool.store
        own = session.plan.components["adapter"].spec.name if self._adapter is None else f"of {self._name}"
        theirs = self._adapter() if self._adapter is not None else trace_adapter(session.engine.adapter)
        adapter = watched(theirs, name=own)
        session.begin()
        learns = not isinstance(inner, FastAlgorithm)  # Baseline looks at triplets, and learns nothing
        records = StepRecords(session, store, learns=lambda: learns and adapter.gave_triplets)
        given = session.engine.given
        known = {_key(given(t)): t for t in (*session.train_tasks, *session.validation_tasks)}

        def judge(result: Result, rollout: Any) -> float | None:
            key = _key(rollout.input)
            task = known.get(key) or Task(id=key[:12], input=_fields(rollout.input))
            mode, step = records.place(rollout.mode, rollout.resources_id)
            waiting = {result.id: (task, f"{mode}-{step}-{task.id}")}
            judged: Rollout = session.engine.scored([result], waiting, step=step, mode=mode)[0]
            records.file(judged)
            return judged.value

        inner.set_store(store)
        inner.set_adapter(adapter)
        trainer = self._trainer(store, adapter)  # in a variable, as the adapter: an algorithm has weak references only
        inner.set_trainer(trainer)
        train, validation = ([given(t) for t in tasks] for tasks in (session.train_tasks, session.validation_tasks))
        datasets = datasets_for(inner.run, train, validation)
        if self._script is not None:
            datasets = {"train_dataset": self._script.train, "val_dataset": self._script.validation}
        try:
            with pool.playing(session.runtime, judge):
                if inner.is_async():
                    import asyncio

                    asyncio.run(inner.run(**datasets))
                else:
                    inner.run(**datasets)
        except AgentrigError:
            records.save()
            raise
        except Exception as error:
            records.save()
            raise AgentrigError(f"the algorithm {self._name} raised {words_of(error)}{place_of(error)}") from error
        records.end()

    def _trainer(self, store: Any, adapter: Any) -> Any:
        """Give the algorithm its resources and its proxy; return the `Trainer` that it sees."""
        if self._script is None:
            from agentlightning import SharedMemoryExecutionStrategy as Strategy

            from agentrig_lightning.recorder_tracer import RecorderTracer
            from agentrig_lightning.store_run import LightningTrainer

            if resources := self._resources():
                self._inner.set_initial_resources(resources)
            strategy = Strategy(n_runners=1, main_thread="algorithm", managed_store=False)
            parts = {"algorithm": self._inner, "store": store, "tracer": RecorderTracer(), "adapter": adapter}
            return LightningTrainer(n_runners=1, strategy=strategy, **parts)
        trainer = self._script.trainer
        trainer.store = store
        if trainer.llm_proxy is not None:
            trainer.llm_proxy.set_store(store)
            self._inner.set_llm_proxy(trainer.llm_proxy)
        if trainer.initial_resources is not None:
            self._inner.set_initial_resources(trainer.initial_resources)
        return trainer

    def _resources(self) -> dict[str, Any]:
        """Return the user's initial resources, and the run's endpoint if no LLM is among them."""
        from agentrig_lightning.resources import has_llm, lightning_llm

        given = dict(self._initial if self._initial is not None else self._inner.get_initial_resources() or {})
        endpoint = None if has_llm(given) else self._config.served()
        if endpoint is None:
            return given
        served = attrs.evolve(endpoint, token_ids=True).with_sampling(temperature=self._config.temperature)
        return {self._resource: lightning_llm(served, own_fields=False), **given}

    @contextmanager
    def serve(self, *, hardware: Hardware, checkpoint: Path | None) -> Iterator[Endpoint]:
        """Yield the endpoint that the run configures."""
        endpoint = self._config.served()
        if endpoint is None or checkpoint is not None:
            raise AgentrigError("this algorithm serves no checkpoints; give algorithm.endpoint or OPENAI_BASE_URL")
        yield endpoint


def datasets_for(run: Callable[..., Any], train: Sequence[Any], validation: Sequence[Any]) -> Mapping[str, Any]:
    """Return the datasets that an algorithm's `run` takes, by its parameters' names."""
    # That of `agl.algo` refuses a dataset that its function does not take.
    function = getattr(getattr(run, "__self__", None), "_algorithm_func", run)
    parameters = inspect.signature(function).parameters
    every = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    given = {"train_dataset": train, "val_dataset": validation}
    return {name: rows for name, rows in given.items() if every or name in parameters}


def _fields(task_input: Any) -> Mapping[str, Any]:
    """Return a task's input as a task of agentrig has it: a text, or another value without names, becomes `input`."""
    return task_input if isinstance(task_input, Mapping) else {"input": task_input}


def _key(task_input: Any) -> str:
    fields = json.loads(json.dumps(dict(_fields(task_input)), default=str))
    return fingerprint([Task(id="", input=fields)])
