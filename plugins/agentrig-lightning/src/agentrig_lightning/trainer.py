"""Agent Lightning's `Trainer` for scripts: the same arguments, and the run is one of agentrig's."""

from __future__ import annotations

import logging
import os
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from agentrig import hookimpl
from agentrig.errors import ConfigError
from agentrig.observers import RunStart
from agentrig.rollouts import Rollout
from agentrig_lightning.script import AgentParts, script_plugin
from agentrig_lightning.script_run import Datasets, other_algorithm, script_specs
from agentrig_lightning.sources import check_form
from agentrig_lightning.verl import is_verl

log = logging.getLogger(__name__)

SERVE = "serve the run's store with `agentrig train --store HOST:PORT`, and let runners join with `agentrig runner`"

ABSENT: Mapping[str, str] = {
    "store": "a run has a store of its own. Leave `store` out and read `trainer.store`; for others to join, " + SERVE,
    "runner": "agentrig's own runner processes run the agent. Leave `runner` out; `hooks` see every rollout",
    "max_rollouts": "a run ends when its algorithm ends. Leave `max_rollouts` out and pass fewer rows to `fit`",
}
"""Arguments that have no counterpart here, and what to do instead."""

DEV_ROWS = 10
"""Most rows of each dataset that `dev` plays."""


class Trainer:
    """A `Trainer` of Agent Lightning that runs on agentrig: `agentrig run` gives it to a script instead of upstream's.

    A script can also import it itself: `from agentrig_lightning import Trainer`.

    The agent runs in agentrig's runner processes, each of which runs one rollout at a time, as in Agent Lightning. The
    run has a run directory with its rollouts, metrics and report; a failed rollout has a kind; guards stop a run that
    learns nothing. Runners get all environment variables of the script: its agent may read any of them.

    Args:
        dev: Deprecated; call `dev` instead of `fit`.
        n_runners: Runner processes; 1 if it is None.
        max_rollouts: Not available here.
        initial_resources: What the algorithm starts from, by name.
        tracer: Used instead of agentrig's own recorder. This and the other components may be an instance, a class, a
            function, an import path, or a dict with `type` and arguments.
        adapter: What turns spans into training data; `TracerTraceToTriplet` if it is None, also for a dict without
            `type`.
        store: Not available here.
        runner: Not available here.
        strategy: `"cs"`, `"shm"`, or one of the two classes or instances; only their `n_runners` counts, because agents
            always run in processes of their own here.
        port: Serve the run's store on this port of this machine, so that other runners can join; see the page "Runners
            on other machines". The environment variables of Agent Lightning for this count too.
        algorithm: The algorithm; `dev` takes `Baseline` if it is None.
        llm_proxy: Passed to the algorithm.
        n_workers: Former name of `n_runners`.
        max_tasks: Former name of `max_rollouts`.
        daemon: Must be True: runner processes always end with the run.
        triplet_exporter: Former name of `adapter`.
        hooks: A `Hook`, or several.
        settings: Settings of the run as on agentrig's command line, for example `["runners.deadline_s=600"]`.

    Attributes:
        directory: The run directory; None before `fit`.

    Raises:
        ConfigError: An argument, or a variable of the environment, asks for something that is not available here. The
            message names all of them and what to use instead.
    """

    other: ClassVar[str] = ""
    """An algorithm of agentrig that runs instead of `agl.VERL`; '' for none. `agentrig run` sets it."""

    more: ClassVar[Sequence[str]] = ()
    """Further settings of the run, which hold before `settings`. `agentrig run` sets it."""

    shows: ClassVar[bool] = False
    """Whether a run is displayed while it goes on. `agentrig run` sets it."""

    def __init__(
        self,
        *,
        dev: bool = False,
        n_runners: int | None = None,
        max_rollouts: int | None = None,
        initial_resources: Mapping[str, Any] | None = None,
        tracer: Any = None,
        adapter: Any = None,
        store: Any = None,
        runner: Any = None,
        strategy: Any = None,
        port: int | None = None,
        algorithm: Any = None,
        llm_proxy: Any = None,
        n_workers: int | None = None,
        max_tasks: int | None = None,
        daemon: bool = True,
        triplet_exporter: Any = None,
        hooks: Any = None,
        settings: Sequence[str] = (),
    ) -> None:
        from agentrig_lightning import components

        given = {"store": store, "runner": runner}
        given["max_rollouts"] = max_tasks if max_rollouts is None else max_rollouts
        problems = [f"{name}: {ABSENT[name]}" for name, value in given.items() if value is not None]
        if not daemon:
            problems.append("daemon=False: runner processes always end with the run. Leave `daemon` out")
        problems += components.problems_of(strategy, os.environ, SERVE)
        if problems:
            raise ConfigError("Trainer: this script asks for what agentrig does not have:\n  " + "\n  ".join(problems))
        if dev:
            _deprecated("Trainer(dev=True)", "Trainer.dev(...)")
        if n_workers is not None:
            _deprecated("n_workers", "n_runners")
        if triplet_exporter is not None:
            _deprecated("triplet_exporter", "adapter")
        runners = n_runners if n_runners is not None else n_workers if n_workers is not None else 1
        self.n_runners = self.n_workers = components.runners_of(strategy) or runners
        self.initial_resources = dict(initial_resources) if initial_resources is not None else None
        self.tracer = components.make_tracer(tracer)
        self.adapter = self.triplet_exporter = components.make_adapter(
            adapter if adapter is not None else triplet_exporter
        )
        self.algorithm = components.make_algorithm(algorithm)
        if self.algorithm is not None:
            check_form(self.algorithm)
        self.hooks = components.make_hooks(hooks)
        self.llm_proxy = components.make_proxy(llm_proxy)
        served = port if port is not None else components.port_of(strategy)
        store = ("runners.use=lightning", f'runners.store="127.0.0.1:{served}"') if served is not None else ()
        self.settings = (*store, *settings)
        self.directory: Path | None = None
        self.run_store: Any = None

    @property
    def store(self) -> Any:
        """The store of the run, while it runs and after it.

        Raises:
            ConfigError: There was no run yet, or its algorithm is one of agentrig's, which uses no store.
        """
        if self.run_store is None:
            raise ConfigError("trainer.store: the store is that of a run of the script's own algorithm; call fit first")
        return self.run_store

    def fit(self, agent: Any, train_dataset: Any = None, *, val_dataset: Any = None) -> None:
        """Run the algorithm with the agent until it ends.

        Args:
            agent: A `LitAgent`: an instance, a class, or a function decorated with `agl.rollout`.
            train_dataset: Rows for the algorithm: anything with a length and an index.
            val_dataset: The same, for validation.

        Raises:
            ConfigError: There is no algorithm, or the agent can't be sent to a runner process.
            AgentrigError: The run could not start, or was stopped; the message says why.
        """
        if isinstance(train_dataset, str):
            raise ConfigError(f"fit with a server's address ({train_dataset}) is not available here: {SERVE}")
        if self.algorithm is None:
            raise ConfigError(
                "Trainer has no algorithm: give it one (algorithm=...), or call dev. For an algorithm in another "
                f"process: {SERVE}"
            )
        self._run(agent, self.algorithm, Datasets(train_dataset, val_dataset))

    def dev(self, agent: Any, train_dataset: Any = None, *, val_dataset: Any = None, dev_dataset: Any = None) -> None:
        """Run the first ten rows of each dataset once, and print every span; nothing is learned.

        It uses `Baseline`, or the `FastAlgorithm` that the trainer has.

        Args:
            agent: As for `fit`.
            train_dataset: Rows that are played in the mode `train`.
            val_dataset: Rows that are played in the mode `val`.
            dev_dataset: Another name of `train_dataset`.

        Raises:
            TypeError: The trainer's algorithm is not a `FastAlgorithm`; or both names of the rows are given.
            AgentrigError: As for `fit`.
        """
        from agentlightning.algorithm import Baseline, FastAlgorithm

        if train_dataset is not None and dev_dataset is not None:
            raise TypeError("Trainer.dev() takes train_dataset or dev_dataset, not both: they name the same rows")
        algorithm = self.algorithm if self.algorithm is not None else Baseline()
        if not isinstance(algorithm, FastAlgorithm):
            raise TypeError(f"Trainer.dev() needs a FastAlgorithm; this one is {type(algorithm).__name__}. Call fit")
        given = train_dataset if dev_dataset is None else dev_dataset
        self._run(agent, algorithm, Datasets(_first_rows(given), _first_rows(val_dataset)), _Spans())

    def fit_v0(self, *arguments: Any, **named: Any) -> None:
        """Raise: the client and server of Agent Lightning 0.1 are not available here.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError("fit_v0, the client of Agent Lightning 0.1, is not available here: write fit(agent, rows)")

    def _run(self, agent: Any, algorithm: Any, datasets: Datasets, display: Any = None) -> None:
        from agentrig.plan import resolve, to_toml
        from agentrig.run.training import train
        from agentrig.view.live import LiveDisplay

        name = re.sub(r"[^a-z0-9]+", "-", Path(sys.argv[0]).stem.lower()).strip("-") or "script"
        parts = AgentParts(
            agent=agent,
            arguments={
                "name": f"{name}-agent",
                "summary": f"{type(agent).__name__} of {name}.",
                "tracer": self.tracer,
                "hooks": self.hooks,
                "environment": ("*",),
                "whole_rows": True,
                "initial_resources": self.initial_resources if is_verl(algorithm) else None,
            },
        )
        used = {kind: {"use": f"{name}-{kind}"} for kind in ("tasks", "agent", "adapter", "algorithm")}
        run_file: dict[str, dict[str, Any]] = {
            **used,
            "reward": {"use": "own"},
            "runners": {"n": self.n_runners, "threads": 1},
        }
        other = None
        if self.other and display is None:
            other, keys = other_algorithm(self.other, algorithm, datasets)
            run_file["algorithm"] |= keys
        specs = script_specs(self, name, algorithm, datasets, other)
        with script_plugin(parts, specs) as file:
            recipe = file.parent / f"{name}.toml"
            recipe.write_text(to_toml(run_file))
            plan = resolve(str(recipe), overrides=[*self.more, *self.settings], files=[str(file)])
            plan.registry.add_observer(_Directory(self), "directory")
            if display is not None or self.shows:
                plan.registry.add_observer(display or LiveDisplay(), "display")
            train(plan)


class _Directory:
    """An observer that tells a trainer the directory of its run."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    @hookimpl
    def on_run_start(self, event: RunStart) -> None:
        """Keep the directory."""
        self._trainer.directory = Path(event.directory)


class _Spans:
    """An observer that prints every span of a rollout when it ends."""

    @hookimpl
    def on_rollout_end(self, rollout: Rollout) -> None:
        """Print the rollout."""
        from rich.console import Console

        from agentrig.view.terminal import span_tree

        Console().print(span_tree(rollout))


def _first_rows(dataset: Any) -> Any:
    """Return at most `DEV_ROWS` rows of a dataset, and say how many are left out."""
    if dataset is None or len(dataset) <= DEV_ROWS:
        return dataset
    log.warning("dev plays the first %d of %d rows; fit with algorithm=Baseline() plays all", DEV_ROWS, len(dataset))
    return [dataset[i] for i in range(DEV_ROWS)]


def _deprecated(old: str, new: str) -> None:
    warnings.warn(f"`{old}` is deprecated: write `{new}`", DeprecationWarning, stacklevel=3)
