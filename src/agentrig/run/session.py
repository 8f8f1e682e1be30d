"""The session: what a run passes to its algorithm, and where its metrics are collected."""

from __future__ import annotations

import json
import logging
import shlex
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import attrs

from agentrig.algorithms import Measurement
from agentrig.audit.sketch import Sketch
from agentrig.background import in_background
from agentrig.correctness import CORRECT_TOLD
from agentrig.credit import Credit, TurnConfig, unscored_calls
from agentrig.delivery import Delivery
from agentrig.endpoints import Endpoint
from agentrig.errors import AgentrigError, ConfigError, RunFileError, RunStopped
from agentrig.figures import amount, mean, no_room
from agentrig.hardware import Hardware
from agentrig.ledger import Entry, Ledger, StepTotals, totals
from agentrig.observers import RunStart, StepEnd
from agentrig.plan import Plan, resume_command
from agentrig.rewards import Score
from agentrig.rollouts import Mode, OnGroups, Rollout
from agentrig.run import guards
from agentrig.run.auditing import Auditing, Rebuilt
from agentrig.run.checkpoints import SAVED
from agentrig.run.directory import FILES, RunDirectory, is_end, table_name
from agentrig.run.gate import Gate
from agentrig.run.metrics import (
    component_means,
    count_failures,
    count_nodes,
    reward_figures,
    second_reward_figures,
    untaught_groups,
    warn_of_new_failures,
)
from agentrig.run.past import Past, over_common, stated_ends
from agentrig.run.trends import LOOKED_AT, SOLVED, Guards
from agentrig.run.verdict import by_class
from agentrig.runners.engine import RolloutEngine, Versions
from agentrig.runners.runtime import Runtime
from agentrig.runners.scorer import Scorer
from agentrig.servers import Server, ServerMemory, ServerPlan
from agentrig.tasks import ROLES, Task
from agentrig.text import flat, without_nan

log = logging.getLogger(__name__)

END_S = 10.0
"""Seconds that rollouts which nobody waits for any more may take to end: the reward may be at work."""

Enough = Callable[[int, Callable[[], Measurement | None]], bool]
"""Whether a run ends before its last step: asked with each step that was learned, and what validates its weights."""


class RunSession:
    """Implements `agentrig.algorithms.Session`; `plan`, `engine` and `runtime` are for bridges.

    Args:
        run: The run directory, rewound to its last checkpoint.
        tasks: Role to the tasks of its split: `train`, `validation`, `report`.
        credit: What the run's calls are worth; None to build the plan's.
        past: The state that a resumed run continues from.
        begin: Called once the run has actually started.
        resumed: Whether the directory has a run already: nothing in it changes before `begin`.
    """

    def __init__(
        self,
        *,
        plan: Plan,
        engine: RolloutEngine,
        runtime: Runtime,
        run: RunDirectory,
        hardware: Hardware,
        tasks: Mapping[str, Sequence[Task]],
        second: Mapping[str, Scorer],
        credit: Credit | None = None,
        past: Past | None = None,
        begin: Callable[[], None] = lambda: None,
        resumed: bool = False,
        facts: dict[str, Any] | None = None,
    ) -> None:
        past = past or Past()
        self.train_tasks, self.validation_tasks, self._report_tasks = (tasks[role] for role in ROLES)
        self.directory = run.path
        self.resumes = resume_command(plan.resumes, run.path)
        self.hardware = hardware
        self.seed = plan.run.seed
        self.first_step = self.step = past.step + 1  # step: that is under way; the last one while the run ends
        self.checkpoint, self.resumed = past.checkpoint, resumed
        self.stopping = self.written = False  # written: the summary of a complete run is
        self.checking = 0  # the step that is audited now
        self.measuring: Literal["", "before", "after"] = ""  # training: a measurement that is no part of a step
        self.enough: Enough | None = None
        self.start = time.perf_counter() - past.spent_s  # of the run, with its earlier parts and nothing between them
        self._saved_step = past.step
        self.plan, self.engine, self.runtime = plan, engine, runtime
        self.credit: Credit = plan.build("credit") if credit is None else credit
        self.gate = Gate.of(plan.components["credit"].spec, plan.configs["credit"])
        self.delivery = Delivery(run.path, on=plan.run.delivery, lines=past.lines)
        rebuilt = Rebuilt(plan)
        given = bool(getattr(plan.configs["algorithm"], "demonstrations", ""))
        self.auditing = Auditing(
            run.path, rebuilt, first=self.first_step, on=plan.run.audit, tasks=tasks, demonstrations=given
        )
        self._run = run
        self._learns = getattr(plan.components["algorithm"].spec, "trains", "weights") == "weights"
        self._second = second
        self._begin_run, self.begun = begin, False
        self._steps: int | None = None
        self._facts = facts if facts is not None else {}
        self._progress: dict[str, Any] = dict(past.progress)
        self._progressing = threading.RLock()  # a checkpoint may be saved in another thread
        self._saved = {"written": 0, "bytes": 0, "seconds": 0.0}
        self.lines: list[Mapping[str, Any]] = list(past.lines)
        self._step_rollouts: list[Rollout] = []
        self._judged: list[Rollout] = []  # of the latest step that was learned
        self._step_second: dict[str, dict[str, Score]] = {}
        self._files: dict[str, str] = {}  # SHA-256 of the step's files of rollouts, by mode
        self._step_time: dict[str, float] = defaultdict(float)
        self._validated: Measurement | None = None
        self.measured: Measurement | None = None
        self._step_start, self._proven_before = time.perf_counter(), 0.0  # seconds of proofs before the step began
        self._ledger = Ledger(
            engine.adapter,
            adapter_name=plan.components["adapter"].spec.name,
            algorithm_name=plan.components["algorithm"].spec.name,
            negative_scale=getattr(plan.configs["credit"], "negative_scale", 1.0),
            relative=bool(getattr(plan.components["credit"].spec, "relative", True)),
        )
        self.keeps_end = past.ended  # the directory has the summary of an earlier end
        self._demonstrated = bool(getattr(plan.configs["algorithm"], "demonstrations", ""))
        rewarded = bool(getattr(plan.components["credit"].spec, "rewarded", True))
        self._by_rewards = rewarded and not self._demonstrated
        self._guards = Guards.after(past.lines, ended=past.ended, demonstrated=not self._by_rewards)
        self.solved = self._guards.solved
        self._failures: Counter[str] = Counter()
        for line in past.lines:
            self._failures.update(line["failures"])
        self._failures.update({kind: count for kind, count in past.measured.items() if kind})
        self._measured = sum(past.measured.values())
        self._warnings: list[str] = []
        self._notes: list[str] = []
        self._odd: set[str] = set()  # metrics that were not finite
        self._first_validation: Sequence[Rollout] = ()
        self._warned: set[Callable[..., bool]] = set()  # what was warned of, and is not again
        self.ahead: RolloutsAhead | None = None
        self._rollouts_s = 0.0  # of the step's training rollouts, whether the run waited for them or not
        self.overlap_s: float | None = None  # of these, while the step before was learned

    def begin(self, steps: int | None = None) -> None:
        """Note that the run has actually started, and notify the observers; only the first call has an effect.

        `plan_steps` calls it: in a resumed run once the checkpoint is read, and the model is served with the learner's
        weights. Otherwise the first rollouts or the end of the algorithm call it. It waits until the agent is built.
        """
        if self.begun:
            return
        if self.first_step > 1:
            self.delivery.settle()  # a transfer that failed must not cost what the run has so far
        self._steps = steps
        self._begin_run()  # from here on, a resumed run rewrites its directory
        self.begun = True
        self.plan.registry.notify(
            "on_run_start",
            event=RunStart(
                directory=self.directory, config=self.plan.as_dict(), steps=steps, first_step=self.first_step
            ),
        )
        self.start_clock()

    def advice(self) -> str:
        """Return what a run that was stopped has lost, and the command that goes on."""
        if self.written:
            return f"the run is complete; its report: agentrig report {shlex.quote(str(self.directory))}"
        lost = [line["step"] for line in list(self.lines) if line["step"] > self._saved_step]
        costs = ""
        if lost:
            costs = f"step {lost[0]} was" if len(lost) == 1 else f"steps {lost[0]} to {lost[-1]} were"
            after = f"goes on after step {self._saved_step}" if self._saved_step else "starts over"
            costs += f" not saved, so a resume {after}; "
        return f"{costs}resume with: {self.resumes}"

    def unmeasured(self) -> str:
        """Return how to measure a run that was stopped after a step as it is; '' if nothing is to be measured."""
        known = "after" in self._progress or not hasattr(self.plan.configs["algorithm"], "steps")
        if known or not self._saved_step or not self._report_tasks:
            return ""
        command = resume_command(self.plan.resumes, self.directory, f"algorithm.steps={self._saved_step}")
        return f"\n  The model was not measured on the held-out tasks after training. To measure it as it is: {command}"

    @property
    def untouched(self) -> bool:
        """Whether the run waits for rollouts of which no runner has taken one: if it ends now, nothing is lost."""
        return bool(getattr(self.runtime.pool, "untouched", False))

    @property
    def prompts(self) -> Mapping[str, str]:
        """Implement `Session.prompts`."""
        return self.engine.prompts

    @prompts.setter
    def prompts(self, templates: Mapping[str, str]) -> None:
        self.engine.prompts = dict(templates)

    # --- what algorithms call ---------------------------------------------------------------------

    def plan_steps(self, steps: int) -> None:
        """Notify the observers of the run's start and its number of steps."""
        if self.first_step > steps + 1:
            raise ConfigError(
                f"{self.directory} has {amount(self.first_step - 1, 'step')} already, and is to have {steps} in all"
            )
        self.begin(steps)

    def server(self, plan: ServerPlan) -> Server:
        """Return the model's server that `[server] use` names, not started."""
        return self.plan.make_server()(plan)

    def check_teacher(self, servers: Sequence[Endpoint]) -> None:
        """Implement `Session.check_teacher`."""
        ready = getattr(self.credit, "ready", None)
        if ready is not None:
            ready(servers[0])

    def rollouts(
        self,
        tasks: Sequence[Task],
        *,
        n: int,
        endpoint: Endpoint | Sequence[Endpoint],
        step: int,
        mode: Mode = "train",
        on_groups: OnGroups | None = None,
        version: int | None = None,
    ) -> list[Rollout]:
        """Run, score, adapt, check and store a batch of rollouts."""
        self.begin()
        self._check_idle()
        self._prove_first()
        versions = None if version is None else Versions(served=version, oldest=version)
        start, sampling, expected = time.perf_counter(), _sampling(endpoint), n * len(tasks)
        first: list[Rollout] = []

        def arrived(groups: Mapping[int, Sequence[Rollout]]) -> None:
            if len(first) < guards.EARLY:
                first.extend(rollout for group in groups.values() for rollout in group)
                if self._learns and guards.EARLY <= len(first) < expected:
                    try:
                        if all(r.failure for r in first):
                            self.delivery.settle()
                            self.check_failures(first, step=step, mode=mode, expected=expected)
                        if mode != "train":
                            self._check_calls(first)
                    except AgentrigError:
                        self.store_rollouts(first, mode=mode, step=step)
                        raise
            if on_groups is not None:
                on_groups(groups)

        before = len(self._step_rollouts) if mode == "train" else 0  # a step may have several batches
        rollouts = self.engine.run(
            tasks, n=n, endpoint=endpoint, step=step, mode=mode, on_groups=arrived, versions=versions, first=before
        )
        wall = time.perf_counter() - start
        self.file(rollouts, mode=mode, step=step, sampling=sampling, wall_s=wall, expected=expected)
        return rollouts

    def begin_rollouts(
        self,
        tasks: Sequence[Task],
        *,
        n: int,
        endpoint: Endpoint | Sequence[Endpoint],
        step: int,
        version: int,
        max_staleness: int,
    ) -> RolloutsAhead:
        """Start the training rollouts of the next step, and return at once.

        One batch at a time: call `wait` of what it returns before any other rollouts, validation or report, and before
        the server takes weights. A rollout that is more than `max_staleness` versions behind the weights that its step
        begins with, `step - 1`, fails with the kind `stale-weights`.

        Raises:
            ValueError: `version`, which the server has, is further behind.
        """
        self.begin()
        self._check_idle()
        self._prove_first()
        versions = Versions.of(version, step=step, max_staleness=max_staleness)

        def run() -> tuple[list[Rollout], float]:
            start = time.perf_counter()
            found = self.engine.run(tasks, n=n, endpoint=endpoint, step=step, mode="train", versions=versions)
            return found, time.perf_counter() - start

        self.ahead = RolloutsAhead(
            session=self,
            step=step,
            sampling=_sampling(endpoint),
            expected=n * len(tasks),
            running=in_background(run, "rollouts"),
        )
        return self.ahead

    def _check_idle(self) -> None:
        """Raise if rollouts are under way: the two would take each other's results."""
        if self.ahead is not None:
            raise AgentrigError(
                f"the rollouts of step {self.ahead.step} are still under way: call `wait` of what `begin_rollouts` "
                "returned before any other rollouts, validation or report"
            )

    def _prove_first(self) -> None:
        """Wait for the proof of the last transfer if rollouts come one at a time, so that such a run repeats itself.

        A server rounds otherwise when it decodes a rollout and the probe in one batch.
        """
        if self.calls == 1:
            self.delivery.settle()

    def close(self) -> None:
        """Stop the rollouts that `begin_rollouts` started and nobody waited for; the run calls this at its end."""
        ahead, self.ahead = self.ahead, None
        if ahead is not None:
            self.runtime.end_results(AgentrigError("the run has ended before its rollouts"))
            ahead.end()

    def file(
        self,
        rollouts: Sequence[Rollout],
        *,
        mode: Mode,
        step: int,
        sampling: Mapping[str, Any],
        wall_s: float,
        expected: int,
        learns: bool | None = None,
        waited_s: float | None = None,
    ) -> None:
        """Store and check a batch of rollouts.

        Args:
            rollouts: All of a mode and step, or of one batch of a step.
            learns: Whether the algorithm learns from triplets, without which no check asks for any; None for what its
                spec says.
            waited_s: Seconds of this step in which the run waited for them; None for all that they took.
        """
        learns = self._learns if learns is None else learns
        if mode == "train":
            self._second_scores(rollouts)
        before = self._step_rollouts if mode == "train" else ()  # the file has all batches of a step
        self.store_rollouts([*before, *rollouts], mode=mode, step=step)
        known = set(self._failures)
        self._failures.update(count_failures(rollouts))
        self.delivery.offer(rollouts)
        self.delivery.settle()  # what was sampled counts only if the weights had arrived
        if self._learns or mode != "train":
            self.check_failures(rollouts, step=step, mode=mode)
        warn_of_new_failures(rollouts, known, step=step, mode=mode)
        self._warn_once(guards.warn_of_fields, rollouts, attrs.asdict(self.plan.config("algorithm")))
        self._warn_once(guards.warn_of_form, rollouts, step=step)
        self._warn_once(guards.warn_of_late, rollouts, step=step)
        self._warn_once(guards.warn_of_overpaid, rollouts, step=step, reward=self.plan.components["reward"].spec.name)
        if mode != "train":
            self._measured += len(rollouts)
            self._warn_once(guards.warn_of_sampling, rollouts, sampling, mode=mode)
            if self.measuring == "before" and self.first_step == 1 and self._learns and self._by_rewards:
                guards.check_answers(rollouts)
            self._check_calls(rollouts)
            return
        self.spend(rollouts, wall_s=wall_s, waited_s=wall_s if waited_s is None else waited_s)
        self._rollouts_s += wall_s
        self._step_rollouts += rollouts
        if learns:
            guards.check_triplets(rollouts, step=step, adapter=self.plan.components["adapter"].spec)
        if learns and not self._demonstrated:
            guards.check_sampling(rollouts, sampling, step=step)
        self._ledger.record(rollouts, step=step, expected=expected)
        self._warn_once(guards.warn_of_constraints, rollouts, step=step)
        self._warn_once(guards.warn_of_unseen, rollouts, step=step, unrecorded=self.engine.unrecorded)
        self._judged = list(self._step_rollouts) if learns else []
        credit, judged = self.plan.configs["credit"], self._step_rollouts
        if learns and self._guards.check_signal(judged, step=step, credit=credit) and not self.solved:
            self.solved = True
            log.info("step %d: every rollout was correct in %d steps running: the tasks are solved", step, SOLVED)

    def _check_calls(self, rollouts: Sequence[Rollout]) -> None:
        """Stop before the first step where the credit `turn` would find no reward of a call in it."""
        turn = self._learns and not self._demonstrated and isinstance(self.plan.configs["credit"], TurnConfig)
        if turn and self.measuring == "before" and self.first_step == 1 and (why := unscored_calls(rollouts)):
            raise AgentrigError(f"before step 1: {why}")

    def _warn_once(self, warn: Callable[..., bool], *arguments: Any, **named: Any) -> None:
        if warn not in self._warned and warn(*arguments, **named):
            self._warned.add(warn)

    def check_failures(
        self, rollouts: Sequence[Rollout], *, step: int, mode: Mode = "train", expected: int | None = None
    ) -> None:
        """Implement `Session.check_failures`, for rollouts of any mode; see `agentrig.run.guards.check_failures`."""
        guards.check_failures(rollouts, self.plan.run.failure_limit, step=step, mode=mode, expected=expected)

    def check_learned(self) -> None:
        """Stop a run at its end if it was too short for its guards, and all of its rewards were the same."""
        if self._judged and self._by_rewards and not self._guards.varied:
            guards.check_rewards(self._judged, step=self._judged[0].step, running=self._guards.silent)

    def spend(self, rollouts: Sequence[Rollout], *, wall_s: float, waited_s: float) -> None:
        """Add the seconds that the run waited for rollouts to the current step's time."""
        # Rewards are computed while rollouts run; their own seconds count, at most the whole wall time.
        reward = min(sum(r.reward_s for r in rollouts), wall_s) * (waited_s / wall_s if wall_s else 1.0)
        self._step_time["reward"] += reward
        self._step_time["rollout"] += waited_s - reward

    def store_rollouts(self, rollouts: Sequence[Rollout], *, mode: Mode, step: int) -> None:
        """Write a batch of rollouts into the run directory, those of training with what second rewards say."""
        second = self._step_second if mode == "train" else None
        limit = None if mode == "train" else getattr(self.plan.run, f"{mode}_tasks")
        digest = self._run.write_rollouts(rollouts, mode=mode, step=step, second=second, limit=limit)
        if mode == "report" or (mode == "validation" and step < self.first_step):  # part of no step
            with self._progressing:
                self._progress.setdefault(FILES, {})[table_name(mode, step)] = digest
                if mode == "report" or self.first_step == 1:  # else it is written with the next checkpoint
                    self._run.write_json("progress.json", self._progress)
        else:
            self._files[mode] = digest

    def validate(self, endpoint: Endpoint | Sequence[Endpoint], *, step: int) -> float | None:
        """Measure the accuracy on the validation split; before the first step, it is the starting accuracy."""
        if not self.validation_tasks:
            return None
        self.measuring = "before" if step < self.first_step else ""
        if step < self.first_step:
            log.info("validating on %s before step %d", amount(len(self.validation_tasks), "task"), self.first_step)
        rollouts = self.rollouts(self.validation_tasks, n=1, endpoint=endpoint, step=step, mode="validation")
        self.measuring = ""
        classes = by_class((r.task.slices, bool(r.correct)) for r in rollouts if r.value is not None)
        self.measured = found = attrs.evolve(Measurement.of(rollouts), classes=classes)
        if step < self.first_step:  # not part of a step; in a resumed run it measures the checkpoint, not the start
            if self.first_step == 1:
                self._note_progress(validation_before=found.accuracy, validation_reward_before=found.reward)
            self.start_clock()
        else:
            self._validated = found
        self._first_validation = self._first_validation or rollouts
        self._warn_once(
            guards.warn_of_loss, self._first_validation, rollouts, step=step, run=shlex.quote(str(self.directory))
        )
        return found.accuracy

    def report(
        self, endpoint: Endpoint | Sequence[Endpoint], *, when: Literal["before", "after"], step: int
    ) -> float | None:
        """Measure the held-out accuracy; a resumed run reuses the measurement from before its first step.

        If that is lost, the accuracy before training stays None: its model is trained already.
        """
        if when in self._progress and when == "before":
            kept = self._progress[when]
            if self.resumed and self.measured is None:
                log.info("the held-out accuracy before training was measured before the run was resumed")
            self.measured = Measurement(accuracy=kept["accuracy"], reward=kept.get("reward"), n=kept["n"])
            return self.measured.accuracy
        if not self._report_tasks:
            return None
        if when == "before" and self.first_step > 1:
            self._warnings.append(
                f"{self.directory} has no measurement from before step 1 (progress.json): the accuracy before training "
                f"stays unknown, because the model had {amount(self.first_step - 1, 'step')} of training already"
            )
            log.warning("%s", self._warnings[-1])
            self.measured = None
            return None
        self.measuring = when
        rollouts = self.rollouts(
            self._report_tasks, n=1, endpoint=endpoint, step=0 if when == "before" else max(step, 1), mode="report"
        )
        self.measured = found = Measurement.of(rollouts)
        told: dict[str, Any] = {**attrs.asdict(found), "failures": count_failures(rollouts)}
        if when == "after" and "before" in self._progress:
            common, said = over_common(self.directory, max(step, 1))
            told |= {"common": common} if common else {}
            self._warnings += [said] if said else []
            if said:
                log.warning("%s", said)
        self._note_progress(**{when: told})
        limited = "run.report_tasks" if self.plan.run.report_tasks == len(self._report_tasks) else ""
        right = sum(bool(r.correct) for r in rollouts)
        if when == "before" and (room := no_room(right, found.n, limited_by=limited)):
            self.note(room)
        self.measuring = "after" if when == "after" else ""  # the run ends
        self.keeps_end = self.keeps_end and when == "before"
        self.start_clock()
        return found.accuracy

    @property
    def start_weights(self) -> str:
        """The digest of the weights before the first step; '' if none was recorded."""
        return str(self._progress.get("start_weights", ""))

    def record_start(self, digest: str) -> None:
        """Record the digest of the weights before the first step; a measurement of other weights is none before it."""
        with self._progressing:
            if self.start_weights not in ("", digest):
                self._progress.pop("before", None)
            self._note_progress(start_weights=digest)

    def _note_progress(self, **facts: Any) -> None:
        with self._progressing:
            self._progress |= facts
            self._run.write_json("progress.json", self._progress)

    def sketch(self, step: int) -> Sketch:
        """Return what the learner fills, whether the step is audited or not."""
        return self.auditing.sketch(step)

    def end_step(
        self,
        step: int,
        *,
        metrics: Mapping[str, float],
        time_s: Mapping[str, float],
        digests: Mapping[str, Any] | None = None,
        calls: Iterable[Entry] | None = None,
    ) -> None:
        """Close a step: write its line, notify the observers, check the ledger and that the weights changed."""
        self.runtime.check()
        if self._learns and "weight_change" not in metrics:
            raise AgentrigError("end_step needs metrics['weight_change'], the L2 norm of the step's change of weights")
        books = self._ledger.close(calls, step=step)
        line = self._close_step(step, metrics, time_s, books, digests or {})
        if books.wrong:
            raise RunStopped(books.wrong, cause="lost-calls")
        self._guards.check(line)
        self.start_clock()
        self.checking = step if self.auditing.takes(step) else 0
        if self.stopping and self.checking:
            log.info("checking step %d, then its checkpoint; Ctrl-C once more ends at once, without them", step)
        self.auditing.end(step, line)
        self.checking = 0
        if self.plan.run.audit:
            self._step_time["audit"] = self.step_seconds()  # of the next step, which waits for it
        self._name_step_after(step)

    def step_seconds(self) -> float:
        """Return the seconds since the last step ended."""
        return time.perf_counter() - self._step_start

    def end_foreign_step(self, step: int, *, validated: Sequence[Rollout]) -> None:
        """Close a step of an algorithm that does not use this session, and does not say what it did with the calls."""
        self._validated = Measurement.of(validated) if validated else None
        self._close_step(step, {}, {}, self._ledger.close(None, step=step), {})
        self.start_clock()
        self._name_step_after(step)

    def start_clock(self) -> None:
        """Begin to count the seconds of a step: what came before is no part of it."""
        self._step_start, self._proven_before = time.perf_counter(), self.delivery.step.seconds

    def _name_step_after(self, step: int) -> None:
        if not (self.stopping or self.solved or step == self._steps):
            self.step = step + 1

    def _close_step(
        self,
        step: int,
        metrics: Mapping[str, float],
        time_s: Mapping[str, float],
        books: StepTotals,
        digests: Mapping[str, Any],
    ) -> dict[str, Any]:
        line = {**self._line(step, metrics, time_s), "calls": books.calls, "call_tokens": books.tokens}
        line["untaught_groups"] = untaught_groups(self._step_rollouts, books.rows)
        if digests:
            line["digests"] = dict(digests)
        heard = getattr(self.credit, "heard", {})  # see `agentrig.credit.Teacher`
        said = {call: json.dumps(list(values)) for call, values in heard.items()}
        rows = [{**row, "teacher_logprobs": said.get((row["rollout"], row["span"]))} for row in books.rows]
        line[FILES] = {**self._files, "calls": self._run.write_calls(rows, step=step)}
        self._run.append_metrics(line)
        self._warn_of_nan(step, line["algorithm"])
        self.lines.append(line)
        self._guards.add(line)
        self.solved = self._guards.solved
        self.plan.registry.notify("on_step_end", event=StepEnd(step=step, metrics=line))
        self._step_rollouts, self._step_time, self._validated = [], defaultdict(float), None
        self._step_second, self._files = {}, {}
        self._rollouts_s, self.overlap_s = 0.0, None
        return line

    def _warn_of_nan(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Name the metrics that are not finite, each once; what the guards look at stops the run if it stays so."""
        odd = {n: v for n, v in flat(metrics) if v is not None and without_nan(v) is None}
        new = [f"{name} is {value}" for name, value in odd.items() if name not in {*self._odd, *LOOKED_AT}]
        self._odd.update(odd)
        if new:
            log.warning("step %d: the algorithm's %s: metrics.jsonl has null there", step, " and ".join(new))

    def save_checkpoint(self, step: int, write: Callable[[Path], None], *, keep: bool = False) -> Path:
        """Save a checkpoint, atomically, in any thread; the first one after an earlier end of the run replaces that."""
        self.runtime.check()
        there, begun = self._run.checkpoints, time.perf_counter()

        def record(digest: str) -> None:
            names, name = {there.path(s).name for s in there.steps()}, there.path(step).name
            with self._progressing:
                kept = {n: digests for n, digests in self._progress.get(SAVED, {}).items() if n in names}
                held = {**kept, name: [*kept.get(name, []), digest]}  # of both times
                self._note_progress(**{SAVED: held, "wall_s": time.perf_counter() - self.start})

        try:
            saved = there.save(step, write, keep=keep, run_id=str(self._facts.get("id", "")), record=record)
        except BaseException:
            with self._progressing, suppress(RunFileError):
                if not there.path(step).exists() and self._progress.get(SAVED, {}).pop(there.path(step).name, None):
                    self._run.write_json("progress.json", self._progress)
            raise
        if self.keeps_end:
            with self._progressing:
                self.keeps_end = False
                self._progress.pop("after", None)
                files = self._progress.get(FILES, {})
                self._note_progress(**{FILES: {n: digest for n, digest in files.items() if not is_end(Path(n))}})
            self._run.remove_end()
        self._saved_step = step
        self._saved["written"] += 1
        self._saved["bytes"] = sum(file.stat().st_size for file in saved.rglob("*") if file.is_file())
        self._saved["seconds"] += time.perf_counter() - begun
        return saved

    def note(self, text: str) -> None:
        """Implement `Session.note`."""
        self._notes.append(text)
        log.info("%s", text)

    @property
    def calls(self) -> int:
        """Implement `Session.calls`."""
        return self.plan.runners.n * self.plan.runners.threads

    @property
    def server_memory(self) -> ServerMemory | None:
        """Implement `Session.server_memory`."""
        return self.plan.server_memory()

    def record(self, name: str, value: Mapping[str, Any]) -> None:
        """Implement `Session.record`; a resumed run writes its manifest when it begins."""
        self._facts[name] = value
        if self.begun or not self.resumed:
            self._run.write_json("manifest.json", self._facts)

    # --- figures ----------------------------------------------------------------------------------

    def summary(self, *, wall_s: float) -> dict[str, Any]:
        """Return the content of `summary.json`."""
        before, after = (stated_ends(self._progress).get(end, {}) for end in ("before", "after"))
        lines = self.lines
        times: Counter[str] = Counter()
        for line in lines:
            times.update(line["time_s"])
        whole = sum(line["step_s"] for line in lines) - times["audit"]
        split = {part: times.get(part, 0.0) / whole if whole else 0.0 for part in ("rollout", "reward", "update")}
        return {
            "accuracy": {
                "before": before.get("accuracy"),
                "after": after.get("accuracy"),
                "n": after.get("n", before.get("n", 0)),
            },
            "validation_before": self._progress.get("validation_before"),
            "validation_reward_before": self._progress.get("validation_reward_before"),
            "reward": {"before": before.get("reward"), "after": after.get("reward")},
            "steps": lines[-1]["step"] if lines else 0,  # a line may have been lost
            "solved": self.solved,
            CORRECT_TOLD: self.engine.scorer.correctness.told,
            **({} if self._learns else {"trains": "prompts"}),
            "wall_s": wall_s,
            "rollouts": sum(line["rollouts"] for line in lines) + self._measured,
            "train_rollouts": sum(line["rollouts"] for line in lines),
            "failures": dict(self._failures),
            "calls": totals(lines, "calls"),
            "call_tokens": totals(lines, "call_tokens"),
            "max_staleness": max((line.get("max_staleness", 0) for line in lines), default=0),
            "time_share": split,
            "transitions_per_rollout": mean([line["transitions_per_rollout"] for line in lines]),
            "prompt_tokens": mean([line["prompt_tokens"] for line in lines if line["prompt_tokens"]]),
            "response_tokens": mean([line["response_tokens"] for line in lines if line["response_tokens"]]),
            "warnings": [
                w for w in (self.engine.scorer.correctness.warning, *self._warnings, *self.runtime.warnings) if w
            ],
            "notes": list(self._notes),
            "delivery": self.delivery.summary(),
            "audited": self.auditing.summary(),
            "checkpoints": {**self._saved, "waited": times.get("checkpoint", 0.0)},
            **({"observer_writes": dict(writes)} if (writes := self.plan.registry.settle()) else {}),
            "observer_errors": dict(self.plan.registry.observer_errors),
        }

    def _second_scores(self, rollouts: Sequence[Rollout]) -> None:
        """Score the rollouts that did not fail with the second rewards."""
        if not self._second:
            return
        start = time.perf_counter()
        valid = [r for r in rollouts if r.failure is None]
        found: dict[str, dict[str, Score]] = {r.id: {} for r in valid}
        for name, scorer in self._second.items():
            for r, score in zip(valid, scorer([(r.task, r.outcome, r.trace) for r in valid]), strict=True):
                found[r.id][name] = score
        self._step_second |= found
        self._step_time["second_reward"] += time.perf_counter() - start

    def _line(self, step: int, metrics: Mapping[str, float], time_s: Mapping[str, float]) -> dict[str, Any]:
        rollouts = self._step_rollouts
        triplets = [t for r in rollouts for t in r.triplets]
        valid = [r for r in rollouts if r.failure is None]
        proven = self.delivery.line()
        parts = {
            **self._step_time,
            **time_s,
            **({"delivery": proven["seconds"] - self._proven_before} if proven else {}),
        }
        step_s = self.step_seconds()
        generated = sum(
            len(call.attributes.get("response_token_ids") or ()) for r in rollouts for call in r.trace.llm_calls()
        )
        rollout_s = max(1e-9, self._rollouts_s)
        behind = [step - 1 - r.version for r in rollouts if r.version is not None]
        line: dict[str, Any] = {
            "step": step,
            "time": time.time(),
            **reward_figures(rollouts, self.plan.configs["credit"]),
            "step_s": step_s,
            "time_s": parts,
            "rollouts_per_s": len(rollouts) / rollout_s,
            "tokens_per_s": generated / rollout_s,
            "transitions_per_rollout": len(triplets) / len(valid) if valid else 0.0,
            "prompt_tokens": mean([len(t.prompt_ids) for t in triplets]),
            "response_tokens": mean([len(t.response_ids) for t in triplets]),
            "nodes": count_nodes(rollouts),
            "algorithm": dict(metrics),
        }
        if self._demonstrated:  # nothing was sampled: these would say nothing of the model
            line |= dict.fromkeys(("reward", "reward_std", "rollouts_per_s", "tokens_per_s"))
        if behind:
            line["max_staleness"] = max(behind)
        if self.overlap_s is not None:
            line["overlap_s"] = self.overlap_s
        if proven:
            line["delivery"] = proven
        if self._validated is not None:
            line["validation_accuracy"] = self._validated.accuracy
            line["validation_reward"] = self._validated.reward
        parts = component_means((r.value, r.score.components) for r in valid if r.score and r.value is not None)
        if parts:
            line["reward_parts"] = parts
        if self._second:
            line["second_rewards"] = {n: second_reward_figures(valid, self._step_second, n) for n in self._second}
        return line


@attrs.define(kw_only=True, eq=False)
class RolloutsAhead:
    """Training rollouts that run while the step before is learned; made by `RunSession.begin_rollouts`.

    Attributes:
        running: The thread that runs them: returns them, and the seconds that they took.
        wall_s: These seconds, once the run has waited for them.
        waited_s: Of these, seconds that the run waited for them.
    """

    session: RunSession
    step: int
    sampling: Mapping[str, Any]
    expected: int
    running: Future[tuple[list[Rollout], float]]
    wall_s: float = 0.0
    waited_s: float = 0.0

    def wait(self) -> None:
        """Wait until all have ended: the server then gets no request, and may take new weights.

        The seconds count as `rollout` and `reward` of the current step.
        """
        if self.session.ahead is self:
            start = time.perf_counter()
            found, self.wall_s = self.running.result()
            self.waited_s = min(time.perf_counter() - start, self.wall_s)
            self.session.ahead = None
            self.session.spend(found, wall_s=self.wall_s, waited_s=self.waited_s)

    def rollouts(self) -> list[Rollout]:
        """Return them, stored and checked; call it once, after the `end_step` before theirs."""
        self.wait()
        found, _ = self.running.result()
        self.session.overlap_s = self.wall_s - self.waited_s
        self.session.file(
            found,
            mode="train",
            step=self.step,
            sampling=self.sampling,
            wall_s=self.wall_s,
            expected=self.expected,
            waited_s=0.0,  # the step in which the run waited has these seconds
        )
        return found

    def end(self) -> None:
        """Wait a little for the thread that runs them, whose queue has been told; ignore what it raises."""
        try:
            self.running.exception(END_S)
        except TimeoutError:
            log.warning("the rollouts of step %d did not end within %g s; the run ends without them", self.step, END_S)


def _sampling(endpoint: Endpoint | Sequence[Endpoint]) -> Mapping[str, Any]:
    return (endpoint if isinstance(endpoint, Endpoint) else endpoint[0]).sampling
