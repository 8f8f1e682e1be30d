"""A run from start to end: `train` is the whole pipeline, in the order of the data flow."""

from __future__ import annotations

import logging
import math
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrig.errors import CheckpointDamaged, ConfigError, RunFileError, RunStopped, memory_named
from agentrig.observers import RunEnd, RunError
from agentrig.plan import Plan, to_toml
from agentrig.plugins.auto import OWN
from agentrig.processes.ends import Interrupted, RunSignals, handling, interrupt
from agentrig.processes.scratch import temporary_files
from agentrig.run.checkpoints import run_id_of
from agentrig.run.damage import reading
from agentrig.run.directory import RunDirectory, descent_of, run_name, see_rollouts
from agentrig.run.guards import NO_SIGNAL
from agentrig.run.log_file import warnings_kept
from agentrig.run.loop import runnable
from agentrig.run.manifest import changed_settings, manifest, manifest_changes
from agentrig.run.past import Past, begin, read_past, with_cure, with_start
from agentrig.run.session import Enough, RunSession
from agentrig.run.splits import few_warnings, label_warnings, load_splits, split_warnings, start_warnings

if TYPE_CHECKING:
    from agentrig.plugins.registry import Registry

log = logging.getLogger(__name__)

SEEN_IN_ROLLOUTS = frozenset(
    {
        "failures",
        "no-answers",
        "calls-not-recorded",
        "call-errors",
        "aborted-calls",
        "unmatched-calls",
        NO_SIGNAL,
        "sampled-differently",
    }
)
"""The causes of a stop that single rollouts show."""


def train(
    plan: Plan,
    *,
    resume: Path | None = None,
    from_step: int | None = None,
    starting: Callable[[Path], None] = lambda directory: None,
    enough: Enough | None = None,
    audit_s: float = math.inf,
) -> dict[str, Any]:
    """Train: load tasks, start agent and algorithm, run rollouts and updates, write the run directory.

    Args:
        plan: The plan from `agentrig.plan.resolve`.
        resume: A run directory to resume; `plan` must then come from its `config.toml`. Its files change
            only in `begin_run`, once everything is loaded and the first transfer of weights is proven.
        from_step: Resume from the checkpoint of this step and delete everything after it; None for the latest.
        starting: Called with the run directory, before the agent, the server and the learner start.
        enough: Says after a step whether the run ends before its last one; only the core's loop asks.
        audit_s: Seconds by the clock on the wall that computing the gradients of the first steps again may take.

    Returns:
        The content of `summary.json`.

    Raises:
        agentrig.errors.RunStopped: The run would have learned nothing; the message says what was observed.
        agentrig.errors.AgentrigError: An error that the user can fix.
        agentrig.processes.ends.Interrupted: Ctrl-C, SIGTERM or SIGHUP; the current step was finished and a
            checkpoint was saved.
    """
    with ExitStack() as ending:
        ending.enter_context(handling(interrupt))  # replaced by RunSignals once there is something to save
        ending.enter_context(temporary_files())
        start = time.perf_counter()
        logged = ending.enter_context(warnings_kept())

        # Lock the directory of a resumed run.
        run, past = None, Past()
        if resume is None:
            run_name(plan.run, plan.recipe)
        else:
            run = RunDirectory(resume)
            run.lock()
            ending.callback(run.release)
            past = read_past(run, from_step=from_step)

        # Hardware first: its environment variables must be set before anything imports torch.
        hardware = plan.use_hardware()
        plan.check_server(hardware)
        plan.check_algorithm()
        plan.check_credit()

        # Every component that the run names, before tasks are loaded or a model is started: the run fails here if one
        # of them can't be built. The agent is built in a runner, while the model's server starts and the learner loads.
        pool = ending.enter_context(plan.runner_pool(trains=True))
        plan.start_observers()
        tasks = plan.tasks()
        scorer, second = plan.scorer(), plan.second_scorers()
        for each in (scorer, *second.values()):
            ending.callback(each.close)
        adapter = plan.build("adapter")
        algorithm, credit = runnable(plan.build("algorithm")), plan.build("credit")
        if plan.components["server"].spec.name != OWN:
            plan.build("server")
        splits = load_splits(tasks, plan.run, who=plan.whose_tasks)

        # The run directory: a new one, or that of the resumed run, which changes in `begin_run` only.
        facts = manifest(plan, hardware, splits)
        facts["descent"] = descent_of(facts["model"])
        told = few_warnings(splits["train"][1], plan.configs["algorithm"])
        told += [*split_warnings(splits, tasks, plan.run), *label_warnings(splits, facts["model"])]
        told += start_warnings(facts["model"])
        facts["warnings"] = [*plan.gold_warnings(), *told]
        if run is not None:  # with what its directory knows of the run before
            before = run.manifest()
            with reading(run.path / "manifest.json"):
                facts["lost"] = [*before.get("lost", []), *past.lost]
                facts["warnings"] += [*manifest_changes(before, facts), *past.warnings, *facts["lost"]]
                facts["resumed"] = [*before.get("resumed", []), facts["created"]]
                facts["id"] = before.get("id") or (past.checkpoint and run_id_of(past.checkpoint)) or facts["id"]
                facts["created"] = before.get("created", facts["created"])
                facts["descent"] = before.get("descent", facts["descent"])
                facts["changes"] = changed_settings(before, facts, step=past.step, ended=past.ended)
                configs = (before.get("config", {}), facts["config"])
                asked = [before.get("most_steps"), *(each.get("algorithm", {}).get("steps") for each in configs)]
                # A resume may ask for fewer, to measure the model as it is.
                facts["most_steps"] = max((n for n in asked if n is not None), default=None)
                if before.get("server", {}).get("name") == facts["server"]["name"]:
                    facts["server"] = before["server"]  # with the reason of `auto`: config.toml names the server
                past = with_start(past, run, before, facts)
        for warning in facts["warnings"]:
            log.warning("%s", warning)
        sessions: list[RunSession] = []  # none yet

        def leaves_nothing(error: BaseException | None) -> bool:
            """Whether a new run ended before it began: a wrong setting, an agent that can't be built, or Ctrl-C."""
            if resume or error is None or any(each.begun for each in sessions):
                return False
            broken = any(error is each.runtime.broken for each in sessions)
            return broken or isinstance(error, (Interrupted, ConfigError))

        if run is None:
            run = RunDirectory.create(plan)
            ending.callback(run.release)
            ending.push(lambda kind, error, trace: run.remove() if leaves_nothing(error) else None)
            run.write_json("manifest.json", facts)
        starting(run.path)

        # The engine that runs the algorithm's rollouts, and the session that the algorithm trains with.
        gateway = ending.enter_context(plan.make_gateway())
        engine, runtime = plan.engine(scorer=scorer, adapter=adapter, algorithm=algorithm, pool=pool, gateway=gateway)

        def begin_run() -> None:
            """Called by the session once the run has actually started."""
            runtime.wait_for_agent()
            if resume:
                if session.stopping:
                    raise KeyboardInterrupt("interrupted while the run started")
                begin(run, to_toml(plan.as_dict()), facts, past)
                logged.begin(run.path / "log.jsonl", lambda: session.step)

        session = RunSession(
            plan=plan,
            engine=engine,
            runtime=runtime,
            run=run,
            hardware=hardware,
            tasks={role: rows for role, (_, rows) in splits.items()},
            second=second,
            credit=credit,
            past=past,
            begin=begin_run,
            resumed=resume is not None,
            facts=facts,
        )
        sessions.append(session)
        session.enough, session.start = enough, start - past.spent_s
        session.auditing.wall_s = audit_s
        ending.callback(session.delivery.end)
        ending.callback(session.auditing.close)
        if not resume:
            logged.begin(run.path / "log.jsonl", lambda: session.step)

        def abort(error: Interrupted) -> None:
            if error.at_once and session.begun:
                _write_error(run, error)  # there may be no time for it later
            runtime.abort(error)

        signals = RunSignals(session, abort)
        ending.enter_context(handling(signals))

        # Run rollouts and updates until the algorithm is done.
        def body() -> None:
            try:
                try:
                    with memory_named("the run has ended", "Use a smaller model, or a device with more memory"):
                        algorithm.run(session)
                finally:
                    session.close()
                session.begin()  # for an algorithm without plan_steps and rollouts
                session.check_learned()
            except RunStopped as stopped:
                if stopped.cause in SEEN_IN_ROLLOUTS:
                    stopped.args = (f"{stopped}\n  {see_rollouts(run.path)}",)
                raise
            if session.lines and not session.stopping:
                session.auditing.finish(session.lines[-1]["step"], session.summary(wall_s=0.0)["accuracy"])

        complete, ended, stopped = False, None, None  # stopped: how a run ended that the user stopped
        try:
            runtime.run(body)
            complete = not session.stopping
            if not complete:
                early = f"ended early; {session.advice()}{session.unmeasured()}"
                stopped = KeyboardInterrupt(early) if signals.first is None else Interrupted(signals.first, early)
        except BaseException as error:
            ended = error
            if isinstance(error, Interrupted) and error.at_once:
                error.args = (f"ended at once; {session.advice()}",)  # a checkpoint may have been completed since
            if not session.begun and isinstance(error, CheckpointDamaged) and resume:
                raise with_cure(error, run) from error.__cause__
            raise
        finally:
            signals.writing = True
            # Nothing in the directory of a resumed run has changed before it began.
            if not leaves_nothing(ended) and (session.begun or not resume):
                wall_s = time.perf_counter() - session.start
                with noted() if not complete else nullcontext():
                    # Without a step there is no summary that says how the run ended.
                    how = ended if session.lines else ended or stopped
                    if how is not None:
                        _write_error(run, how)
                    if session.lines and not session.keeps_end:
                        run.write_json("summary.json", {**session.summary(wall_s=wall_s), "complete": complete})
                    session.written = complete
                if ended is not None:
                    plan.registry.notify("on_run_error", event=RunError(directory=run.path, error=ended))
                    settle(plan.registry, run)
                    if isinstance(ended, RunStopped):
                        ended.run = run.path
                        ended.add_note(f"What led to it, and what to change: agentrig why {shlex.quote(str(run.path))}")

        # The run has ended normally, or early because the user asked for it.
        summary: dict[str, Any] = run.read_json("summary.json")
        if stopped is None:
            plan.registry.notify("on_run_end", event=RunEnd(directory=run.path, summary=summary))
        else:
            plan.registry.notify("on_run_error", event=RunError(directory=run.path, error=stopped))
        summary |= settle(plan.registry, run)
        if signals.first is not None:
            raise stopped or Interrupted(signals.first, "the run has ended, and its report is written")
        return summary


def _write_error(run: RunDirectory, error: BaseException) -> None:
    kind = "KeyboardInterrupt" if isinstance(error, KeyboardInterrupt) else type(error).__name__
    with noted():
        run.write_json("error.json", {"error": kind, "message": str(error), "cause": getattr(error, "cause", "")})


def settle(registry: Registry, run: RunDirectory) -> dict[str, Any]:
    """Let observers finish what they do in threads of their own; write the counts into `summary.json`.

    Returns:
        The entry of `summary.json`; an empty one without such observers.
    """
    settled = registry.settle()
    if not settled:
        return {}
    writes = {"observer_writes": settled}
    with noted():
        summary = run.read_json("summary.json")
        if summary and summary.get("observer_writes") != settled:
            run.write_json("summary.json", {**summary, **writes})
    return writes


@contextmanager
def noted() -> Iterator[None]:
    """Log a write error instead of raising it, so that it does not hide the error that ended the run."""
    try:
        yield
    except RunFileError as error:
        log.error("%s", error)
