"""Repeats one stored step of a run, from its checkpoint and its recorded rollouts, and compares each stage."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from agentrig.algorithms import Algorithm, WeightDifference
from agentrig.errors import ConfigError, RunStopped
from agentrig.plan import Plan
from agentrig.processes.ends import handling, interrupt
from agentrig.processes.scratch import temporary_files
from agentrig.run.checkpoints import verify
from agentrig.run.digests import rollout_digests
from agentrig.run.directory import RunDirectory
from agentrig.run.past import Past
from agentrig.run.setup import make_engine, make_scorer, ready_hardware
from agentrig.run.splits import load_splits
from agentrig.run.stages import Stage, compare
from agentrig.run.weight_files import file_difference
from agentrig.tasks import Task

if TYPE_CHECKING:
    from agentrig.hardware import Hardware
    from agentrig.rollouts import Rollout
    from agentrig.run.recorded import RecordedEngine, RecordedSession
    from agentrig.runners.scorer import Scorer

log = logging.getLogger(__name__)


@attrs.frozen(kw_only=True)
class Replay:
    """A repeated step, compared with the recorded one.

    Attributes:
        step: The step.
        algorithm: The algorithm's name.
        start: The checkpoint that it started from; None for the starting model.
        stages: All stages, in the order of the step.
        inexact: Why the same bits cannot be expected; empty if they are.
        notes: Other remarks.
    """

    step: int
    algorithm: str
    start: Path | None
    stages: Sequence[Stage]
    inexact: Sequence[str]
    notes: Sequence[str]

    @property
    def first_difference(self) -> Stage | None:
        """The first stage that differs; later stages may differ because of it."""
        return next((stage for stage in self.stages if stage.result == "differs"), None)

    def as_dict(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        first = self.first_difference
        return {
            "step": self.step,
            "algorithm": self.algorithm,
            "start": str(self.start) if self.start else None,
            "same": first is None,
            "first_difference": first.name if first else None,
            "bit_for_bit_expected": not self.inexact,
            "inexact": list(self.inexact),
            "stages": [attrs.asdict(stage) for stage in self.stages],
            "notes": list(self.notes),
        }


def replay(plan: Plan, directory: Path, step: int, *, rescore: bool = False) -> Replay:
    """Repeat a step; nothing in the run directory changes.

    Args:
        plan: From `agentrig.run.resume.recorded_plan`.
        directory: The run directory.
        step: The step.
        rescore: Also run the reward again on the recorded outcomes.

    Raises:
        ConfigError: The run directory lacks something that the replay needs; the message says how to keep it.
        AgentrigError: The model, a checkpoint or the task set cannot be read.
    """
    run = RunDirectory(directory)
    line, checkpoint = needed(run, plan, step)
    with ExitStack() as ending:
        ending.enter_context(handling(interrupt))
        ending.enter_context(temporary_files())
        hardware = ready_hardware(plan)
        splits = load_splits(plan, ("train",))
        tasks = {task.id: task for task in splits["train"][1]}
        scorer = make_scorer(plan)
        ending.callback(scorer.close)

        from agentrig.run.recorded import read_rollouts

        rollouts, rows = read_rollouts(_rollout_file(run, step), tasks)
        recorded = run.checkpoints.path(step) if step in run.checkpoints.steps() else None
        past = Past(checkpoint=checkpoint, step=step - 1, lines=[one for one in run.metrics() if one["step"] < step])
        repeated = _repeat(plan, hardware, past, rollouts, splits["train"][1], recorded, scorer, ending)
        inexact = [] if repeated.refused else why_inexact(run.read_json("manifest.json"), line, repeated.line)
        made = repeated.line or {"algorithm": {}, "digests": rollout_digests(repeated.engine.returned)}
        stages = compare(
            line,
            made,
            rows=rows if repeated.engine.returned else [],
            rollouts=repeated.engine.returned,
            requested=repeated.engine.requested or "",
            exact=not inexact,
            difference=repeated.difference,
        )
        if repeated.refused:
            stages = [
                *(stage for stage in stages if stage.name in ("tasks", "rewards", "triplets")),
                Stage(name="update", result="differs", detail=f"the step stops the run: {repeated.refused}"),
            ]
        if rescore:
            stages.insert(0, rescored(rollouts, tasks, scorer))
        return Replay(
            step=step,
            algorithm=plan.components["algorithm"].spec.name,
            start=checkpoint,
            stages=stages,
            inexact=inexact,
            notes=[*_config_changes(run, plan), *([repeated.stopped] if repeated.stopped else [])],
        )


def replayable(run: RunDirectory) -> list[int]:
    """Return the steps that can be replayed."""
    kept = {0, *run.checkpoints.steps()}
    return [
        line["step"]
        for line in run.metrics()
        if line["step"] - 1 in kept and _rollout_file(run, line["step"]).is_file()
    ]


def needed(run: RunDirectory, plan: Plan, step: int) -> tuple[Mapping[str, Any], Path | None]:
    """Return the step's line of metrics, and the checkpoint that it starts from (None for the starting model).

    Raises:
        ConfigError: One of them is missing, or the rollouts are; the message names the steps that can be replayed.
        CheckpointDamaged: A file of the checkpoint is missing or cut off.
    """
    lines = {line["step"]: line for line in run.metrics()}
    able = ", ".join(map(str, replayable(run))) or "none"
    rest = f"Steps of this run that can be replayed: {able}"
    if step not in lines:
        known = f"it has steps {min(lines)} to {max(lines)}" if lines else "it has no steps"
        raise ConfigError(f"{run.path}/metrics.jsonl has no line of step {step}; {known}. {rest}")
    if not _rollout_file(run, step).is_file():
        raise ConfigError(
            f"{_rollout_file(run, step)}, the file with the rollouts of step {step}, is missing. Restore it from a "
            f"copy. {rest}"
        )
    if step == 1:
        return lines[step], None
    if step - 1 not in run.checkpoints.steps():
        there = ", ".join(map(str, run.checkpoints.steps())) or "none"
        raise ConfigError(
            f"step {step} starts from the checkpoint of step {step - 1}, which does not exist; steps with a "
            f"checkpoint: {there}.{_keeping(plan)} {rest}"
        )
    checkpoint = run.checkpoints.path(step - 1)
    verify(checkpoint)
    return lines[step], checkpoint


def why_inexact(facts: Mapping[str, Any], recorded: Mapping[str, Any], repeated: Mapping[str, Any]) -> list[str]:
    """Return why the same bits cannot be expected, as text.

    Args:
        facts: The run's manifest.
        recorded: The step's line.
        repeated: The repeated step's line.
    """
    now = repeated.get("digests", {}).get("made_with", {})
    was = recorded.get("digests", {}).get("made_with")
    if was is None:
        torch = facts.get("packages", {}).get("torch")
        return [f"the run has not recorded its threads and processor, only torch {torch or '(unknown)'}"]
    found = [f"{key} was {was[key]!r} and is {now.get(key)!r}" for key in was if was[key] != now.get(key)]
    if now.get("device", "cpu") != "cpu":
        found.append(f"on {now['device']} the order of additions differs from run to run")
    return found


def rescored(rollouts: Sequence[Rollout], tasks: Mapping[str, Task], scorer: Scorer) -> Stage:
    """Run the reward again on the recorded outcomes, and compare."""
    judged = [r for r in rollouts if r.outcome.failure is None]
    there = [r for r in judged if tasks.get(r.task.id) is r.task]
    scores = scorer([(r.task, r.outcome, r.trace) for r in there])
    off = [
        f"rollout {r.id}: {_said(r.score)} recorded, {_said(score)} now"
        for r, score in zip(there, scores, strict=True)
        if r.score is None or (r.score.status, r.score.value) != (score.status, score.value)
    ]
    lost = len(judged) - len(there)
    missing = f"; {lost} not scored: their tasks are not in the task set, or have changed" if lost else ""
    if off:
        detail = f"{len(off)} of {len(there)} rewards; {'; '.join(off[:3])}{' …' if len(off) > 3 else ''}{missing}"
        return Stage(name="rescore", result="differs", detail=detail)
    if not there:
        return Stage(name="rescore", result="not compared", detail=f"no outcome could be scored{missing}")
    return Stage(name="rescore", result="ok", detail=f"{len(there)} rewards are the recorded ones{missing}")


@attrs.frozen(kw_only=True)
class _Repeated:
    """A step that was repeated: its line of metrics, or why the run would have stopped before that line."""

    engine: RecordedEngine
    line: Mapping[str, Any]
    difference: WeightDifference | None
    refused: str
    stopped: str


def _repeat(
    plan: Plan,
    hardware: Hardware,
    past: Past,
    rollouts: Sequence[Rollout],
    train_tasks: Sequence[Task],
    recorded: Path | None,
    scorer: Scorer,
    ending: ExitStack,
) -> _Repeated:
    from agentrig.run.recorded import RecordedEngine, RecordedSession

    plan = attrs.evolve(plan, registry=plan.registry.unwatched())
    folder = Path(tempfile.mkdtemp(prefix="agentrig-replay-"))
    ending.callback(shutil.rmtree, folder, ignore_errors=True)
    adapter, algorithm = plan.build("adapter"), plan.build("algorithm")
    _, runtime = make_engine(plan, scorer=scorer, adapter=adapter)
    engine = RecordedEngine(rollouts, step=past.step + 1, runtime=runtime, scorer=scorer, adapter=adapter)
    session = RecordedSession(
        plan=plan,
        engine=engine,
        runtime=runtime,
        run=RunDirectory(folder / "run"),
        hardware=hardware,
        train_tasks=train_tasks,
        validation_tasks=(),
        report_tasks=(),
        audits={},
        past=attrs.evolve(past, ended=True),  # its guards check this step only
        audited=False,
    )
    difference, refused = None, ""
    try:
        difference = _run(algorithm, session, recorded)
    except RunStopped as error:
        refused = str(error)
    line = session.lines[-1] if len(session.lines) > len(past.lines) else None
    if line is None and not refused:
        raise ConfigError(
            f"algorithm {plan.components['algorithm'].spec.name} ended without a step: it does not get its rollouts "
            "from the session, so it cannot use recorded ones"
        )
    return _Repeated(
        engine=engine,
        line=json.loads(json.dumps(line or {}, default=float)),
        difference=difference,
        refused=refused if line is None else "",
        stopped=session.stopped,
    )


def _run(algorithm: Algorithm, session: RecordedSession, recorded: Path | None) -> WeightDifference | None:
    from agentrig.run.recorded import Replayed

    own = getattr(algorithm, "replay", None)
    if own is not None:
        found: WeightDifference | None = own(session, recorded)
        return found
    with contextlib.suppress(Replayed):
        algorithm.run(session)
    new, _ = session.saved.latest()
    if new is None or recorded is None or session.checkpoint is None:
        return None
    return file_difference(new, recorded, session.checkpoint)


def _rollout_file(run: RunDirectory, step: int) -> Path:
    return run.path / "rollouts" / f"train-{step:05d}.parquet"


def _keeping(plan: Plan) -> str:
    """Return which keys of the algorithm would have kept the checkpoint."""
    names = [n for n in ("save_every", "keep_every") if hasattr(plan.configs["algorithm"], n)]
    if not names:
        return ""
    keys = " ".join(f"algorithm.{name}=1" for name in names)
    return (
        f" A run keeps the checkpoint of every step with {keys} (each takes the space of the model and its optimizer)."
    )


def _config_changes(run: RunDirectory, plan: Plan) -> list[str]:
    """Return which keys differ between the plan and the configuration in the manifest."""
    was, now = run.read_json("manifest.json").get("config", {}), plan.as_dict()
    found = []
    for section, keys in now.items():
        for key, value in keys.items():
            before = was.get(section, {}).get(key, value)
            if json.dumps(before, default=str) != json.dumps(value, default=str):
                found.append(f"{section}.{key} is {value!r}; the run's manifest says {before!r}")
    return found


def _said(score: Any) -> str:
    return "no score" if score is None else f"{score.status} {score.value}"
