"""The checks of a reward."""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs

from agentrig.agents import Outcome
from agentrig.correctness import Correctness
from agentrig.rewards import Reward, Score
from agentrig.run.splits import json_problem
from agentrig.runners.scorer import GRACE_S, Scorer
from agentrig.tasks import Task
from agentrig.testing import answers
from agentrig.testing.checks import CheckFailed, CheckSkipped, Report
from agentrig.testing.elsewhere import elsewhere
from agentrig.testing.samples import TASKS_N, difference, some_tasks
from agentrig.testing.subject import Subject
from agentrig.testing.table import Bench, Table
from agentrig.traces import Trace

NO_CALLS = Trace(rollout_id="kit", spans=())
"""What a reward that sees the trace gets: nothing was played."""

GOLD_KEYS = ("gold", "answer", "solution", "target", "expected", "label", "sql", "query", "output")
"""Keys of `private` that hold the right answer, if a check is not told: the first of them that a task has."""

OVER_BUDGET = "the reward ran past its budget"
RAISED = ("the reward raised", "the reward returned", "score_many gave")
ELSEWHERE_S = 60.0
"""Seconds for scoring in another process, with its imports."""


@attrs.define(kw_only=True, eq=False, slots=False)
class RewardBench(Bench):
    """What the checks of a reward share.

    Attributes:
        tasks: A list of `Task`, or a task set (`agentrig.testing.samples.some_tasks`); None for the plugin's own.
        tasks_settings: The task set's keys.
        split: Its split.
        limit: How many tasks the reward is tried on.
        gold: The key of `private` with the right answer, or a function of the task that returns it; None for the first
            of `GOLD_KEYS` that a task has.
        ladder: A function of the task that returns answers from worst to best, if better answers must have higher
            rewards.
        budget_s: Seconds for one answer, as `run.reward_budget_s`.
        threads: How many answers are scored at once.
    """

    tasks: Any = None
    tasks_settings: Any = None
    split: str = ""
    limit: int = TASKS_N
    gold: str | Callable[[Task], Any] | None = None
    ladder: Callable[[Task], Sequence[Any]] | None = None
    budget_s: float = 10.0
    threads: int = 8

    @cached_property
    def rows(self) -> list[Task]:
        """The tasks that it is tried on."""
        return copy.deepcopy(self.unseen)

    @cached_property
    def unseen(self) -> list[Task]:
        """The same tasks, as they were before the reward saw them."""
        return some_tasks(
            self.tasks, subject=self.subject, settings=self.tasks_settings, split=self.split, n=self.limit
        )

    @cached_property
    def golds(self) -> list[Any]:
        """The right answer of each task.

        Raises:
            CheckSkipped: It is not known.
        """
        if getattr(self.made, "takes_own_reward", False):
            raise CheckSkipped("the agent computes this reward: there is no answer to judge")
        if callable(self.gold):
            return [self.gold(task) for task in self.rows]
        key = self.gold
        if key is None:
            key = next((k for k in GOLD_KEYS if all(k in task.private for task in self.rows)), None)
        if key is None:
            known = ", ".join(sorted({k for task in self.rows for k in task.private})) or "none"
            raise CheckSkipped(f'the right answer is not known: give gold="KEY" of private (its keys: {known})')
        return [task.private[key] for task in self.rows]

    def scores(self, items: Sequence[tuple[Task, Any]], *, reward: Any = None, threads: int = 1) -> list[Score]:
        """Score answers one by one, as a run does, each within its budget.

        Raises:
            CheckSkipped: One ran past its budget, which is another check's matter.
        """
        found = self.judged(items, reward=reward, threads=threads)
        if any(_reason(score).startswith(OVER_BUDGET) for score in found):
            raise CheckSkipped("an answer's score ran past its budget: see reward.budget")
        return found

    def judged(self, items: Sequence[tuple[Task, Any]], *, reward: Any = None, threads: int = 1) -> list[Score]:
        """Score answers one by one; an `invalid` score says if it took too long."""
        spec = self.subject.spec
        correctness = Correctness(reward_at=spec.correct_at if spec else None)
        scorer = Scorer(
            _single(self.made if reward is None else reward),
            budget_s=self.budget_s,
            threads=threads,
            correctness=correctness,
            sees_trace=self.sees_trace,
        )
        return scorer([(task, Outcome(answer=answer), NO_CALLS) for task, answer in items])

    @property
    def sees_trace(self) -> bool:
        """Whether the reward is called with a trace; here it is one without calls."""
        spec = self.subject.spec
        return bool(spec is not None and spec.sees_trace)

    @cached_property
    def plain(self) -> list[tuple[Task, Any]]:
        """Each task with an ordinary answer: its own gold, or the one of another task."""
        try:
            golds = self.golds
        except CheckSkipped:
            return [
                (task, answer) for task, answer in zip(self.rows, ["1", "no", "a b c"] * len(self.rows), strict=False)
            ]
        shifted = golds[1:] + golds[:1]
        return [*zip(self.rows, golds, strict=True), *zip(self.rows, shifted, strict=True)]

    @cached_property
    def there(self) -> list[Score]:
        """The scores of `plain` in another process."""
        sent = self.subject.sendable(), self.plain, self.budget_s
        return elsewhere(_scored_there, *sent, deadline_s=ELSEWHERE_S)

    @cached_property
    def tells_apart(self) -> bool:
        """Whether it gives right answers more than those of other tasks; False too if no right answer is known."""
        try:
            golds = self.golds
        except CheckSkipped:
            return False
        scores = self.scores(self.plain)
        right, other = scores[: len(golds)], scores[len(golds) :]
        return _total(right) > _total(other)

    def bears(self, given: Mapping[str, Any], allowed: Callable[[Score], bool]) -> None:
        """Fail if the score of an answer is not allowed, or counts as correct.

        Args:
            given: Description to answer.
            allowed: Whether a score may be.
        """
        task = self.rows[0]
        scores = self.scores([(task, answer) for answer in given.values()])
        for name, score in zip(given, scores, strict=True):
            if not allowed(score):
                raise CheckFailed(f"task {task.id}, {name}: the score is invalid ({_reason(score)})")
            if score.correct and self.tells_apart:
                raise CheckFailed(
                    f"task {task.id}, {name}: it counts as correct (value {score.value})",
                    "Give it a low value; check `correct` and `correct_at` for such an answer.",
                )


TABLE = Table("reward", RewardBench)
check = TABLE.check


@check(
    "scores",
    why="Such a rollout is left out of its group, as if the environment had failed; over 25% of them stop the run.",
    cure="Return `Score.ok(value)`; for what is not the answer's fault `Score.invalid(reason)`. Catch what you expect.",
)
def scores(bench: RewardBench) -> None:
    """It returns a `Score` for ordinary answers, raises nothing, and does not end its process."""
    if getattr(bench.made, "takes_own_reward", False):
        raise CheckSkipped("the agent computes this reward: there is no answer to judge")
    _ = bench.there  # first where it can end nothing else
    for (task, answer), score in zip(bench.plain, bench.scores(bench.plain), strict=True):
        if _reason(score).startswith(RAISED):
            raise CheckFailed(f"task {task.id}, answer {answer!r:.60}: {_reason(score)}")


@check(
    "same-twice",
    why="Equal answers of a group get different advantages: the gradient is noise, and no audit can look at it.",
    cure="Use no clock, no shared random stream and no memory of earlier answers; seed from `task.id`.",
    needs=["scores"],
)
def same_twice(bench: RewardBench) -> None:
    """The same answers get the same scores: again, in the other order, and from a reward that is built again."""
    _compare(bench, "scored once and again", bench.scores(bench.plain))
    _compare(bench, "in the other order", bench.scores(bench.plain[::-1])[::-1])
    _compare(bench, "built again", bench.scores(bench.plain, reward=bench.subject.build()))


@check(
    "other-process",
    why="A resumed run, an audit or another machine would give other rewards than this process.",
    cure="Use no `hash()` of a text, no order of a set.",
    needs=["same-twice"],
)
def other_process(bench: RewardBench) -> None:
    """A process with another hash seed gives the same scores."""
    _compare(bench, "here and in another process", bench.there)


@check(
    "threads",
    why="A run scores several answers at once: they would get each other's rewards.",
    cure="Keep what belongs to one call in local variables, not in the reward object or in globals.",
    needs=["same-twice"],
)
def threads(bench: RewardBench) -> None:
    """Many threads at once get the scores that one gets."""
    for _ in range(3):
        _compare(bench, f"one by one and {bench.threads} at once", bench.scores(bench.plain, threads=bench.threads))


@check(
    "batch",
    why="A run prefers `score_many`: every rollout would get another one's reward.",
    cure="Return one Score for each item, in the order of the items, equal to what a single call returns.",
    needs=["same-twice"],
)
def batch(bench: RewardBench) -> None:
    """`score_many`, if there is one, gives what single calls give, in order."""
    if getattr(bench.made, "score_many", None) is None or not callable(bench.made):
        raise CheckSkipped("it has no score_many beside its single call")
    many = Scorer(bench.made, budget_s=bench.budget_s, sees_trace=bench.sees_trace)
    found = many([(task, Outcome(answer=answer), NO_CALLS) for task, answer in bench.plain])
    _compare(bench, "one by one and by score_many", found)


@check(
    "gold",
    why="The model is punished for right answers, and no accuracy can reach 100%.",
    cure="Score the task's own right answer; if the data is wrong, leave the task out.",
    needs=["scores"],
)
def gold(bench: RewardBench) -> None:
    """Each task's own right answer counts as correct."""
    found = bench.scores(list(zip(bench.rows, bench.golds, strict=True)))
    wrong = [(t, s) for t, s in zip(bench.rows, found, strict=True) if not s.correct]
    if wrong:
        task, score = wrong[0]
        raise CheckFailed(
            f"{len(wrong)} of {len(found)} right answers are not correct; the first: task {task.id}, status "
            f"{score.status}, value {score.value} {_reason(score)}"
        )


@check(
    "tells-apart",
    why="All rollouts of a group get the same advantage, zero: nothing is learned.",
    cure="Make the value depend on the answer and on the task's private part.",
    needs=["scores"],
)
def tells_apart(bench: RewardBench) -> None:
    """A task's own right answer is worth more than those of other tasks."""
    if len({repr(answer) for answer in bench.golds}) < 2:
        raise CheckSkipped("all these tasks have the same right answer")
    if not bench.tells_apart:
        values = sorted({s.value for s in bench.scores(bench.plain) if s.value is not None})
        raise CheckFailed(f"right answers have no higher values than those of other tasks; values seen: {values[:5]}")


@check(
    "empty",
    why="An untrained model often says nothing: if that is worth something, it learns to say nothing.",
    cure="Return a low value, for example `Score.ok(0.0)`, for an empty answer.",
    needs=["scores"],
)
def empty(bench: RewardBench) -> None:
    """Empty answers get a valid score and are not correct."""
    bench.bears(answers.EMPTY, _valid)


@check(
    "malformed",
    why="A weak model's answers are often malformed: an `invalid` score takes away the signal that would mend them.",
    cure="Catch errors of parsing and return a low value: `invalid` is for what is not the answer's fault.",
    needs=["scores"],
)
def malformed(bench: RewardBench) -> None:
    """Malformed texts get a valid score and are not correct."""
    bench.bears(answers.MALFORMED, _valid)


@check(
    "other-types",
    why="An agent's answer may be any JSON value; an exception hides whose fault it was.",
    cure="Test the answer's type first: `Score.ok(0.0)`, or `Score.invalid` with a reason that names the agent.",
    needs=["scores"],
)
def other_types(bench: RewardBench) -> None:
    """Answers of any JSON type get a score, which may be `invalid`, and are not correct."""
    bench.bears(answers.OTHER_TYPES, lambda score: not _reason(score).startswith(RAISED))


@check(
    "huge",
    why="A model that repeats itself writes huge answers; they would be left out instead of getting a low reward.",
    cure="Cut or reject an answer by its length before you parse it; recurse on no answer.",
    needs=["scores"],
)
def huge(bench: RewardBench) -> None:
    """Huge answers get a valid score and are not correct."""
    bench.bears(answers.HUGE, _valid)


@check(
    "hostile",
    why="What is sampled is anybody's text: it would run on your machine, and the model learns to fool its judge.",
    cure="Never `eval`, format or run an answer outside of a sandbox; parse it (`ast.literal_eval`, `json.loads`).",
    needs=["scores"],
)
def hostile(bench: RewardBench) -> None:
    """Answers that attack the reward run nothing and are not correct."""
    with tempfile.TemporaryDirectory() as folder:
        mark = Path(folder) / "mark"
        bench.scores([(bench.rows[0], answer) for answer in answers.hostile(mark).values()])
        if mark.exists():
            name = next((n for n, a in answers.hostile(mark).items() if _runs(bench, a, mark)), "one of them")
            raise CheckFailed(f"an answer was run as code: {name}")
        bench.bears(answers.hostile(mark), lambda score: True)


@check(
    "budget",
    why="A reward that takes long holds up every step; past its budget the score is `invalid`.",
    cure="Give up before `budget_s`, the third argument, and return `Score.timeout(reason)`.",
    needs=["scores"],
)
def budget(bench: RewardBench) -> None:
    """Every answer, huge and malformed ones too, is scored within `budget_s`."""
    task = bench.rows[0]
    kinds = {**answers.EMPTY, **answers.MALFORMED, **answers.OTHER_TYPES, **answers.HUGE}
    items = [*bench.plain, *((task, answer) for answer in kinds.values())]
    names = [
        *(f"task {t.id}, answer {a!r:.40}" for t, a in bench.plain),
        *(f"task {task.id}, {name}" for name in kinds),
    ]
    for name, score in zip(names, bench.judged(items, threads=bench.threads), strict=True):
        if _reason(score).startswith(OVER_BUDGET):
            raise CheckFailed(f"{name}: no score after {bench.budget_s:g} s and {GRACE_S:g} s of grace")


@check(
    "leaves-task",
    why="Tasks are shared: the next answer to the same task would be judged by other data.",
    cure="Copy what you change: `dict(task.private)`, `sorted(...)` instead of `.sort()`.",
    needs=["scores"],
)
def leaves_task(bench: RewardBench) -> None:
    """It changes neither the task nor the answer."""
    answer = {"text": ["b", "a"]}
    for before, (_, text) in zip(bench.unseen, bench.plain, strict=False):
        task = copy.deepcopy(before)
        given = [text, copy.deepcopy(answer)]
        bench.scores([(task, item) for item in given])
        changed = difference([dict(before.input), dict(before.private)], [dict(task.input), dict(task.private)])
        changed = changed or difference([text, answer], given)
        if changed:
            raise CheckFailed(f"task {before.id} or its answer is changed: {changed}")


@check(
    "storable",
    why="Scores go into the run's files: one that is not JSON ends the run, or is stored as text.",
    cure="Put only JSON values into `details`, and finite numbers into `components`.",
    needs=["scores"],
)
def storable(bench: RewardBench) -> None:
    """`details` are JSON values, `components` finite numbers."""
    for (task, _), score in zip(bench.plain, bench.scores(bench.plain), strict=True):
        problem = json_problem(dict(score.details), "details")
        bad = [k for k, v in score.components.items() if not isinstance(v, int | float) or not math.isfinite(v)]
        if problem or bad:
            raise CheckFailed(f"task {task.id}: {problem or f'components {bad} are no finite numbers'}")


@check(
    "monotone",
    why="The model is pushed from a better answer to a worse one.",
    cure="Order the terms of the reward so that a better answer never has less; see the two answers named.",
    needs=["same-twice"],
)
def monotone(bench: RewardBench) -> None:
    """On each task's ladder of answers, from worst to best, the value never falls."""
    if bench.ladder is None:
        raise CheckSkipped("give ladder=FUNCTION(task) -> answers from worst to best, if better answers must have more")
    for task in bench.rows:
        steps = list(bench.ladder(task))
        values = [s.value for s in bench.scores([(task, answer) for answer in steps])]
        for i in range(1, len(values)):
            low, high = values[i - 1], values[i]
            if low is None or high is None or high < low:
                raise CheckFailed(
                    f"task {task.id}: {steps[i - 1]!r:.60} has {low}, the better {steps[i]!r:.60} has {high}"
                )
        if len(steps) > 1 and values[-1] == values[0] and bench.tells_apart:
            raise CheckFailed(f"task {task.id}: the best answer has no more than the worst, {values[0]}")


def _compare(bench: RewardBench, how: str, found: Sequence[Score]) -> None:
    """Fail if scores differ from those of a first call."""
    for (task, answer), one, other in zip(bench.plain, bench.scores(bench.plain), found, strict=True):
        different = difference([one.status, one.value, one.correct], [other.status, other.value, other.correct])
        if different:
            raise CheckFailed(f"task {task.id}, answer {answer!r:.60}, {how}: {different}")


def _scored_there(subject: Subject, items: Sequence[tuple[Task, Any]], budget_s: float) -> list[Score]:
    """Score in the other process."""
    return RewardBench(subject=subject, budget_s=budget_s).scores(items)


def _runs(bench: RewardBench, answer: str, mark: Path) -> bool:
    mark.unlink(missing_ok=True)
    bench.judged([(bench.rows[0], answer)])
    return mark.exists()


def _single(reward: Any) -> Reward:
    """Return the reward without its `score_many`, so that each answer is scored by itself."""
    if not callable(reward):
        return reward  # type: ignore[no-any-return]

    def single(task: Task, outcome: Outcome, budget_s: float, *trace: Trace) -> Score:
        found: Score = reward(task, outcome, budget_s, *trace)
        return found

    return single


def _valid(score: Score) -> bool:
    return score.status != "invalid"


def _reason(score: Score) -> str:
    return str(score.details.get("reason", ""))


def _total(scores: Sequence[Score]) -> float:
    return math.fsum(s.value for s in scores if s.value is not None)


def check_reward(
    subject: Any, *, settings: Any = None, only: Sequence[str] | None = None, raise_failed: bool = True, **options: Any
) -> Report:
    """Run the checks of a reward; see `agentrig.testing.check`, and `RewardBench` for the options.

    Example:
        ```python
        check_reward("my_reward.py:mine", tasks="my-tasks", gold="answer")
        ```
    """
    return TABLE.check_all(subject, settings, only, raise_failed, options)
