"""Agent Lightning's `Trainer` for scripts: the same arguments, and the run is one of agentrig's."""

from __future__ import annotations

import functools
import importlib
import json
import logging
import os
import re
import runpy
import shlex
import sys
import traceback
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

import agentlightning
import attrs
from agentlightning import Trainer as LightningTrainer
from agentlightning.adapter import TracerTraceToTriplet, TraceToTripletBase
from agentlightning.algorithm import Baseline, FastAlgorithm
from agentlightning.execution import ClientServerExecutionStrategy, SharedMemoryExecutionStrategy
from agentlightning.tracer import Tracer
from agentlightning.trainer.init_utils import build_component

from agentrig import hookimpl
from agentrig.errors import AgentrigError, ConfigError, place_of
from agentrig.observers import RunStart
from agentrig.plan import resume_command
from agentrig.plugins.specs import AdapterSpec, AlgorithmSpec, Spec, TasksSpec
from agentrig.rollouts import Rollout
from agentrig.tasks import Task
from agentrig_lightning.adapters import adapter
from agentrig_lightning.algorithms import Script, algorithm, check_form, spec_of
from agentrig_lightning.joining import role_of, unmanaged
from agentrig_lightning.scripts import script_plugin
from agentrig_lightning.verl import credit_for, in_words_of_script, is_verl, keys_for

log = logging.getLogger(__name__)

SETTING = re.compile(
    r"(agentrig train .*)|(?<![\w.\-])(?<!--set )(?:algorithm|credit|hardware|run|runners|server)\.\w+=\S+"
)
"""A setting in an error's cure; `agentrig run` has `--set` for it. Those of `agentrig train` (group 1) stay."""

SERVE = "serve the run's store with `agentrig train --store HOST:PORT`, and let runners join with `agentrig runner`"

ABSENT: Mapping[str, str] = {
    "store": "a run has a store of its own. Leave `store` out and read `trainer.store`; for others to join, " + SERVE,
    "runner": "agentrig's own runner processes run the agent. Leave `runner` out; `hooks` see every rollout",
    "max_rollouts": "a run ends when its algorithm ends. Leave `max_rollouts` out and pass fewer rows to `fit`",
}
"""Arguments that have no counterpart here, and what to do instead."""

DEV_ROWS = 10
"""Most rows of each dataset that `dev` plays."""


class Trainer(LightningTrainer):
    """Agent Lightning's `Trainer`, whose `fit` and `dev` are runs of agentrig; `agentrig run` gives it to a script.

    A script can also import it itself: `from agentrig_lightning import Trainer`. It takes the arguments of Agent
    Lightning's, and makes components from them as that does. The agent runs in agentrig's runner processes, each of
    which runs one rollout at a time, and which get all environment variables of the script. Of a strategy only
    `n_runners` and, in a dict, `server_port` count. `port` serves the run's store, so that other runners can join.

    Args:
        settings: Settings of the run as on agentrig's command line, for example `["runners.deadline_s=600"]`.
        arguments: Those of Agent Lightning's `Trainer`, but `store`, `runner`, `max_rollouts` and `daemon=False`.

    Attributes:
        directory: The run directory; None before `fit`.

    Raises:
        ConfigError: An argument, or a variable of the environment, asks for something that is not available here. The
            message names all of them and what to use instead.
    """

    other: ClassVar[str] = ""
    """An algorithm of agentrig that runs instead of `agl.VERL`; '' for none. `agentrig run` sets it."""

    more: ClassVar[Sequence[str]] = ()
    """Further settings of the run, which `settings` override. `agentrig run` sets it."""

    resumed: ClassVar[Path | None] = None
    """The run that the script's first run resumes; None for a new run. `agentrig run` sets it."""

    resumes: ClassVar[str] = ""
    """The command that resumes a run of the script, with `{run}` for its directory. `agentrig run` sets it."""

    shows: ClassVar[bool] = False
    """Whether a run is displayed while it goes on. `agentrig run` sets it."""

    def __init__(self, *, settings: Sequence[str] = (), **arguments: Any) -> None:
        self._store: Any = None
        self.directory: Path | None = None
        problems = [f"{name}: {why}" for name, why in ABSENT.items() if arguments.get(name) is not None]
        if arguments.get("max_tasks") is not None:
            problems.append(f"max_tasks, the former max_rollouts: {ABSENT['max_rollouts']}")
        if not arguments.get("daemon", True):
            problems.append("daemon=False: runner processes always end with the run. Leave `daemon` out")
        if role_of(os.environ) == "runner":
            problems.append(f"AGL_CURRENT_ROLE=runner: a script is the algorithm's side; {SERVE}")
        if unmanaged(os.environ):
            problems.append(f"AGL_MANAGED_STORE=0: a run has a store of its own; {SERVE}")
        strategy = arguments.get("strategy")
        role = strategy.get("role") if isinstance(strategy, Mapping) else getattr(strategy, "role", None)
        if role not in (None, "both"):
            problems.append(f"the strategy's role {role!r}: a script is algorithm and runner; {SERVE}")
        if problems:
            raise ConfigError("Trainer: this script asks for what agentrig does not have:\n  " + "\n  ".join(problems))
        if arguments.get("llm_proxy") is not None:
            _ = agentlightning.LLMProxy  # imports litellm
        super().__init__(**arguments)
        self._store = None  # not the one that Agent Lightning made
        if self.algorithm is not None:
            check_form(self.algorithm)
        named = strategy.get("server_port") if isinstance(strategy, Mapping) else None
        served = self.port if self.port is not None else named
        store = ("runners.use=lightning", f'runners.store="127.0.0.1:{served}"') if served is not None else ()
        self.settings = (*store, *settings)

    def _make_tracer(self, tracer: Any) -> Any:
        """Return what makes the tracer in a runner process, or None for agentrig's own."""
        return None if tracer is None else _TracerFactory(tracer)

    def _make_runner(self, runner: Any) -> None:
        """Make none."""

    def _make_strategy(self, strategy: Any, **more: Any) -> Any:
        """Check the strategy as Agent Lightning does; agents always run in processes of the run."""
        if strategy == "shm" or (isinstance(strategy, Mapping) and strategy.get("type") == "shm"):
            given = strategy if isinstance(strategy, Mapping) else {"type": "shm"}
            strategy = {"main_thread": "algorithm", **given}  # else it refuses several runners
        try:
            made = super()._make_strategy(strategy, **more)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"Trainer: strategy={strategy!r:.80}: {error}") from None
        if type(made) not in (ClientServerExecutionStrategy, SharedMemoryExecutionStrategy):
            raise ConfigError(f'Trainer: strategy={strategy!r:.80}: there are "cs" and "shm" only. Leave it out')
        return made

    @property
    def store(self) -> Any:
        """The store of the run, while it runs and after it.

        Raises:
            ConfigError: There was no run yet, or its algorithm is one of agentrig's, which uses no store.
        """
        if self._store is None:
            raise ConfigError("trainer.store: the store is that of a run of the script's own algorithm; call fit first")
        return self._store

    @store.setter
    def store(self, store: Any) -> None:
        self._store = store

    def fit(self, agent: Any, train_dataset: Any = None, *, val_dataset: Any = None) -> None:
        """Run the algorithm; its rollouts run in the runner processes.

        Args:
            agent: A `LitAgent` class, an instance, or a function for `agl.rollout`.
            train_dataset: Rows; the algorithm gets this object itself.
            val_dataset: Rows to validate on.

        Raises:
            ConfigError: There is no algorithm, or the agent can't be sent to a runner process.
            AgentrigError: The run could not start, or was stopped; the message says why.
        """
        if isinstance(train_dataset, str) and train_dataset.startswith(("http://", "https://")):
            raise ConfigError(f"fit with a server's address ({train_dataset}) is not available here: {SERVE}")
        for name, rows in (("train_dataset", train_dataset), ("val_dataset", val_dataset)):
            if isinstance(rows, str):
                raise ConfigError(f"{name} is a text ({rows!r:.100}), not rows: read the file, and give fit its rows")
        if self.algorithm is None:
            raise ConfigError(
                "Trainer has no algorithm: give it one (algorithm=...), or call dev. For an algorithm in another "
                f"process: {SERVE}"
            )
        if is_verl(self.algorithm) and (train_dataset is None or not len(train_dataset)):
            raise ConfigError("train_dataset has no rows: give fit the rows to train on")
        self._run(agent, self.algorithm, train_dataset, val_dataset)

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
        if train_dataset is not None and dev_dataset is not None:
            raise TypeError("Trainer.dev() takes train_dataset or dev_dataset, not both: they name the same rows")
        algorithm = self.algorithm if self.algorithm is not None else Baseline()
        if not isinstance(algorithm, FastAlgorithm):
            raise TypeError(f"Trainer.dev() needs a FastAlgorithm; this one is {type(algorithm).__name__}. Call fit")
        given = train_dataset if dev_dataset is None else dev_dataset
        self._run(agent, algorithm, _first_rows(given), _first_rows(val_dataset), _Spans())

    def fit_v0(self, *arguments: Any, **named: Any) -> None:
        """Raise: the client and server of Agent Lightning 0.1 are not available here.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError("fit_v0, the client of Agent Lightning 0.1, is not available here: write fit(agent, rows)")

    def _run(self, agent: Any, algorithm: Any, train: Any, validation: Any, display: Any = None) -> None:
        from agentrig.plan import resolve, to_toml
        from agentrig.processes.forks import end_if_importing
        from agentrig.processes.scratch import temporary_files
        from agentrig.run.resume import resume_plan
        from agentrig.run.training import train as run
        from agentrig.view.live import LiveDisplay

        end_if_importing()
        name = re.sub(r"[^a-z0-9]+", "-", Path(sys.argv[0]).stem.lower()).strip("-") or "script"
        used: dict[str, dict[str, Any]] = {
            kind: {"use": f"{name}-{kind}"} for kind in ("tasks", "agent", "adapter", "algorithm")
        }
        made = self.algorithm_spec(f"{name}-algorithm", algorithm, train, validation)
        if self.other and display is None:
            made, keys = other_algorithm(self.other, algorithm, len(train if train is not None else ()))
            made = attrs.evolve(made, name=f"{name}-algorithm")
            used["algorithm"] |= keys
            if made.credit:
                used["credit"] = {"use": credit_for(algorithm.config)}
        others: Sequence[Spec] = (
            TasksSpec(
                name=f"{name}-tasks",
                summary=f"The rows of {name}.",
                build=lambda config: ScriptTasks(train, validation),
            ),
            adapter_spec(self.adapter, name),
            made,
        )
        arguments = {
            "name": f"{name}-agent",
            "summary": f"{type(agent).__name__} of {name}.",
            "tracer": self.tracer,
            "hooks": self.hooks,
            "environment": ("*",),
            "whole_rows": True,
            "initial_resources": self.initial_resources if is_verl(algorithm) else None,
        }
        run_file = {**used, "reward": {"use": "own"}, "runners": {"n": self.n_runners, "threads": 1}}
        resumed, Trainer.resumed = Trainer.resumed, None
        again = self.resumes or f"agentrig run --resume {{run}} {shlex.quote(sys.argv[0])}"
        self.directory = None
        with temporary_files(), script_plugin(agent, arguments, others) as file:
            try:
                if resumed is None:
                    recipe = file.parent / f"{name}.toml"
                    recipe.write_text(to_toml(run_file))
                    plan = resolve(str(recipe), overrides=[*self.more, *self.settings], files=[str(file)])
                else:
                    plan = resume_plan(resumed, overrides=self.more, script_file=file)
                plan = attrs.evolve(plan, resumes=again)
                plan.registry.add_observer(_Directory(self), "directory")
                if display is not None or self.shows:
                    plan.registry.add_observer(display or LiveDisplay(), "display")
                run(plan, resume=resumed)
            except AgentrigError as error:
                said = self._in_own_words(str(error).replace(str(file), sys.argv[0]), used["algorithm"])
                error.args = (f"{said}{self._going_on(again, said)}",)
                raise
            except Exception as error:
                if how := self._going_on(again, str(error)):
                    error.add_note(how.strip())
                raise

    def _in_own_words(self, message: str, keys: Collection[str]) -> str:
        """Return an error of a run in the names of the script, with the cures as options of `agentrig run`."""
        if self.other:
            settings = [setting.partition("=")[0] for setting in (*self.more, *self.settings)]
            chosen = [name.removeprefix("algorithm.") for name in settings if name.startswith("algorithm.")]
            message = in_words_of_script(message, keys, chosen)
        return SETTING.sub(lambda m: m[1] or f"--set {m[0]}", message) if self.shows else message

    def _going_on(self, resumes: str, said: str) -> str:
        """Return how a run that an error ended resumes; '' if it has no checkpoint, or the error says it."""
        if self.directory is None or not (self.directory / "checkpoints" / "latest").is_file():
            return ""
        again = resume_command(resumes, self.directory)
        return "" if again in said else f"\n  Once that is mended, resume from the last checkpoint with: {again}"

    def algorithm_spec(self, name: str, inner: Any, train: Any, validation: Any) -> AlgorithmSpec:
        """Return the run's algorithm: the script's, with the script's own resources, proxy and datasets."""
        summary = f"{type(inner).__name__} of a script."
        if is_verl(inner):
            return algorithm(inner, name=name, summary=summary)
        return spec_of(inner, name, summary, adapter=lambda: self.adapter, script=Script(self, train, validation))


class _TracerFactory:
    """Makes a tracer; travels to the runner processes."""

    def __init__(self, spec: Any) -> None:
        self._spec = spec
        if not isinstance(spec, Tracer):
            self()  # a wrong one is an error of the script's process

    def __call__(self) -> Any:
        """Return the tracer."""
        return build_component(self._spec, expected_type=Tracer, spec_name="tracer")


class ScriptTasks:
    """The rows of a script as tasks, for the run's records; the algorithm gets the script's own objects.

    Which columns are gold is not known, so the run says that its agent sees its gold.
    """

    splits: Sequence[str] = ("train", "validation")
    held_out: Sequence[str] = ()
    whole_rows = True
    optional: Sequence[str] = ("train", "validation", "report")
    roles: Mapping[str, str] = {"train": "train", "validation": "validation"}

    def __init__(self, train: Any, validation: Any) -> None:
        self._rows = {"train": train, "validation": validation}

    def load(self, split: str) -> Sequence[Task]:
        """Return a split's rows; what JSON can't hold becomes text, with a warning."""
        rows, tasks = self._rows[split], []
        types: set[str] = set()

        def text(value: Any) -> str:
            types.add(type(value).__name__)
            return str(value)

        for i in range(len(rows) if rows is not None else 0):
            plain = json.loads(json.dumps(rows[i], default=text))
            fields = plain if isinstance(plain, dict) else {"input": plain}
            tasks.append(Task(id=f"{split}-{i}", input=fields, row=plain))
        if types:
            log.warning("rows of %s hold values of these types as text: %s", split, ", ".join(sorted(types)))
        return tasks

    def why_empty(self, split: str) -> str:
        """Say which argument of `fit` a split's rows come from."""
        if split:
            return f"{'train' if split == 'train' else 'val'}_dataset of `fit` has no rows"
        return "`fit` takes no held-out rows. run.report=validation measures val_dataset before and after training"


def other_algorithm(use: str, inner: Any, rows: int) -> tuple[AlgorithmSpec, dict[str, Any]]:
    """Return an algorithm of agentrig that replaces a script's `agl.VERL`, and its keys for that."""
    from agentrig.plugins.loading import load

    if not is_verl(inner):
        raise ConfigError(
            f"--algorithm {use} takes the place of agl.VERL, and this script trains by {type(inner).__name__}: leave "
            "--algorithm out"
        )
    spec: Any = load().find("algorithm", use).spec
    keys, absent = keys_for(spec.config, inner.config, rows=rows)
    if absent:
        log.warning("%s has no key for these settings of agl.VERL, and leaves them out: %s", use, "; ".join(absent))
    return spec, keys


def adapter_spec(theirs: Any, name: str) -> AdapterSpec:
    """Return the run's adapter: the script's, if it makes triplets, else one that takes every call."""
    makes_triplets = isinstance(theirs, TraceToTripletBase)
    return adapter(
        lambda: theirs if makes_triplets else TracerTraceToTriplet(),
        name=f"{name}-adapter",
        summary=f"{type(theirs).__name__} of {name}.",
    )


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


def _tell(script: str, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error as `python SCRIPT` does: without the frames of the command, and of `Trainer` alone."""
    while trace is not None and trace.tb_frame.f_code.co_filename != script:
        trace = trace.tb_next
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(trace)]
    last, later = trace, files[len(files) - files[::-1].index(script) :] if files else []
    if last is not None and set(later) == {__file__}:
        for _ in files[len(later) + 1 :]:
            last = last.tb_next or last
        last.tb_next = None
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


def launch(
    script: Path,
    arguments: Sequence[str],
    *,
    algorithm: str = "",
    settings: Sequence[str] = (),
    resumed: Path | None = None,
) -> None:
    """Run a script as `python SCRIPT ARGUMENTS` would, in this process.

    An algorithm of agentrig, '' for none, replaces `agl.VERL`; the script's first run resumes `resumed`.
    """
    if not script.is_file():
        raise ConfigError(f"there is no script {script} (looked in {Path.cwd()})")

    own = ["--algorithm", algorithm] if algorithm else []
    words = [*own, str(script), *(("--", *arguments) if arguments else ())]
    Trainer.resumed = resumed

    class ScriptTrainer(Trainer):
        other, more, shows = algorithm, tuple(settings), True
        resumes = f"agentrig run --resume {{run}} {shlex.join(words)}"
        made: list[Trainer] = []  # noqa: RUF012  (shared by all instances)

        def _run(self, *arguments: Any) -> None:
            self.made.append(self)
            super()._run(*arguments)

    package = importlib.import_module("agentlightning")
    package.Trainer = package.trainer.Trainer = ScriptTrainer  # type: ignore[attr-defined]
    sys.argv[:] = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    sys.excepthook = functools.partial(_tell, str(script))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except EOFError as error:
        raise ConfigError(f"{script} reads standard input, which has ended{place_of(error)}: give it more") from error
    if not ScriptTrainer.made:
        raise ConfigError(
            f"{script} has ended without a run: it called neither fit nor dev of Agent Lightning's Trainer. Does it "
            f"take arguments, or import another Trainer? One that needs no Trainer runs with: python {script}"
        )
