"""What a script's `Trainer` gives to a run: its rows as tasks, its adapter, and its algorithm with its own data."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from agentrig.errors import ConfigError
from agentrig.plugins.specs import AdapterSpec, AlgorithmSpec, Spec, TasksSpec
from agentrig.tasks import Task
from agentrig_lightning.adapters import adapter
from agentrig_lightning.algorithms import algorithm
from agentrig_lightning.sources import is_fast
from agentrig_lightning.verl import is_verl, keys_for

log = logging.getLogger(__name__)


@attrs.frozen
class Datasets:
    """The datasets of a script, as it gave them; None for one that it did not give."""

    train: Any
    validation: Any


class ScriptTasks:
    """The rows of a script as tasks, for the run's records; the algorithm gets the script's own objects.

    Which columns are gold is not known, so the run says that its agent sees its gold.

    Args:
        datasets: What the script gave to `fit` or `dev`.
    """

    splits: Sequence[str] = ("train", "validation")
    held_out: Sequence[str] = ()
    whole_rows = True
    optional: Sequence[str] = ("train", "validation", "report")
    roles: Mapping[str, str] = {"train": "train", "validation": "validation"}

    def __init__(self, datasets: Datasets) -> None:
        self._datasets = datasets

    def load(self, split: str) -> Sequence[Task]:
        """Return a split's rows; what JSON can't hold becomes text."""
        rows = self._datasets.train if split == "train" else self._datasets.validation
        found = [rows[i] for i in range(len(rows))] if rows is not None else []
        return [_task(f"{split}-{i}", row) for i, row in enumerate(found)]


def _task(task_id: str, row: Any) -> Task:
    plain = json.loads(json.dumps(row, default=str))
    return Task(id=task_id, input=plain if isinstance(plain, dict) else {"input": plain}, row=plain)


def other_algorithm(use: str, inner: Any, datasets: Datasets) -> tuple[AlgorithmSpec, dict[str, Any]]:
    """Return an algorithm of agentrig that runs in the place of a script's `agl.VERL`, and its keys for that.

    Raises:
        ConfigError: The script has another algorithm than `agl.VERL`.
        LookupFailed: There is no algorithm of that name.
    """
    from agentrig.plugins.loading import load

    if not is_verl(inner):
        raise ConfigError(
            f"--algorithm {use} takes the place of agl.VERL, and this script trains by {type(inner).__name__}: leave "
            "--algorithm out"
        )
    spec: Any = load().find("algorithm", use).spec
    keys, absent = keys_for(spec.config, inner.config, rows=len(datasets.train if datasets.train is not None else ()))
    if absent:
        log.warning("%s has no key for these settings of agl.VERL, and leaves them out: %s", use, "; ".join(absent))
    return spec, keys


def script_specs(
    trainer: Any, name: str, inner: Any, datasets: Datasets, other: AlgorithmSpec | None = None
) -> Sequence[Spec]:
    """Return the specs of a script's tasks, adapter and algorithm; the names of all begin with `name`.

    Args:
        trainer: The script's.
        name: The script's.
        inner: Its algorithm.
        datasets: What it gave to `fit` or `dev`.
        other: An algorithm of agentrig that runs in the place of `inner`.
    """
    tasks = TasksSpec(name=f"{name}-tasks", summary=f"The rows of {name}.", build=lambda config: ScriptTasks(datasets))
    if other is not None:
        found = attrs.evolve(other, name=f"{name}-algorithm")
    else:
        own: Any = inner if is_verl(inner) else lambda: scripted(trainer, inner, datasets)
        found = algorithm(
            own,
            name=f"{name}-algorithm",
            summary=f"{type(inner).__name__} of {name}.",
            adapter=lambda: trainer.adapter,
        )
    return tasks, adapter_spec(trainer.adapter, name), found


def adapter_spec(theirs: Any, name: str) -> AdapterSpec:
    """Return the run's adapter: the script's, if it makes triplets, else one that takes every call."""
    from agentlightning.adapter import TracerTraceToTriplet, TraceToTripletBase

    makes_triplets = isinstance(theirs, TraceToTripletBase)
    return adapter(
        lambda: theirs if makes_triplets else TracerTraceToTriplet(),
        name=f"{name}-adapter",
        summary=f"{type(theirs).__name__} of {name}.",
    )


def scripted(trainer: Any, inner: Any, datasets: Datasets) -> Any:
    """Return an `Algorithm` that runs a script's own with the script's own adapter, resources, proxy and datasets."""
    from agentlightning.algorithm import Algorithm, FastAlgorithm

    base: Any = FastAlgorithm if is_fast(inner) else Algorithm

    class Scripted(base):
        def is_async(self) -> bool:
            return bool(inner.is_async())

        def set_store(self, store: Any) -> None:
            super().set_store(store)
            inner.set_store(store)
            trainer.run_store = store
            if trainer.llm_proxy is not None:
                trainer.llm_proxy.set_store(store)
                inner.set_llm_proxy(trainer.llm_proxy)
            if trainer.initial_resources is not None:
                inner.set_initial_resources(trainer.initial_resources)

        def set_adapter(self, adapter: Any) -> None:
            super().set_adapter(adapter)
            inner.set_adapter(adapter)

        def set_trainer(self, _: Any) -> None:
            inner.set_trainer(trainer)

        def set_initial_resources(self, resources: Any) -> None:
            """A script gives its resources itself; it has no [algorithm] endpoint."""

        def run(self, train_dataset: Any = None, val_dataset: Any = None) -> Any:
            return inner.run(train_dataset=datasets.train, val_dataset=datasets.validation)

    return Scripted()
