"""What a run would learn from, and what it would take: a few training tasks are rolled out before anything is trained.

tasks of the first step → rollouts as in training → pass@k, groups that differ, verdict
                                                  → one update of a learner that is thrown away → seconds a step
"""

from __future__ import annotations

import math
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs

from agentrig.algorithms import LoopAlgorithm, Measurement
from agentrig.audit.verdicts import FIRST
from agentrig.credit import TurnConfig
from agentrig.endpoints import Endpoint
from agentrig.errors import ConfigError, RunStopped
from agentrig.figures import amount, least_gain, machine, mean, no_room, wilson
from agentrig.learners import LoopSettings, TrainSample
from agentrig.plan import Plan
from agentrig.processes.scratch import temporary_files
from agentrig.rollouts import Rollout
from agentrig.run import guards
from agentrig.run.auditing import LEAST_S
from agentrig.run.evaluate import run_agent
from agentrig.run.loop import samples_of
from agentrig.run.metrics import count_failures, failure_reasons
from agentrig.run.splits import labelled, load_splits
from agentrig.run.verdict import Verdict, differing, judge, learned_rewards, pass_at
from agentrig.runners.engine import RolloutEngine
from agentrig.tasks import Task, input_key, tasks_of_step
from agentrig.traces import usage

ROLLOUTS = 256
"""Most rollouts of a forecast that does not say how many tasks; a small model on two cores takes seconds for them."""

TASKS = 32
"""Tasks of a forecast where the algorithm has no `tasks_per_step`."""

GROUP = 8
"""Rollouts of a task where the algorithm has no `group_size`."""

UPDATE_S = 20.0
"""An update that would take longer is measured on one group."""

AUDIT = 1.5
"""An audit may take so many times as long as a step, or as `LEAST_S`: its gradients as long, its log-probabilities half
of it. It takes at least as long as the update that it repeats."""

MOST_HELD_OUT = 2000
"""So many held-out tasks are looked at when it is said how many a gain needs."""

WORSE = 0.05
"""Share of the held-out tasks that are assumed to become worse while others become better."""


@attrs.define(kw_only=True, eq=False)
class Trial:
    """Rollouts of some training tasks, and one update; `forecast` says what is known at any time.

    Attributes:
        tasks: Training tasks, as many as a step has, or some of them, or more. None of them is a label of the model,
            unless all training tasks are.
        in_split: Number of training tasks.
        labels: How many of these have answers that the model has learned, see `agentrig.run.splits.labelled`.
        report: The held-out tasks, which a run measures before and after.
        groups: The groups that are complete, failures included.
        start: The held-out accuracy of the model as it is, sampled as a run measures it; None if it is not known.
        start_s: Seconds until the first rollout began.
        rollouts_s: Seconds from there to the latest complete group.
        arrived: At each arrival of complete groups: the seconds since the first rollout began, and how many rollouts
            had ended then.
        update_s: Seconds of the update of a step with as many tasks as there are groups; None if it is not known.
        updated: How it was measured, or why it was not.
        taught: Number of groups that the run's credit gives a gradient; None if it is not known.
        memory: The memory plan of a run; '' if the algorithm has none.
        peak: Most bytes that this process had in the update, with all that it has imported; None if the learner is on a
            device, or nothing was updated.
    """

    plan: Plan
    tasks: Sequence[Task]
    n: int
    split: str
    in_split: int
    labels: int
    report: Sequence[Task]
    validated: int
    groups: list[Sequence[Rollout]] = attrs.field(factory=list)
    complete: bool = False
    start: Measurement | None = None
    start_s: float = 0.0
    rollouts_s: float = 0.0
    arrived: list[tuple[float, int]] = attrs.field(factory=list)
    update_s: float | None = None
    updated: str = "not measured"
    taught: int | None = None
    memory: str = ""
    peak: int | None = None

    @classmethod
    def of(cls, plan: Plan, *, tasks: int = 0, rollouts: int = 0) -> Trial:
        """Choose the tasks.

        Args:
            tasks: How many; 0 for those of a step, at most as many as `ROLLOUTS` rollouts have.
            rollouts: Rollouts of each; 0 for the group size of the run.

        Raises:
            ConfigError: There are fewer training tasks, or the algorithm does not learn from rewards.
        """
        settings = plan.configs["algorithm"]
        spec = plan.components["algorithm"].spec
        demonstrated, prompts = getattr(settings, "demonstrations", ""), getattr(spec, "trains", "weights") == "prompts"
        if demonstrated or prompts:
            how = "learns from demonstrations" if demonstrated else "improves prompts and changes no weights"
            raise ConfigError(
                f"{spec.name} {how}; a forecast says what rewards can teach. Name an algorithm that learns from them, "
                "such as --algorithm grpo"
            )
        splits = load_splits(plan.tasks(), plan.run, who=plan.whose_tasks)
        split, train = splits["train"]
        known = labelled(getattr(settings, "model", None))
        fresh = [task for task in train if input_key(task) not in known] if known else train
        chosen = fresh or train
        if tasks > len(chosen):
            has = amount(len(chosen), "task") + (" without a label" if len(chosen) < len(train) else "")
            raise ConfigError(f"--limit {tasks}: the split {split} has {has}; ask for at most so many")
        n = rollouts or _group_size(settings)
        few = tasks or min(getattr(settings, "tasks_per_step", TASKS), max(1, ROLLOUTS // n), len(chosen))
        return cls(
            plan=plan,
            tasks=tasks_of_step(chosen, n=few, step=1, seed=plan.run.seed),
            n=n,
            split=split,
            in_split=len(train),
            labels=len(train) - len(fresh),
            report=splits["report"][1],
            validated=len(splits["validation"][1]),
        )

    @property
    def held_out(self) -> int:
        """Number of held-out tasks."""
        return len(self.report)

    @property
    def expected(self) -> int:
        """Number of rollouts: those of the tasks, and one of each held-out task unless that is more than those."""
        sampled = self.n * len(self.tasks)
        return sampled + (self.held_out if self.held_out <= sampled else 0)

    @property
    def rollouts(self) -> list[Rollout]:
        """The rollouts of the groups that are complete."""
        return [rollout for group in self.groups for rollout in group]

    def roll_out(
        self, each: Callable[[Rollout], None] = lambda rollout: None, started: Callable[[], None] = lambda: None
    ) -> None:
        """Run the agent on the tasks, sampled as in training, and on the held-out tasks as a run measures them.

        Args:
            each: Called with every rollout of a group that is complete, and of a held-out task.
            started: Called when the agent and the model's server have started.

        Raises:
            RunStopped: A run would stop in its first step, because all rollouts fail, or no call can be trained on.
            AgentrigError: The agent can't be built, or the model's server is dead.
        """
        plan, begun = self.plan, time.perf_counter()
        algorithm: Any = plan.components["algorithm"].spec
        adapter: Any = plan.components["adapter"].spec
        limit = plan.run.failure_limit
        expected = self.n * len(self.tasks)

        def body(engine: RolloutEngine, served: Sequence[Endpoint]) -> None:
            sampled = [endpoint.with_sampling(**sampling_of(plan.configs["algorithm"])) for endpoint in served]
            first = time.perf_counter()
            self.start_s = first - begun
            started()

            def arrived(groups: Mapping[int, Sequence[Rollout]]) -> None:
                self.rollouts_s = time.perf_counter() - first
                self.groups += [groups[i] for i in sorted(groups)]
                self.arrived.append((self.rollouts_s, len(self.rollouts)))
                for rollout in (rollout for group in groups.values() for rollout in group):
                    each(rollout)
                if len(self.rollouts) >= guards.EARLY and all(r.failure for r in self.rollouts):
                    guards.check_failures(self.rollouts, limit, step=1, mode="train", expected=expected)

            found = engine.run(self.tasks, n=self.n, endpoint=sampled, step=1, mode="train", on_groups=arrived)
            guards.check_failures(found, limit, step=1, mode="train")
            if algorithm.credit:  # it learns from calls
                guards.check_triplets(found, step=1, adapter=adapter)
            guards.warn_of_unseen(found, unrecorded=engine.unrecorded)
            guards.warn_of_fields(found, attrs.asdict(plan.config("algorithm")))
            guards.warn_of_constraints(found, step=1)
            if algorithm.credit:
                guards.check_sampling(found, sampled[0].sampling, step=1)
            if self.expected > expected:
                heat = float(getattr(plan.configs["algorithm"], "val_temperature", 0.0))
                measured = [endpoint.with_sampling(temperature=heat, top_p=1.0) for endpoint in served]

                def counted(groups: Mapping[int, Sequence[Rollout]]) -> None:
                    for rollout in (rollout for group in groups.values() for rollout in group):
                        each(rollout)

                self.start = Measurement.of(
                    engine.run(self.report, n=1, endpoint=measured, step=0, mode="report", on_groups=counted)
                )

        try:
            run_agent(plan, body)
        except RunStopped as stopped:
            if stopped.cause != "failures" or not any(r.value is not None for r in self.rollouts):
                raise
        self.complete = True  # with more failures than a run allows: the verdict says it

    def update(self) -> None:
        """Update a new learner with the rollouts, to measure it; it is thrown away."""
        algorithm: LoopAlgorithm = self.plan.build("algorithm")
        if not hasattr(algorithm, "learner"):
            self.updated = (
                f"not measured: algorithm {self.plan.components['algorithm'].spec.name} has a loop of its own"
            )
            return
        samples, _ = samples_of(self.plan.build("credit"), self.rollouts)
        taught = list(dict.fromkeys(sample.group for sample in samples if sample.learned))
        self.taught = len(taught)
        hardware = self.plan.use_hardware()
        with temporary_files() as folder, tempfile.TemporaryDirectory(dir=folder) as directory:
            facts: dict[str, Mapping[str, Any]] = {}
            runners, seed = self.plan.runners, self.plan.run.seed
            session: Any = SimpleNamespace(  # what `fit` and `learner` use of a run's
                hardware=hardware, seed=seed, train_tasks=self.tasks, directory=Path(directory), lines=(),
                calls=runners.n * runners.threads, server_memory=self.plan.server_memory(),
                first_step=1, checkpoint=None, resumes="", stopping=False, solved=False, measured=None,
                note=lambda text: None, record=facts.__setitem__,
            )  # fmt: skip
            if fit := getattr(algorithm, "fit", None):
                fit(algorithm.serving(hardware, None), session)
            learner = algorithm.learner(session)
            self.memory = str(facts.get("memory", {}).get("line", ""))
            if not taught:
                self.updated = "not measured: no group gives a gradient"
                return

            def seconds(some: Sequence[TrainSample]) -> float:
                start = time.perf_counter()
                learner.update(some, step=1)
                return time.perf_counter() - start

            one = seconds([sample for sample in samples if sample.group == taught[0]])
            self.update_s = one * len(taught)
            self.updated = "estimated from the update of one group"
            if self.update_s <= UPDATE_S:
                self.update_s = seconds(samples)
                self.updated = f"measured on {amount(len(self.groups), 'group')}"
            if hardware.torch_device == "cpu":
                unit = 1 if sys.platform == "darwin" else 1 << 10
                self.peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    @property
    def usage(self) -> Counter[tuple[str, str]]:
        """The calls and tokens of the rollouts, see `agentrig.traces.usage`."""
        return usage(call.attributes for rollout in self.rollouts for call in rollout.trace.llm_calls())

    def machine(self) -> str:
        """Return the name of the machine, as `agentrig compare` shows it."""
        hardware = self.plan.use_hardware()
        return machine(hardware.name, [device.name for device in hardware.probe().devices])

    def forecast(self) -> dict[str, Any]:
        """Return what is known, as `agentrig forecast --json` prints it; call it when a group is complete."""
        rollouts, size = self.rollouts, _group_size(self.plan.configs["algorithm"])
        scored = [[r for r in group if r.value is not None] for group in self.groups]
        right = [(len(group), sum(bool(r.correct) for r in group)) for group in scored]
        credit = self.plan.configs["credit"]
        rewards = [learned_rewards(group, size, credit) for group in self.groups]
        differ = sum(len(set(values)) > 1 for values in rewards)
        judged = sum(map(bool, scored))
        verdict = judge(self.groups, size, failure_limit=self.plan.run.failure_limit, credit=credit)
        no_room = self._no_room(pass_at(1, right))
        if verdict.kind == "good" and no_room:
            verdict = Verdict(kind="solved", message=no_room)
        times = self._time(pass_at(1, right), pass_at(self.n, right))
        times["gain"]["no_room"] = no_room
        return {
            "complete": self.complete,
            "split": self.split,
            "split_tasks": self.in_split,
            "labels": self.labels,
            "tasks": len(self.groups),
            "rollouts_per_task": self.n,
            "sampling": sampling_of(self.plan.configs["algorithm"]),
            "pass_at_k": {str(k): pass_at(k, right) for k in range(1, self.n + 1)},
            "reward": mean([r.value for r in rollouts if r.value is not None]),
            "groups": {
                "n": judged,
                "by_calls": isinstance(credit, TurnConfig),
                "differ": differ,
                "taught": self.taught,
                "ci95": list(wilson(differ, judged)),
                "size": size,
                "share": differing(rewards, size) if judged else None,
            },
            "failures": count_failures(rollouts),
            "reasons": failure_reasons(rollouts),
            "per_rollout": _per_rollout(rollouts, self.usage),
            **times,
            "verdict": attrs.asdict(verdict),
        }

    def _no_room(self, once: float | None) -> str:
        """Return why no gain can be significant on the held-out tasks; '' if one can.

        Args:
            once: pass@1 of the training tasks, the start where it was not measured.
        """
        limited = "run.report_tasks" if self.plan.run.report_tasks == self.held_out else ""
        if self.start is not None and self.start.accuracy is not None:
            room = no_room(round(self.start.accuracy * self.start.n), self.start.n, limited_by=limited)
            return room and f"{room}."
        room = "" if once is None else no_room(round(once * self.held_out), self.held_out, limited_by=limited)
        return room and f"With pass@1 as the start: {room}."

    def seconds_a_rollout(self) -> tuple[float, float]:
        """Return the least and the most seconds that a rollout of a run takes, among those that run at the same time.

        Rollouts that all began together say little of a run: they were slow where a server, a compiler or a cache was
        new, and they left threads idle that a run uses. If as many have ended after them, these alone count, and both
        numbers are the same.
        """
        at_once = self.plan.runners.n * self.plan.runners.threads
        n = len(self.rollouts)
        most = self.rollouts_s / n
        cold_s, cold = next(((s, ended) for s, ended in self.arrived if ended >= at_once), (0.0, n))
        if n - cold >= at_once:
            warm = min(most, (self.rollouts_s - cold_s) / (n - cold))
            return warm, warm
        return self.rollouts_s / (at_once * math.ceil(n / at_once)), most

    def _time(self, once: float | None, best: float | None) -> dict[str, Any]:
        """Return what a step and the run take, and when a gain could be significant.

        Args:
            once: pass@1.
            best: pass@n.
        """
        settings, n = self.plan.configs["algorithm"], self.held_out
        least_s, most_s = self.seconds_a_rollout()
        loop = settings if isinstance(settings, LoopSettings) else None
        steps = loop.steps if loop is not None else None
        step: dict[str, Any] = {
            "rollout_s": None,
            "least_rollout_s": None,
            "update_s": None,
            "memory": self.memory or None,
            "peak_bytes": self.peak,
        }
        step_s = dict[float, float]()
        if loop is not None:
            of_step = loop.tasks_per_step * loop.group_size
            step["rollout_s"], step["least_rollout_s"] = most_s * of_step, least_s * of_step
            scaled = loop.tasks_per_step / len(self.groups)
            step["update_s"] = None if self.update_s is None else self.update_s * scaled
            for a_rollout in (least_s, most_s):
                parts = a_rollout * of_step, step["update_s"] or 0.0
                step_s[a_rollout] = max(parts) if loop.max_staleness else sum(parts)

        def taken(steps: int | None) -> dict[str, Any]:
            """Return what that many steps take, with the measurements before, between and after them, and audits."""
            if steps is None or loop is None:
                return {"steps": steps, "seconds": None, "least_seconds": None, "rollouts": None, "parts": None}
            every = loop.validate_every
            measured = 2 * n + (self.validated * (1 + steps // every) if every else 0)
            trained = steps * loop.tasks_per_step * loop.group_size
            audited = min(FIRST, steps) if self.plan.run.audit else 0
            least = self.start_s + steps * step_s[least_s] + least_s * measured + audited * (step["update_s"] or 0.0)
            parts = {
                "start_s": self.start_s,
                "steps_s": steps * step_s[most_s],
                "measured_s": most_s * measured,
                "audits_s": audited * AUDIT * max(LEAST_S, step_s[most_s]),
            }
            most = max(least, sum(parts.values()))
            counts = {"steps": steps, "rollouts": trained + measured}
            return {**counts, "seconds": most, "least_seconds": least, "parts": {**parts, "measured": measured}}

        worse = round(WORSE * n)
        needed = least_gain(worse) - worse
        until = None
        if steps and n and once is not None and best is not None and best > once:
            until = math.ceil(needed / n / ((best - once) / steps))
        return {
            "step": {**step, "updated": self.updated, "seconds": step_s.get(most_s)},
            "run": {"start_s": self.start_s, **taken(steps)},
            "gain": {
                "held_out": n,
                "start": None if self.start is None else self.start.accuracy,
                "least_tasks": least_gain(),
                "worse": worse,
                "least_tasks_with_worse": needed,
                "enough": None if until is None else _enough((best or 0.0) - (once or 0.0)),
                **taken(until),
            },
        }


def _enough(moved: float) -> int:
    """Return about how many held-out tasks show a move of the accuracy while `WORSE` of them become worse.

    It looks at no more than `MOST_HELD_OUT`: a number above it is the least that may do.
    """
    n = 5
    while n <= MOST_HELD_OUT and moved * n < least_gain(worse := round(WORSE * n)) - worse:
        n += 1 + n // 10
    return n


def _group_size(settings: Any) -> int:
    return int(getattr(settings, "group_size", GROUP))


def sampling_of(settings: Any) -> dict[str, float]:
    """Return the sampling fields of training."""
    return {name: float(getattr(settings, name, 1.0)) for name in ("temperature", "top_p")}


def _per_rollout(rollouts: Sequence[Rollout], used: Mapping[tuple[str, str], int]) -> dict[str, float]:
    """Return the means of calls and tokens of a rollout, failures included, and how many of them are trained on."""
    spent = Counter[str]()
    for (_, part), count in used.items():
        spent[part] += count
    triplets = [triplet for r in rollouts for triplet in r.triplets]
    totals = {
        "calls": spent["calls"],
        "trained_calls": len(triplets),
        "prompt_tokens": spent["prompt"],
        "trained_prompt_tokens": sum(len(t.prompt_ids) for t in triplets),
        "response_tokens": spent["response"],
        "trained_response_tokens": sum(len(t.response_ids) for t in triplets),
    }
    return {name: total / len(rollouts) for name, total in totals.items()}
