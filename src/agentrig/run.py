"""A run from start to end: `train` is the whole pipeline, in the order in which the data goes."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from agentrig.adapters import Adapter
from agentrig.algorithms import Algorithm
from agentrig.building import built
from agentrig.config import Plan, resolve
from agentrig.correctness import Correctness
from agentrig.ends import Interrupted, RunSignals, handling, interrupt
from agentrig.errors import AgentrigError, CheckpointDamaged, ConfigError, RunFileError, RunStopped
from agentrig.hardware import Hardware, select
from agentrig.observers import RunEnd, RunError
from agentrig.past import Past, begin, check_format, read_past, with_cure
from agentrig.report import build_report
from agentrig.rewards import Scorer
from agentrig.rundir import RunDirectory, agentrig_version, manifest, manifest_changes, run_name
from agentrig.scratch import temporary_files
from agentrig.splits import load_splits, split_warnings
from agentrig.workers import AgentPlan, Pool

if TYPE_CHECKING:
    from agentrig.rollouts import RolloutEngine
    from agentrig.runtime import Runtime

log = logging.getLogger(__name__)


def train(plan: Plan, *, resume: Path | None = None, from_step: int | None = None) -> dict[str, Any]:
    """Train: load tasks, bring agent and algorithm up, roll out and learn, write everything down.

    Args:
        plan: What `agentrig.config.resolve` returned.
        resume: A run directory to go on with; `plan` must then come from its `config.toml`. Nothing in it changes
            before the run has really started again.
        from_step: Go on from the checkpoint of this step, and forget what came after it; None for the latest.

    Returns:
        The content of `summary.json`.

    Raises:
        agentrig.errors.RunStopped: The run would have learned nothing; the message says what was seen.
        agentrig.errors.AgentrigError: Something that the user can mend.
        agentrig.ends.Interrupted: Ctrl-C, SIGTERM or SIGHUP; the step under way was finished and a checkpoint is there.
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

    from agentrig.session import RunSession  # brings Agent Lightning, which takes seconds

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
    complete, report_error = False, ""
    try:
        runtime.run(body)
        complete = not session.stopping
    except BaseException as error:
        plan.registry.notify("on_run_error", event=RunError(directory=run.path, error=error))
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
            if session.lines or not isinstance(sys.exception(), KeyboardInterrupt):
                report_error = try_report(run.path)
    summary: dict[str, Any] = run.read_json("summary.json")
    early = f"ended early; go on with: agentrig train --resume {run.path}"
    if complete:
        plan.registry.notify("on_run_end", event=RunEnd(directory=run.path, summary=summary, report_error=report_error))
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


def try_report(directory: Path) -> str:
    """Build a run's report; return why it could not be built, or an empty string.

    A failure here must not hide what ended the run, nor lose a run that ended well.
    """
    try:
        build_report([directory])
    except AgentrigError as error:
        log.error("the report could not be built: %s", error)
        return str(error)
    except Exception as error:
        log.exception("the report could not be built; the run's figures are safe in %s", directory)
        return f"{type(error).__name__}: {error}"
    return ""


def resume_plan(directory: Path, *, overrides: Sequence[str] = (), from_step: int | None = None) -> Plan:
    """Return the plan of a run directory, to go on with it.

    Args:
        directory: The run directory.
        overrides: `section.key=value`.
        from_step: The step of the checkpoint to go on from; then a run that has ended may be run again from there.

    Raises:
        ConfigError: It is no run directory, or of a later version, or one whose settings this version has not; or the
            run has ended and nothing is to be different.
    """
    if not (directory / "config.toml").is_file():
        raise ConfigError(f"{directory} is not a run directory: it has no config.toml")
    run = RunDirectory(directory)
    facts = run.read_json("manifest.json")
    check_format(directory, facts)
    try:
        plan = resolve(str(directory / "config.toml"), overrides=overrides)
    except ConfigError as error:
        if overrides or facts.get("agentrig", agentrig_version()) == agentrig_version():
            raise
        raise ConfigError(f"{error}\n  {directory}/config.toml is of agentrig {facts['agentrig']}") from None
    summary = run.read_json("summary.json")
    steps = getattr(plan.configs["algorithm"], "steps", None)
    ended = from_step is None and bool(summary.get("complete"))
    if ended and (not overrides or (steps is not None and steps <= summary["steps"])):
        name = plan.components["algorithm"].spec.name
        more = (
            "algorithm.steps=N"
            if steps is not None
            else f"KEY=VALUE, the key that says so for algorithm {name} (agentrig plugins show {name})"
        )
        raise ConfigError(
            f"{directory} has ended: its {summary['steps']} steps are done. To train on, say how many there shall be "
            f"in all: agentrig train --resume {directory} {more}"
        )
    return attrs.evolve(plan, recipe=facts.get("recipe", directory.name))


def ready_hardware(plan: Plan) -> Hardware:
    """Build the hardware, refuse it when it is broken, and set its environment.

    Raises:
        ConfigError: Algorithm and hardware do not go together.
        HardwareError: It is not there, or broken; never replaced by another.
    """
    hardware: Hardware = plan.build("hardware")
    spec: Any = plan.components["algorithm"].spec
    if spec.hardware and hardware.name not in spec.hardware:
        raise ConfigError(f"algorithm {spec.name} runs on {', '.join(spec.hardware)}, not on {hardware.name}")
    if not hardware.carries(spec.name):
        recipes: list[Any] = [c.spec for c in plan.registry.components("recipe")]
        able = [r.name for r in recipes if r.settings.get("algorithm", {}).get("use") in hardware.algorithms]
        raise ConfigError(
            f"hardware {hardware.name} carries {', '.join(hardware.algorithms)}, not {spec.name}\n"
            f"  recipes that run on it: {', '.join(able) or 'none installed'}"
        )
    select(hardware.name, [hardware])
    for name, value in hardware.environment().items():
        os.environ.setdefault(name, value)
    return hardware


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


def make_engine(
    plan: Plan, *, scorer: Scorer, adapter: Adapter, algorithm: Algorithm | None = None, pool: Pool | None = None
) -> tuple[RolloutEngine, Runtime]:
    """Return the rollout engine and the runtime that it works on; imports Agent Lightning.

    Args:
        plan: The run's.
        scorer: The reward.
        adapter: From traces to triplets.
        algorithm: Asked for a pool of its own (`Algorithm`).
        pool: What `first_runner` gave; it is closed where the algorithm has its own.
    """
    from agentrig.rollouts import RolloutEngine
    from agentrig.runtime import Runtime

    own = getattr(algorithm, "pool", None)
    if own is not None and pool is not None:
        pool.close()
    if pool is None or own is not None:
        pool = make_pool(plan, own or Pool)
    runtime = Runtime(pool)
    engine = RolloutEngine(
        runtime,
        scorer=scorer,
        adapter=adapter,
        on_rollout=lambda rollout: plan.registry.notify("on_rollout_end", rollout=rollout),
    )
    return engine, runtime


def make_pool(plan: Plan, make: Callable[..., Pool] = Pool) -> Pool:
    """Return the pool of a plan's runners; none is started."""
    spec: Any = plan.components["agent"].spec
    pool: Pool = make(
        agent_plan(plan),
        n=plan.runners.n,
        threads=plan.runners.threads,
        deadline_s=plan.runners.deadline_s,
        retries=plan.runners.retries,
        preload=spec.preload,
    )
    return pool


FIRST_RUNNER_S = 5.0
"""How long a run waits for its first runner to build the agent; an agent that takes longer is built beside the rest."""


@contextmanager
def first_runner(plan: Plan) -> Iterator[Pool]:
    """Start one runner, which builds the agent, before Agent Lightning, the algorithm and its server start.

    The agent is built in a runner and never in this process: its imports take seconds and hundreds of MB, it may
    start threads, and what it does to its process must not reach the reward's. A runner has to build it anyway, and
    is kept; so a run pays nothing for learning early that an agent cannot be built. An algorithm with a pool
    of its own (Ray's actors) needs its cluster first: the runner here is then only the trial.

    Yields:
        The pool, with one runner; closed at the end.

    Raises:
        AgentrigError: The agent cannot be built; the message names the plugin's file and line.
    """
    pool = make_pool(plan)
    try:
        pool.build_first(FIRST_RUNNER_S)
        yield pool
    finally:
        pool.close()


def agent_plan(plan: Plan) -> AgentPlan:
    """Return how runner processes build this plan's agent."""
    spec: Any = plan.components["agent"].spec
    return AgentPlan(
        name=plan.registry.reference(plan.components["agent"]),
        config=attrs.asdict(plan.configs["agent"]),
        files=tuple(plan.run.plugins),
        block=tuple(plan.run.block),
        environment=(*spec.environment, *plan.runners.environment),
    )


__all__ = ["RunStopped", "resume_plan", "train"]
