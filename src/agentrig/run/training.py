"""A run from start to end: `train` is the whole pipeline, in the order in which the data goes."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrig.algorithms import Algorithm
from agentrig.correctness import Correctness
from agentrig.errors import CheckpointDamaged, RunFileError
from agentrig.observers import RunEnd, RunError
from agentrig.plan import Plan
from agentrig.plugins.building import built
from agentrig.processes.ends import Interrupted, RunSignals, handling, interrupt
from agentrig.processes.scratch import temporary_files
from agentrig.run.directory import RunDirectory, run_name
from agentrig.run.manifest import manifest, manifest_changes
from agentrig.run.past import Past, begin, read_past, with_cure
from agentrig.run.setup import first_runner, make_engine, ready_hardware
from agentrig.run.splits import load_splits, split_warnings
from agentrig.runners.scorer import Scorer

if TYPE_CHECKING:
    pass


log = logging.getLogger(__name__)


def train(plan: Plan, *, resume: Path | None = None, from_step: int | None = None) -> dict[str, Any]:
    """Train: load tasks, bring agent and algorithm up, roll out and learn, write everything down.

    Args:
        plan: What `agentrig.plan.resolve` returned.
        resume: A run directory to go on with; `plan` must then come from its `config.toml`. Nothing in it changes
            before the run has really started again.
        from_step: Go on from the checkpoint of this step, and forget what came after it; None for the latest.

    Returns:
        The content of `summary.json`.

    Raises:
        agentrig.errors.RunStopped: The run would have learned nothing; the message says what was seen.
        agentrig.errors.AgentrigError: Something that the user can mend.
        agentrig.processes.ends.Interrupted: Ctrl-C, SIGTERM or SIGHUP; the step under way was finished and a
            checkpoint is there.
    """
    with ExitStack() as ending:
        ending.enter_context(handling(interrupt))  # later, and as long as there is something to save: RunSignals
        ending.enter_context(temporary_files())
        return _train(plan, resume, from_step, ending)


def _train(plan: Plan, resume: Path | None, from_step: int | None, ending: ExitStack) -> dict[str, Any]:
    start = time.perf_counter()

    # The directory of a run that goes on is nobody else's from here on.
    run, past = None, Past()
    if resume is None:
        run_name(plan)
    else:
        run = RunDirectory(resume)
        run.lock()
        ending.callback(run.release)
        past = read_past(run, from_step=from_step)

    # Hardware first: its variables must stand before torch is imported by whomever.
    hardware = ready_hardware(plan)

    # Tasks.
    splits = load_splits(plan)
    warnings = split_warnings(splits, plan.build("tasks"))

    # Reward and adapter, and the agent in the first runner: what can't be built ends the run before it has begun.
    scorer = make_scorer(plan)
    audit = audit_scorer(plan) if plan.run.audit else None
    adapter = plan.build("adapter")
    pool = ending.enter_context(first_runner(plan))

    from agentrig.run.session import RunSession  # brings Agent Lightning, which takes seconds

    # The run directory: new, or changed by `begin_again` once the run has started.
    facts = manifest(plan, hardware, splits)
    if run is not None:
        before = run.read_json("manifest.json")
        warnings += [*manifest_changes(before, facts), *past.warnings]
        facts["resumed"] = [*before.get("resumed", []), facts["created"]]
        facts["created"] = before.get("created", facts["created"])
    facts["warnings"] = warnings
    for warning in warnings:
        log.warning("%s", warning)
    if run is None:
        run = RunDirectory.create(plan)
        ending.callback(run.release)
        run.write_json("manifest.json", facts)

    # The algorithm, and what rolls out for it.
    algorithm: Algorithm = plan.build("algorithm")
    engine, runtime = make_engine(plan, scorer=scorer, adapter=adapter, algorithm=algorithm, pool=pool)

    def begin_again() -> None:
        runtime.wait_for_agent()
        if session.stopping:
            raise KeyboardInterrupt("interrupted while the run started")
        begin(run, plan, facts, past)

    def body() -> None:
        algorithm.run(session)
        session.begin()  # of an algorithm that planned nothing and rolled nothing out

    session = RunSession(
        plan=plan,
        engine=engine,
        runtime=runtime,
        run=run,
        hardware=hardware,
        train_tasks=splits["train"][1],
        validation_tasks=splits["validation"][1],
        report_tasks=splits["report"][1],
        audit=audit,
        past=past,
        begin=begin_again if resume else lambda: None,
    )

    # Roll out and learn, until the algorithm is done.
    signals = RunSignals(session, runtime.abort)
    ending.enter_context(handling(signals))
    complete, ended = False, None
    try:
        runtime.run(body)
        complete = not session.stopping
    except BaseException as error:
        ended = error
        if session.begun or not resume:
            kind = "KeyboardInterrupt" if isinstance(error, KeyboardInterrupt) else type(error).__name__
            with noted():
                run.write_json("error.json", {"error": kind, "message": str(error)})
        elif isinstance(error, CheckpointDamaged):
            raise with_cure(error, run) from error.__cause__
        raise
    finally:
        signals.writing = True
        if session.begun or not resume:
            wall_s = time.perf_counter() - start + sum(line["step_s"] for line in past.lines)
            with noted() if not complete else nullcontext():
                if session.lines:
                    run.write_json("summary.json", {**session.summary(wall_s=wall_s), "complete": complete})
            if ended is not None:
                plan.registry.notify("on_run_error", event=RunError(directory=run.path, error=ended))
    summary: dict[str, Any] = run.read_json("summary.json")
    early = f"ended early; go on with: agentrig train --resume {run.path}"
    if complete:
        plan.registry.notify("on_run_end", event=RunEnd(directory=run.path, summary=summary))
    else:
        plan.registry.notify("on_run_error", event=RunError(directory=run.path, error=KeyboardInterrupt(early)))
    if signals.first is not None:
        raise Interrupted(signals.first, "the run has ended, and its report is written" if complete else early)
    return summary


@contextmanager
def noted() -> Iterator[None]:
    """Log that a file cannot be written while something else ends the run, which must not be hidden by it."""
    try:
        yield
    except RunFileError as error:
        log.error("%s", error)


def make_scorer(plan: Plan) -> Scorer:
    """Return what judges by the plan's reward, and says what is correct by its rules."""
    spec: Any = plan.components["reward"].spec
    correctness = Correctness(run_at=plan.run.correct_at, reward_at=spec.correct_at)
    return Scorer(plan.build("reward"), budget_s=plan.run.reward_budget_s, correctness=correctness)


def audit_scorer(plan: Plan) -> Scorer:
    """Return what judges by the reward that is only logged, with its own defaults."""
    component = plan.registry.find("reward", plan.run.audit)
    spec: Any = component.spec
    correctness = Correctness(reward_at=spec.correct_at)
    return Scorer(built(component, spec.config()), budget_s=plan.run.reward_budget_s, correctness=correctness)
