"""The checks of an algorithm: it trains, stops and resumes in real runs, and says what it does."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from unittest import mock

import attrs

from agentrig.endpoints import Endpoint
from agentrig.errors import AgentrigError
from agentrig.plan import Plan, resolve
from agentrig.run.checkpoints import Checkpoints, verify
from agentrig.run.directory import RunDirectory
from agentrig.run.loop import runnable
from agentrig.testing import bandit
from agentrig.testing.bandit import OPTIMUM, pull
from agentrig.testing.kit import basic, needs
from agentrig.testing.policy import Policy
from agentrig.testing.subject import CheckFailed, CheckSkipped, Subject
from agentrig.testing.tiny_model import make_tiny_model
from agentrig.text import account_of

GOOD = 0.9 * OPTIMUM
"""The mean reward of a bandit that counts as solved."""

ASIDE = (".files.json", "keep", "trainer", "delivery.json")
"""What a checkpoint holds besides what was trained."""


class Run(RunDirectory):
    """The directory of a run that has ended."""

    @property
    def steps(self) -> list[int]:
        """The steps that have ended."""
        return [line["step"] for line in self.metrics()]

    def checkpoint(self, step: int) -> Path | None:
        """Return the checkpoint of a step, if there is one."""
        checkpoints = Checkpoints(self.path / "checkpoints")
        return checkpoints.path(step) if step in checkpoints.steps() else None

    @property
    def last(self) -> Path:
        """The latest checkpoint.

        Raises:
            CheckFailed: There is none.
        """
        found = Checkpoints(self.path / "checkpoints").latest()[0]
        if found is None:
            raise CheckFailed(
                "the run has no checkpoint: a crash would lose all of it", "Call session.save_checkpoint."
            )
        return found


@attrs.define(kw_only=True, eq=False, slots=False)
class AlgorithmSubject(Subject):
    """An algorithm, and real runs of the kit's bandit with a tiny model.

    Attributes:
        steps: Training steps of a run, at least 2; set by the key `steps` if the algorithm has one.
        learns: Steps in which it should solve the bandit; 0 leaves that check out.
        model: A directory for the key `model`; None for a tiny random one.
        variants: More settings, one short run each: keys that matter only together with others are read there.
        source: A recipe or run file that the algorithm can train; the kit's bandit if it is empty.
        overrides: `section.key=value`, for each run.
    """

    steps: int = 3
    learns: int = 0
    model: Path | None = None
    variants: Sequence[Mapping[str, Any]] = ()
    source: str = bandit.NAME
    overrides: Sequence[str] = ()
    read: set[str] = attrs.field(factory=set, init=False)

    @property
    def keys(self) -> list[str]:
        """The algorithm's keys."""
        return [f.name for f in attrs.fields(self.spec.config)] if self.spec else []

    @cached_property
    def start(self) -> Path | None:
        """The model that training starts from; None if the algorithm has no key `model`."""
        if "model" not in self.keys:
            return None
        return self.model or make_tiny_model(self.folder / "model")

    def plan(self, name: str, **more: Any) -> Plan:
        """Return the plan of a run with this name, and these keys of the algorithm.

        Raises:
            CheckSkipped: The subject is no registered component.
        """
        if not self.registered:
            raise CheckSkipped("give its name or FILE.py:NAME: a run finds its algorithm by its name")
        keys: dict[str, Any] = {"steps": self.steps} if "steps" in self.keys else {}
        keys |= {"model": str(self.start)} if self.start is not None else {}
        keys |= {**(self.settings or {}), **more}
        files = [*([str(self.file)] if self.file else []), str(Path(bandit.__file__))]
        return resolve(
            self.source,
            uses={"algorithm": self.spec.name},
            overrides=[
                *(f"algorithm.{key}={json.dumps(value)}" for key, value in keys.items()),
                *(f"run.directory={json.dumps(str(self.folder / 'runs'))}", f"run.name={name}"),
                *self.overrides,
            ],
            files=files,
        )

    def trained(self, plan: Plan, *, stop_after: int = 0, resume: Path | None = None) -> Exception | None:
        """Train by a plan; return what ended it. The run is asked to stop after a step, as Ctrl-C does."""
        from agentrig.run.session import RunSession
        from agentrig.run.training import train

        component, end_step = plan.components["algorithm"], RunSession.end_step
        spec: Any = component.spec
        build = spec.build

        def ends(session: RunSession, step: int, **more: Any) -> None:
            end_step(session, step, **more)
            session.stopping = session.stopping or step == stop_after

        spec = attrs.evolve(spec, build=lambda config: build(reading(config, self.read)))
        components = {**plan.components, "algorithm": attrs.evolve(component, spec=spec)}
        try:
            with mock.patch.object(RunSession, "end_step", ends):
                train(attrs.evolve(plan, components=components), resume=resume)
        except Exception as error:
            return error
        except SystemExit as error:
            return AgentrigError(f"it calls sys.exit({error.code!r})")
        return None

    def run(self, what: str, plan: Plan, **more: Any) -> Run:
        """Train by a plan; `more` is for `trained`.

        Raises:
            CheckFailed: An error ended it.
        """
        if error := self.trained(plan, **more):
            raise CheckFailed(f"{what} ends with {account_of(error)}") from error
        return Run(more.get("resume") or Path(plan.run.directory) / plan.run.name)

    @cached_property
    def whole(self) -> Run:
        """A run from start to end."""
        return self.run("a run", self.plan("whole"))

    @cached_property
    def stopped(self) -> Run:
        """The same run, stopped by the user before its last step."""
        return self.run("a run that the user stops", self.plan("stopped"), stop_after=self.steps - 1)

    @cached_property
    def resumed(self) -> Run:
        """The stopped run, resumed to its end."""
        path = self.folder / "runs" / "resumed"
        shutil.copytree(self.stopped.path, path, symlinks=True)
        return self.run("a resumed run", resolve(str(path / "config.toml")), resume=path)


def reading(config: Any, read: set[str]) -> Any:
    """Return a config object with the same values that adds the name of each key that is read to `read`."""
    cls: Any = type(config)
    values = {f.name: getattr(config, f.name) for f in attrs.fields(cls)}

    def get(self: Any, name: str) -> Any:
        if name in values:
            read.add(name)
        return cls.__getattribute__(self, name)

    def reduce(self: Any) -> Any:  # a process that gets it gets a plain one
        return partial(cls, **values), ()

    return type(cls.__name__, (cls,), {"__getattribute__": get, "__reduce__": reduce})(**values)


def check_keys_declared(subject: AlgorithmSubject) -> None:
    """Every key has a help text.

    Why: `agentrig plugins show`, the docs and a run's checks know only what is declared.
    Cure: Declare each key by agentrig.setting, with help, bounds and a default.
    """
    spec = subject.spec
    if spec is None:
        raise CheckSkipped("it was given already built, so its keys are not known")
    bare = [f.name for f in attrs.fields(spec.config) if not f.metadata.get("help")]
    if bare:
        raise CheckFailed(f"{', '.join(bare)} of {spec.config.__name__} has no help")


@basic
def check_runs(subject: AlgorithmSubject) -> None:
    """A whole run ends without an error, with a line and a checkpoint.

    Why: Nothing can be trained.
    Cure: Follow agentrig.algorithms.Session: rollouts, end_step and save_checkpoint for each step.
    """
    run = subject.whole
    wanted = list(range(1, subject.steps + 1)) if "steps" in subject.keys else run.steps
    if run.steps != wanted or not wanted:
        raise CheckFailed(f"the run has the steps {run.steps}; {wanted} were asked for")
    _ = run.last


def check_figures(subject: AlgorithmSubject) -> None:
    """The figures and times of each step are finite numbers.

    Why: Figures that are not finite break plots and the guards that stop a diverged run.
    Cure: Report finite numbers, the same names in every step; leave a figure out where it has no value.
    """
    for line in subject.whole.metrics():
        for where, values in (("metrics", line["algorithm"]), ("time_s", line["time_s"])):
            for name, value in values.items():
                number = isinstance(value, int | float) and not isinstance(value, bool)
                if not number or not math.isfinite(value) or (where == "time_s" and value < 0):
                    raise CheckFailed(f'step {line["step"]}: {where}["{name}"] is {value}')


def check_checkpoints(subject: AlgorithmSubject) -> None:
    """The last checkpoint can be read: all its files, its tensors, and the model if it is one.

    Why: A run resumes from them, and `agentrig export` hands them on.
    Cure: Write a whole Hugging Face directory, tokenizer included, and what only training needs under trainer/.
    """
    folder = subject.whole.last
    verify(folder)
    for file in folder.rglob("*.json"):
        try:
            json.loads(file.read_text("utf-8"))
        except ValueError as error:
            raise CheckFailed(f"{file.name} of the checkpoint is no JSON: {error}") from None
    for name, tensor in tensors_of(folder).items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise CheckFailed(f"the tensor {name} of the checkpoint is not finite")
    if not _is_model(folder):
        return
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loader: Any = AutoModelForCausalLM
    _, said = loader.from_pretrained(str(folder), local_files_only=True, output_loading_info=True)
    wrong = [f"{what.replace('_', ' ')}: {sorted(said[what])[0]}" for what in said if said[what] and "keys" in what]
    if wrong:
        raise CheckFailed(f"transformers loads the checkpoint with {'; '.join(wrong)}")
    maker: Any = AutoTokenizer
    maker.from_pretrained(str(folder), local_files_only=True)


def check_moves(subject: AlgorithmSubject) -> None:
    """What is trained changes from one checkpoint to another, and by as much as is stated.

    Why: A run whose weights stay the same learns nothing, and costs as much; a made-up figure hides it.
    Cure: Apply the update before you save; check the learning rate and what is trainable. Report the L2 norm of the
        step's change of all trained weights as `weight_change`.
    """
    run = subject.whole
    line = run.metrics()[-1]
    before, after = run.checkpoint(line["step"] - 1), run.last
    first = before or subject.start
    if first is None:
        raise CheckSkipped("there is one checkpoint only, and no model that training starts from")
    if not _differences(first, after):
        raise CheckFailed(f"the checkpoint of step {line['step']} is the same as {first.name}, bit by bit")
    old, new = tensors_of(before) if before else {}, tensors_of(after)
    if old and old.keys() == new.keys():
        own = math.sqrt(sum(float((new[n].double() - old[n].double()).square().sum()) for n in new))
        stated = line["algorithm"]["weight_change"]
        if abs(own - stated) > 0.2 * own:
            raise CheckFailed(
                f"step {line['step']} states a weight change of {stated:.4g}; its checkpoints differ by {own:.4g}"
            )


def check_stops(subject: AlgorithmSubject) -> None:
    """Asked to stop, it finishes the step, saves, and returns.

    Why: Ctrl-C, a cluster's time limit and `--resume` rely on it: what is under way would be lost.
    Cure: Look at session.stopping after each step: finish it, save, return, and report nothing.
    """
    run, step = subject.stopped, subject.steps - 1
    if run.steps != list(range(1, step + 1)):
        raise CheckFailed(f"the user stopped it in step {step}, and it has the steps {run.steps}")
    if run.checkpoint(step) is None:
        raise CheckFailed(f"the user stopped it in step {step}, and there is no checkpoint of that step")


@needs(check_stops)
def check_resumes(subject: AlgorithmSubject) -> None:
    """A stopped and resumed run ends as the uninterrupted one, bit by bit.

    Why: A run that was interrupted would end with other weights, and nobody could tell why.
    Cure: Save the state of the optimizer and of every random stream under trainer/, and derive streams from the step.
    """
    whole, resumed = subject.whole, subject.resumed
    if resumed.steps != whole.steps:
        raise CheckFailed(f"the resumed run has the steps {resumed.steps}")
    if (a := whole.metrics()[-1]["reward"]) != (b := resumed.metrics()[-1]["reward"]):
        raise CheckFailed(f"after the resume the step samples other answers: mean reward {b} instead of {a}")
    if different := _differences(whole.last, resumed.last):
        raise CheckFailed(f"the resumed run ends with another {different[0]}, and {len(different) - 1} more differ")


def check_keys_read(subject: AlgorithmSubject) -> None:
    """Every key is read in a run.

    Why: A key without an effect lets a user believe in a setting that was never used.
    Cure: Use the key, remove it, or give the kit the settings under which it counts: variants=[{...}].
    """
    _ = subject.whole
    for i, settings in enumerate(subject.variants):
        short = {"steps": 1} if "steps" in subject.keys else {}
        subject.run(f"a run with {dict(settings)}", subject.plan(f"variant-{i}", **{**short, **settings}))
    if unread := [key for key in subject.keys if key not in subject.read]:
        raise CheckFailed(f"nothing read {', '.join(unread)} in {1 + len(subject.variants)} runs")


def check_names_no_model(subject: AlgorithmSubject) -> None:
    """A model that is not there is named.

    Why: A mistyped path must end the run with that path, not with the traceback of a library.
    Cure: Raise agentrig.errors.ConfigError with the key and its value, before anything starts.
    """
    if subject.start is None:
        raise CheckSkipped("it has no key `model`")
    missing = str(subject.folder / "no-such-model")
    error = subject.trained(subject.plan("no-model", model=missing))
    if error is None:
        raise CheckFailed(f"with model={missing}, which is not there, the run ends as if all were well")
    if not isinstance(error, AgentrigError) or "no-such-model" not in str(error):
        raise CheckFailed(f"with model={missing} the run ends with {type(error).__name__}: {error}")


@needs(check_checkpoints)
def check_serves(subject: AlgorithmSubject) -> None:
    """`serve` answers with the checkpoint; if that is a model of transformers, with its likeliest tokens.

    Why: `agentrig eval` and `agentrig dev` measure what `serve` serves.
    Cure: Serve the checkpoint that is given, or the starting model, until the block ends.
    """
    plan = subject.plan("served")
    algorithm, folder = runnable(plan.build("algorithm")), subject.whole.last
    more: Mapping[str, Any] = {}
    if getattr(plan.components["algorithm"].spec, "server", False):
        more = {"server": plan.make_server()}
    with algorithm.serve(hardware=plan.build("hardware"), checkpoint=folder, **more) as served:
        endpoint: Endpoint = served if isinstance(served, Endpoint) else served[0]
        asked = {"question": "pull"}
        try:
            first, again = (pull(asked, endpoint.with_sampling(temperature=0.0, max_tokens=6)) for _ in range(2))
        except Exception as error:
            raise CheckFailed(f"what `serve` gives does not answer: {type(error).__name__}: {error}") from error
    if first != again:
        raise CheckFailed(f"at temperature 0 the checkpoint answers {first!r}, then {again!r}")
    if _is_model(folder):
        policy = Policy(folder)
        own = policy.text(policy.best(policy.ids(asked["question"]), 6))
        if first != own:
            raise CheckFailed(f"`serve` answers {first!r}; transformers, with the checkpoint's weights, {own!r}")


def check_solves(subject: AlgorithmSubject) -> None:
    """It solves a bandit whose best mean reward is 1.

    Why: Weights that move in a wrong direction pass every other check.
    Cure: Look at the sign of the advantage and of the loss, and at the learning rate in `settings`.
    """
    if not subject.learns:
        raise CheckSkipped("give the number of steps in which it should solve the kit's bandit: learns=STEPS")
    run = subject.run("a run of the bandit", subject.plan("learns", steps=subject.learns))
    rewards = [line["reward"] for line in run.metrics()]
    best = max((sum(rewards[i : i + 2]) / 2 for i in range(len(rewards) - 1)), default=0.0)
    if best < GOOD:
        path = ", ".join(f"{r:.2f}" for r in rewards)
        raise CheckFailed(f"the bandit's mean reward is {path} over {len(rewards)} steps; {GOOD:.1f} counts as solved")


def tensors_of(folder: Path) -> dict[str, Any]:
    """Return the tensors of a checkpoint's own safetensors files; none if it has no such file."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        return {}
    from safetensors.torch import load_file

    return {name: tensor for file in files for name, tensor in load_file(str(file)).items()}


def _differences(one: Path, other: Path) -> list[str]:
    """Return the names of the tensors, or of the files if there are none, that differ between two checkpoints."""
    first, second = tensors_of(one), tensors_of(other)
    if first or second:
        return [n for n in {**first, **second} if n not in first or n not in second or not first[n].equal(second[n])]
    mine, others = _files(one), _files(other)
    return [f for f in {**mine, **others} if mine.get(f) != others.get(f)]


def _files(folder: Path) -> dict[str, bytes]:
    found = [f.relative_to(folder) for f in sorted(folder.rglob("*")) if f.is_file()]
    return {str(f): (folder / f).read_bytes() for f in found if f.parts[0] not in ASIDE}


def _is_model(folder: Path) -> bool:
    """Whether a checkpoint is a model that transformers can load."""
    file = folder / "config.json"
    return file.is_file() and "model_type" in json.loads(file.read_text("utf-8")) and bool(tensors_of(folder))
