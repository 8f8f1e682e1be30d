"""The checks of an algorithm: it trains, stops and resumes in real runs, and says what it does."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from agentrig.endpoints import Endpoint
from agentrig.errors import AgentrigError, CheckpointDamaged, place_of
from agentrig.run.checkpoints import verify
from agentrig.run.loop import looped
from agentrig.testing.algorithm_bench import TABLE, AlgorithmBench, Run
from agentrig.testing.bandit import OPTIMUM, pull
from agentrig.testing.checks import CheckFailed, CheckSkipped, Report

CLOSE = 0.2
"""How far a stated weight change may be from the checkpoints' own difference, as a share."""

GOOD = 0.9 * OPTIMUM
"""The mean reward of a bandit that counts as solved."""

ASIDE = (".files.json", "keep", "trainer", "delivery.json")
"""What a checkpoint holds besides what was trained."""


@TABLE.check(
    "keys-declared",
    why="`agentrig plugins show`, the docs and a run's checks know only what is declared.",
    cure="Declare each key by agentrig.setting, with help, bounds and a default.",
)
def keys_declared(bench: AlgorithmBench) -> None:
    """Every key has a help text."""
    spec = bench.subject.spec
    if spec is None:
        raise CheckSkipped("it was given already built, so its keys are not known")
    bare = [f.name for f in attrs.fields(spec.config) if not f.metadata.get("help")]
    if bare:
        raise CheckFailed(f"{', '.join(bare)} of {spec.config.__name__} has no help")


@TABLE.check(
    "runs",
    why="Nothing can be trained.",
    cure="Follow agentrig.algorithms.Session: rollouts, end_step and save_checkpoint for each step.",
)
def runs(bench: AlgorithmBench) -> None:
    """A whole run ends without an error, with a line and a checkpoint."""
    run = bench.whole
    _ended(run, "a run")
    wanted = list(range(1, bench.steps + 1)) if "steps" in bench.keys else [line["step"] for line in run.lines]
    found = [line["step"] for line in run.lines]
    if found != wanted or not found:
        raise CheckFailed(f"the run has the steps {found}; {wanted} were asked for")
    if run.checkpoint() is None:
        raise CheckFailed("the run has no checkpoint: a crash would lose all of it", "Call session.save_checkpoint.")


@TABLE.check(
    "figures",
    why="Figures that are not finite break plots and the guards that stop a diverged run.",
    cure="Report finite numbers, the same names in every step; leave a figure out where it has no value.",
    needs=("runs",),
)
def figures(bench: AlgorithmBench) -> None:
    """The figures and times of each step are finite numbers."""
    for line in bench.whole.lines:
        for where, values in (("metrics", line["algorithm"]), ("time_s", line["time_s"])):
            for name, value in values.items():
                number = isinstance(value, int | float) and not isinstance(value, bool)
                if not number or not math.isfinite(value) or (where == "time_s" and value < 0):
                    raise CheckFailed(f'step {line["step"]}: {where}["{name}"] is {value}')


@TABLE.check(
    "checkpoints",
    why="A run resumes from them, and `agentrig export` hands them on.",
    cure="Write a whole Hugging Face directory, tokenizer included, and what only training needs under trainer/.",
    needs=("runs",),
)
def checkpoints(bench: AlgorithmBench) -> None:
    """The last checkpoint can be read: all its files, its tensors, and the model if it is one."""
    folder = _checkpoint(bench.whole)
    try:
        verify(folder)
    except CheckpointDamaged as error:
        raise CheckFailed(str(error)) from None
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


@TABLE.check(
    "moves",
    why="A run whose weights stay the same learns nothing, and costs as much.",
    cure="Apply the update before you save; check the learning rate and what is trainable.",
    needs=("runs",),
)
def moves(bench: AlgorithmBench) -> None:
    """What is trained changes from one checkpoint to another."""
    run = bench.whole
    first = run.checkpoint(run.lines[-1]["step"] - 1) or bench.start
    if first is None:
        raise CheckSkipped("there is one checkpoint only, and no model that training starts from")
    if not _differences(first, _checkpoint(run)):
        raise CheckFailed(f"the checkpoint of step {run.lines[-1]['step']} is the same as {first.name}, bit by bit")


@TABLE.check(
    "weight-change",
    why="A run stops if this figure is 0 twice: a made-up one hides that nothing is learned.",
    cure="Report the L2 norm of the step's change of all trained weights.",
    needs=("moves",),
)
def weight_change(bench: AlgorithmBench) -> None:
    """The stated weight change is that of the checkpoints."""
    run = bench.whole
    last = run.lines[-1]
    before = run.checkpoint(last["step"] - 1)
    old, new = (tensors_of(before) if before else {}), tensors_of(_checkpoint(run))
    if not old or old.keys() != new.keys():
        raise CheckSkipped("the last two steps have no checkpoints with the same tensors")
    own = math.sqrt(sum(float((new[n].double() - old[n].double()).square().sum()) for n in new))
    stated = last["algorithm"]["weight_change"]
    if abs(own - stated) > CLOSE * own:
        raise CheckFailed(
            f"step {last['step']} states a weight change of {stated:.4g}; its checkpoints differ by {own:.4g}"
        )


@TABLE.check(
    "stops",
    why="Ctrl-C, a cluster's time limit and `--resume` rely on it: what is under way would be lost.",
    cure="Look at session.stopping after each step: finish it, save, return, and report nothing.",
    needs=("runs",),
)
def stops(bench: AlgorithmBench) -> None:
    """Asked to stop, it finishes the step, saves, and returns."""
    run, step = bench.stopped, bench.steps - 1
    _ended(run, "a run that the user stops")
    found = [line["step"] for line in run.lines]
    if found != list(range(1, step + 1)):
        raise CheckFailed(f"the user stopped it in step {step}, and it has the steps {found}")
    if run.checkpoint(step) is None:
        raise CheckFailed(f"the user stopped it in step {step}, and there is no checkpoint of that step")


@TABLE.check(
    "resumes",
    why="A run that was interrupted would end with other weights, and nobody could tell why.",
    cure="Save the state of the optimizer and of every random stream under trainer/, and derive streams from the step.",
    needs=("stops",),
)
def resumes(bench: AlgorithmBench) -> None:
    """A stopped and resumed run ends as the uninterrupted one, bit by bit."""
    whole, resumed = bench.whole, bench.resumed
    _ended(resumed, "a resumed run")
    steps = [line["step"] for line in resumed.lines]
    if steps != [line["step"] for line in whole.lines]:
        raise CheckFailed(f"the resumed run has the steps {steps}")
    if (a := whole.lines[-1]["reward"]) != (b := resumed.lines[-1]["reward"]):
        raise CheckFailed(f"after the resume the step samples other answers: mean reward {b} instead of {a}")
    different = _differences(_checkpoint(whole), _checkpoint(resumed))
    if different:
        raise CheckFailed(f"the resumed run ends with another {different[0]}, and {len(different) - 1} more differ")


@TABLE.check(
    "keys-read",
    why="A key without an effect lets a user believe in a setting that was never used.",
    cure="Use the key, remove it, or give the kit the settings under which it counts: variants=[{...}].",
    needs=("runs",),
)
def keys_read(bench: AlgorithmBench) -> None:
    """Every key is read in a run."""
    runs = [bench.whole]
    for i, settings in enumerate(bench.variants):
        short = {"steps": 1} if "steps" in bench.keys else {}
        runs.append(bench.run(bench.plan(f"variant-{i}", **{**short, **settings})))
        _ended(runs[-1], f"a run with {dict(settings)}")
    unread = [key for key in bench.keys if key not in bench.read]
    if unread:
        raise CheckFailed(f"nothing read {', '.join(unread)} in {len(runs)} runs")


@TABLE.check(
    "names-no-model",
    why="A mistyped path must end the run with that path, not with the traceback of a library.",
    cure="Raise agentrig.errors.ConfigError with the key and its value, before anything starts.",
    needs=("runs",),
)
def names_no_model(bench: AlgorithmBench) -> None:
    """A model that is not there is named."""
    if bench.start is None:
        raise CheckSkipped("it has no key `model`")
    missing = str(bench.folder / "no-such-model")
    error = bench.run(bench.plan("no-model", model=missing)).error
    if error is None:
        raise CheckFailed(f"with model={missing}, which is not there, the run ends as if all were well")
    if not isinstance(error, AgentrigError) or "no-such-model" not in str(error):
        raise CheckFailed(f"with model={missing} the run ends with {type(error).__name__}: {error}")


@TABLE.check(
    "serves",
    why="`agentrig eval` and `agentrig dev` measure what `serve` serves.",
    cure="Serve the checkpoint that is given, or the starting model, until the block ends.",
    needs=("checkpoints",),
)
def serves(bench: AlgorithmBench) -> None:
    """`serve` answers with the checkpoint; if that is a model of transformers, with its likeliest tokens."""
    plan = bench.plan("served")
    algorithm, folder = looped(plan.build("algorithm")), _checkpoint(bench.whole)
    more: Mapping[str, Any] = {}
    if getattr(plan.components["algorithm"].spec, "server", False):
        from agentrig.run.setup import Setup

        more = {"server": Setup(plan).server()}
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
        own = _likeliest(folder, asked["question"])
        if first != own:
            raise CheckFailed(f"`serve` answers {first!r}; transformers, with the checkpoint's weights, {own!r}")


@TABLE.check(
    "solves",
    why="Weights that move in a wrong direction pass every other check.",
    cure="Look at the sign of the advantage and of the loss, and at the learning rate in `settings`.",
    needs=("runs",),
)
def solves(bench: AlgorithmBench) -> None:
    """It solves a bandit whose best mean reward is 1."""
    if not bench.learns:
        raise CheckSkipped("give the number of steps in which it should solve the kit's bandit: learns=STEPS")
    run = bench.run(bench.plan("learns", steps=bench.learns))
    _ended(run, "a run of the bandit")
    rewards = [line["reward"] for line in run.lines]
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
    files = {f: (one / f).read_bytes() for f in _files(one)}, {f: (other / f).read_bytes() for f in _files(other)}
    return [f for f in {**files[0], **files[1]} if files[0].get(f) != files[1].get(f)]


def _files(folder: Path) -> list[str]:
    found = [f.relative_to(folder) for f in sorted(folder.rglob("*")) if f.is_file()]
    return [str(f) for f in found if f.parts[0] not in ASIDE]


def _checkpoint(run: Run) -> Path:
    found = run.checkpoint()
    assert found is not None, "the check `runs` has seen it"
    return found


def _is_model(folder: Path) -> bool:
    """Whether a checkpoint is a model that transformers can load."""
    file = folder / "config.json"
    return file.is_file() and "model_type" in json.loads(file.read_text("utf-8")) and bool(tensors_of(folder))


def _likeliest(folder: Path, question: str) -> str:
    from agentrig.testing.policy import Policy

    policy = Policy(folder)
    return policy.text(policy.best(policy.ids(question), 6))


def _ended(run: Run, what: str) -> None:
    if run.error is not None:
        error = run.error
        kind = "" if isinstance(error, AgentrigError) else f"{type(error).__name__}: "
        raise CheckFailed(f"{what} ends with {kind}{error}{place_of(error)}") from error


def check_algorithm(
    subject: Any, *, settings: Any = None, only: Sequence[str] | None = None, raise_failed: bool = True, **options: Any
) -> Report:
    """Run the checks of an algorithm; see `agentrig.testing.check`.

    Its options: `steps` of each run, `learns`, the steps in which it should solve the bandit (0 leaves that out),
    `model`, `variants` (settings under which more keys are read), `source` (a recipe that it can train, instead of the
    bandit) and `overrides` for each run.
    """
    return TABLE.check_all(subject, settings, only, raise_failed, options)
