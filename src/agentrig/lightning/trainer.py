"""Agent Lightning's `Trainer` for scripts: the same arguments, and the run is one of agentrig's."""

from __future__ import annotations

import logging
import os
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrig.errors import ConfigError
from agentrig.lightning.script import AgentParts, script_plugin
from agentrig.lightning.script_run import Datasets, script_specs
from agentrig.lightning.sources import check_form
from agentrig.lightning.verl import is_verl

log = logging.getLogger(__name__)

SERVE = "serve the run's store with `agentrig train --store HOST:PORT`, and let runners join with `agentrig runner`"

ABSENT: Mapping[str, str] = {
    "store": "a run has a store of its own. Leave `store` out and read `trainer.store`; for others to join, " + SERVE,
    "runner": "agentrig's own runner processes run the agent. Leave `runner` out; `hooks` see every rollout",
    "max_rollouts": "a run ends when its algorithm ends. Leave `max_rollouts` out and pass fewer rows to `fit`",
}
"""Arguments that have no counterpart here, and what to do instead."""


class Trainer:
    """A `Trainer` of Agent Lightning that runs on agentrig: change a script's import, and nothing else.

    ```python
    from agentrig.lightning import Trainer
    ```

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
        from agentrig.lightning_import import import_lightning

        import_lightning()
        from agentrig.lightning import components

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
        self.settings = (*((f'runners.store="127.0.0.1:{served}"',) if served is not None else ()), *settings)
        self.directory: Path | None = None
        self._store: Any = None

    @property
    def store(self) -> Any:
        """The store of the run, while it runs and after it.

        Raises:
            ConfigError: There was no run yet.
        """
        if self._store is None:
            raise ConfigError("trainer.store: the store is the run's; call fit or dev first")
        return self._store

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

    def dev(self, agent: Any, train_dataset: Any = None, *, val_dataset: Any = None) -> None:
        """Run every row once, with `Baseline` or the `FastAlgorithm` that the trainer has; arguments as for `fit`.

        Raises:
            TypeError: The trainer's algorithm is not a `FastAlgorithm`.
            AgentrigError: As for `fit`.
        """
        from agentlightning.algorithm import Baseline, FastAlgorithm

        algorithm = self.algorithm if self.algorithm is not None else Baseline()
        if not isinstance(algorithm, FastAlgorithm):
            raise TypeError(f"Trainer.dev() needs a FastAlgorithm; this one is {type(algorithm).__name__}. Call fit")
        self._run(agent, algorithm, Datasets(train_dataset, val_dataset))

    def fit_v0(self, *arguments: Any, **named: Any) -> None:
        """Raise: the client and server of Agent Lightning 0.1 are not available here.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError("fit_v0, the client of Agent Lightning 0.1, is not available here: write fit(agent, rows)")

    def _run(self, agent: Any, algorithm: Any, datasets: Datasets) -> None:
        from agentrig.plan import resolve
        from agentrig.run.training import train

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
        specs = script_specs(self, name, algorithm, datasets)
        with script_plugin(parts, specs) as file:
            recipe = file.parent / f"{name}.toml"
            recipe.write_text(_run_file(name, self.n_runners))
            train(resolve(str(recipe), overrides=self.settings, files=[str(file)]))

    def joined(self, session: Any) -> None:
        """Keep what the run has and its script may read; called when the run starts."""
        self._store, self.directory = session.runtime.store, Path(session.directory)


def _run_file(name: str, runners: int) -> str:
    used = {kind: f"{name}-{kind}" for kind in ("tasks", "agent", "adapter", "algorithm")}
    lines = [f'[{kind}]\nuse = "{component}"\n' for kind, component in {**used, "reward": "own"}.items()]
    return "\n".join([*lines, f"[runners]\nn = {runners}\nthreads = 1\n"])


def _deprecated(old: str, new: str) -> None:
    warnings.warn(f"`{old}` is deprecated: write `{new}`", DeprecationWarning, stacklevel=3)
