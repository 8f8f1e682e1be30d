"""Evaluation without training: `agentrig eval` and `agentrig dev`."""

from __future__ import annotations

import inspect
import json
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from pathlib import Path
from typing import Any

import attrs

from agentrig.adapters import Triplet
from agentrig.algorithms import Measurement
from agentrig.correctness import by_turn, wrong_calls
from agentrig.endpoints import Endpoint
from agentrig.errors import ConfigError
from agentrig.figures import wilson
from agentrig.plan import Plan, RunSettings
from agentrig.processes.ends import Interrupted, handling, name_of
from agentrig.processes.scratch import temporary_files
from agentrig.rollouts import Mode, Rollout
from agentrig.run.checkpoints import told_if_removed
from agentrig.run.guards import warn_of_fields, warn_of_sampling, warn_of_unseen
from agentrig.run.loop import runnable
from agentrig.run.metrics import component_means, count_failures, failure_reasons, told_components
from agentrig.run.rows import slices_of
from agentrig.run.splits import other_split, read_split, split_of
from agentrig.runners.engine import RolloutEngine
from agentrig.tasks import Task, Tasks
from agentrig.text import json_text
from agentrig.traces import Trace, reply_of

log = logging.getLogger(__name__)

CHUNK = 256
"""Number of rollouts that run at once; bounds memory, not speed."""

NO_TOKENS = Triplet(prompt_ids=(), response_ids=())
"""Stands for a call whose tokens nobody needs any more."""


@attrs.frozen(kw_only=True)
class Evaluation:
    """The result of an evaluation.

    Attributes:
        accuracy: Share of the scored rollouts that are correct (docs/rewards.md); None if `n` is 0.
        ci95: Its Wilson interval.
        reward: Mean reward of the scored rollouts; None if `n` is 0.
        reasons: Kind to why its rollouts failed, as `agentrig.run.metrics.failure_reasons` has it.
        wall_s: Seconds from the first rollout to the last.
        rollouts_per_s: All rollouts over `wall_s`.
        slices: Of each slice (`Task.slices`, and `calls`), its classes: correct and scored rollouts.
        wrong: Why answers are wrong, by the reward's `details["wrong"]`, to how many.
        by_turn: At which turn rollouts became right or wrong (`agentrig.correctness.turn_of`), to how many.
        components: The mean of each component of the scores that says more than the reward.
        calls: How many calls the reward scored, and how many below 1: `scored`, `wrong`; empty if it scores none.
        rollouts: All rollouts, with `keep`.
        sampling: With `keep`: the fields that the endpoint set in calls.
        unrecorded: With `keep`: how many calls the model's server answered that no tracer has seen.
    """

    accuracy: float | None
    ci95: tuple[float, float] | None
    reward: float | None
    n: int
    failures: Mapping[str, int]
    wall_s: float
    rollouts_per_s: float
    slices: Mapping[str, Mapping[str, tuple[int, int]]]
    wrong: Mapping[str, int]
    by_turn: Mapping[str, int]
    components: Mapping[str, float] = attrs.field(factory=dict)
    calls: Mapping[str, int] = attrs.field(factory=dict)
    rollouts: Sequence[Rollout] = attrs.field(default=(), repr=False)
    reasons: Mapping[str, Mapping[str, int]] = attrs.field(factory=dict, repr=False)
    sampling: Mapping[str, Any] = attrs.field(factory=dict, repr=False)
    unrecorded: int = attrs.field(default=0, repr=False)

    @classmethod
    def of(cls, rollouts: Sequence[Rollout], *, wall_s: float) -> Evaluation:
        """Return what rollouts say, `rollouts` left out."""
        measured, scored = Measurement.of(rollouts), [r for r in rollouts if r.value is not None]
        slices: dict[str, dict[str, tuple[int, int]]] = defaultdict(dict)
        for rollout in scored:
            for name, part in slices_of(rollout).items():
                right, n = slices[name].get(part, (0, 0))
                slices[name][part] = right + bool(rollout.correct), n + 1
        scores = [r.score for r in scored if r.score is not None]
        parts = [(score.value, score.components) for score in scores if score.value is not None]
        means, told = component_means(parts), told_components(parts)
        wrong = Counter(str(said) for score in scores if (said := score.details.get("wrong")))
        return cls(
            accuracy=measured.accuracy,
            reward=measured.reward,
            n=measured.n,
            ci95=wilson(sum(bool(r.correct) for r in scored), measured.n) if scored else None,
            failures=count_failures(rollouts),
            reasons=failure_reasons(rollouts),
            wall_s=wall_s,
            rollouts_per_s=len(rollouts) / wall_s if wall_s else 0.0,
            slices={name: dict(sorted(parts.items())) for name, parts in slices.items() if len(parts) > 1},
            wrong=dict(wrong.most_common()),
            by_turn=by_turn(score.details for score in scores),
            components={name: means[name] for name in told},
            calls=wrong_calls(score.calls for score in scores),
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the object that `agentrig eval --json` prints."""
        own = ("rollouts", "reasons", "sampling", "unrecorded")
        told = attrs.asdict(self, filter=lambda field, _: field.name not in own)
        slices = {
            name: {part: {"accuracy": right / n, "n": n} for part, (right, n) in classes.items()}
            for name, classes in self.slices.items()
        }
        return {**told, "slices": slices}


def evaluate(
    plan: Plan,
    *,
    tasks: Sequence[Task],
    endpoint: Endpoint | Sequence[Endpoint] | None = None,
    checkpoint: Path | None = None,
    mode: Mode = "report",
    as_mode: Mode | None = None,
    temperature: float | None = None,
    keep: bool = False,
    n: int = 1,
    each: Callable[[Rollout], None] = lambda rollout: None,
    ended: Callable[[Rollout], None] = lambda rollout: None,
    begun: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Run the agent on each task and score it; nothing is learned.

    Args:
        endpoint: A model server, or several that get the tasks in turn; None for the plan's algorithm, serving
            `checkpoint`.
        checkpoint: A Hugging Face directory; None for the algorithm's starting model.
        as_mode: The mode that an agent of Agent Lightning sees, if it is another one.
        temperature: Sampling temperature; 0 is greedy, None keeps the endpoint's.
        each: Called with every rollout, in the order of the tasks.
        ended: Called with every rollout as it ends.
        begun: Called when the first rollouts begin, from where `wall_s` is measured.
    """
    found: list[Rollout] = []
    given: dict[str, Any] = {}
    start = end = 0.0
    unrecorded = 0

    def count(groups: Mapping[int, Sequence[Rollout]]) -> None:
        for group in groups.values():
            for rollout in group:
                ended(rollout)

    def body(engine: RolloutEngine, sampled: Sequence[Endpoint]) -> None:
        if temperature is not None:
            sampled = [e.with_sampling(temperature=temperature) for e in sampled]
        nonlocal start, end, unrecorded
        given.update(sampled[0].sampling)
        begun()
        start = time.perf_counter()
        size = max(1, CHUNK // n)
        for i in range(0, len(tasks), size):
            chunk = tasks[i : i + size]
            first = i % len(sampled)  # the turn goes on from chunk to chunk
            turn = [*sampled[first:], *sampled[:first]]
            rollouts = engine.run(chunk, n=n, endpoint=turn, step=0, mode=mode, on_groups=count)
            unrecorded += engine.unrecorded
            if i == 0:
                if mode != "dev":  # which says it by itself, below the spans
                    warn_of_unseen(rollouts, unrecorded=engine.unrecorded)
                warn_of_sampling(rollouts, sampled[0].sampling, mode=mode)
                warn_of_fields(rollouts, attrs.asdict(plan.config("algorithm")))
            for rollout in rollouts:
                each(rollout)
                empty: dict[str, Any] = {
                    "trace": Trace(rollout_id=rollout.id),
                    "triplets": [NO_TOKENS] * len(rollout.triplets),
                }
                found.append(rollout if keep else attrs.evolve(rollout, **empty))
        end = time.perf_counter()

    run_agent(plan, body, endpoint=endpoint, checkpoint=checkpoint, as_mode=as_mode)
    figures = Evaluation.of(found, wall_s=end - start)
    return attrs.evolve(figures, rollouts=tuple(found), sampling=given, unrecorded=unrecorded) if keep else figures


def run_agent(
    plan: Plan,
    body: Callable[[RolloutEngine, Sequence[Endpoint]], None],
    *,
    endpoint: Endpoint | Sequence[Endpoint] | None = None,
    checkpoint: Path | None = None,
    as_mode: Mode | None = None,
) -> None:
    """Start the agent, the reward and a model's server without a run; end them when `body` has returned.

    Args:
        body: Called with the engine and the server's addresses, in a thread of its own; a signal ends it.
    """
    if plan.runners.n == 0:
        raise ConfigError("a measurement runs the agent on this machine: give it runners, for example runners.n=2")
    hardware = None if endpoint is not None else plan.use_hardware()
    if hardware is not None:
        plan.check_server(hardware)
        if checkpoint is None:
            plan.check_algorithm()
    plan.start_observers()
    for warning in plan.gold_warnings():
        log.warning("%s", warning)
    scorer = plan.scorer()
    adapter = plan.build("adapter")
    with temporary_files(), closing(scorer), plan.runner_pool() as pool, plan.make_gateway() as gateway:
        engine, runtime = plan.engine(scorer=scorer, adapter=adapter, pool=pool, gateway=gateway)
        engine.as_mode = as_mode
        serving: AbstractContextManager[Endpoint | Sequence[Endpoint]]
        if endpoint is not None:
            serving = nullcontext(endpoint)
        else:
            algorithm = runnable(plan.build("algorithm"))
            assert hardware is not None
            asks = "server" in inspect.signature(algorithm.serve).parameters
            more: dict[str, Any] = {"server": plan.make_server()} if asks else {}
            serving = algorithm.serve(hardware=hardware, checkpoint=checkpoint, **more)

        def served_body() -> None:
            runtime.wait_for_agent()  # one that can't be built costs no start of a server
            with ExitStack() as ending:
                with told_if_removed(checkpoint):
                    served = ending.enter_context(serving)
                body(engine, [served] if isinstance(served, Endpoint) else list(served))

        def end(number: int, frame: Any) -> None:
            runtime.abort(Interrupted(number, f"interrupted by {name_of(number)}"))

        with handling(end):
            runtime.run(served_body)


def eval_tasks(
    tasks: Tasks, run: RunSettings, split: str | None, limit: int | None = 0, *, who: str, role: str = "report"
) -> tuple[str, Sequence[Task]]:
    """Return a split's name and tasks; by default those of the role's split.

    Args:
        split: The split's name; None for the role's.
        limit: Only so many tasks; 0 for all. None for as many as the run uses, of the split that has the role.
    """
    own = split_of(run, tasks, role)
    name = split or own
    if not name:
        raise ConfigError(f"no split serves {role}; name one: --split NAME, one of {', '.join(tasks.splits)}")
    rows = read_split(tasks, name, who=who)
    if not rows:
        more = other_split(tasks, name, "--split NAME", who=who)
        raise ConfigError(f'{who}: split "{name}" has no tasks.{more}')
    if limit is None:
        limit = getattr(run, f"{role}_tasks") if name == own else 0
    return name, rows[:limit] if limit else rows


def prediction(rollout: Rollout) -> dict[str, Any]:
    """Return the line of `--save`: the task's input, the model's replies, the answer and its score."""
    return {
        "task_id": rollout.task.id,
        "input": json.loads(json_text(dict(rollout.task.input))),
        "replies": [reply_of(call.attributes) for call in rollout.trace.llm_calls()],
        "answer": rollout.outcome.answer,
        "value": rollout.value,
        "correct": rollout.correct,
        "failure": rollout.failure,
        "message": rollout.outcome.message or None,
        "details": json.loads(json_text(dict(rollout.score.details))) if rollout.score else {},
    }
