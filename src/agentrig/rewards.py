"""Rewards: the typed verdict on an outcome."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, Literal

import attrs

from agentrig.agents import Outcome
from agentrig.correctness import Correctness
from agentrig.errors import place_of
from agentrig.tasks import Task
from agentrig.text import words_of

VALUE_LIMIT = 1e9
"""Greatest size of a score's value: its square, summed over a step, stays finite in 32-bit floats."""


@attrs.frozen(kw_only=True)
class Score:
    """A reward's verdict.

    Attributes:
        status: `ok`: judged. `timeout`: the policy's answer ran past its budget; its fault, so it
            trains with `value` (usually 0.0). `invalid`: the environment or the reward failed, not
            the policy; the rollout leaves the group's baseline and is counted as a failure.
        value: The number to learn from, at most `VALUE_LIMIT` in size; None if and only if the status is `invalid`.
        components: Named parts of the value, for the report and audits; not learned from.
        details: Anything else that explains the verdict (a reason, an error); JSON values.
        correct: Whether the answer counts as correct, for accuracy; not learned from. None leaves it to a threshold
            (`agentrig.correctness`); only an `ok` score can be correct.
    """

    status: Literal["ok", "invalid", "timeout"]
    value: float | None = None
    components: Mapping[str, float] = attrs.field(factory=dict)
    details: Mapping[str, Any] = attrs.field(factory=dict)
    correct: bool | None = None

    def __attrs_post_init__(self) -> None:
        if self.status not in ("ok", "invalid", "timeout"):
            raise ValueError(f"status is {self.status!r}; use 'ok', 'invalid' or 'timeout'")
        if self.correct is not None and not isinstance(self.correct, bool):
            raise ValueError(f"a score's correct is {self.correct!r}; use True, False or None")
        if self.correct and self.status != "ok":
            raise ValueError(f"a score with status {self.status!r} cannot be correct; only 'ok' can")
        for name in ("components", "details"):
            if not isinstance(getattr(self, name), Mapping):
                raise TypeError(
                    f"a score's {name} are {getattr(self, name)!r}; they must be a mapping of names to values"
                )
        if (self.value is None) != (self.status == "invalid"):
            raise ValueError(f"a score with status {self.status!r} has value {self.value!r}; only 'invalid' has none")
        if self.value is not None and not abs(self.value) <= VALUE_LIMIT:
            raise ValueError(
                f"a score's value is {self.value!r}; it must lie between -{VALUE_LIMIT:g} and {VALUE_LIMIT:g}, so that "
                "sums and squares of it stay finite in training: scale it"
            )

    def judged(self, correctness: Correctness) -> Score:
        """Return the score with `correct` decided; an `invalid` one, of which nobody can tell, as it is."""
        if self.value is None:
            return self
        correct = correctness.decide(self.status, self.value, self.correct)
        return self if correct is self.correct else attrs.evolve(self, correct=correct)

    @classmethod
    def ok(cls, value: float, *, correct: bool | float | None = None, **components: float) -> Score:
        """Return a judged score.

        Args:
            value: The number to learn from.
            correct: True or False: whether the answer counts as correct. A number is the component of that name.
            components: Named parts of the value.
        """
        if isinstance(correct, Real) and not isinstance(correct, bool):
            return cls(status="ok", value=float(value), components={"correct": float(correct), **components})
        verdict = None if correct is None else bool(correct)  # a bool of NumPy's too
        return cls(status="ok", value=float(value), components=components, correct=verdict)

    @classmethod
    def invalid(cls, reason: str, **details: Any) -> Score:
        """Return the score of an environment that failed, with the reason."""
        return cls(status="invalid", details={"reason": reason, **details})

    @classmethod
    def timeout(cls, reason: str, value: float = 0.0, **details: Any) -> Score:
        """Return the score of an answer that ran past its budget."""
        return cls(status="timeout", value=value, details={"reason": reason, **details})


Reward = Callable[[Task, Outcome, float], Score]
"""What `RewardSpec.build` returns: called as `reward(task, outcome, budget_s)`.

It is called only for outcomes without a failure, from several threads at once. It may also have a
method `score_many(items: Sequence[tuple[Task, Outcome]], budget_s) -> Sequence[Score]`, which is
then called with a whole batch instead (`budget_s` is per item). A reward that raises, or that runs
well past its budget, scores `invalid`.
"""


GRACE_S = 1.0
"""How far past its budget a reward may run before its verdict is `invalid`."""


class Scorer:
    """Runs a reward on batches in threads, and outlives a reward that raises or hangs.

    Args:
        reward: What `RewardSpec.build` returned.
        budget_s: Seconds for one outcome.
        threads: How many outcomes are judged at once; a reward that holds the GIL gains nothing by them.
        correctness: What counts as correct; the scores that come back say it.
    """

    def __init__(
        self, reward: Reward, *, budget_s: float, threads: int = 4, correctness: Correctness | None = None
    ) -> None:
        self.correctness = correctness or Correctness()
        self._reward, self._budget_s, self._threads = reward, budget_s, threads
        self._many: Callable[[Sequence[tuple[Task, Outcome]], float], Sequence[Score]] | None = getattr(
            reward, "score_many", None
        )

    def __call__(self, items: Sequence[tuple[Task, Outcome]]) -> list[Score]:
        """Judge a batch; as many scores as items, in their order. Never raises."""
        return [score.judged(self.correctness) for score in self._scores(items)]

    def _scores(self, items: Sequence[tuple[Task, Outcome]]) -> list[Score]:
        if not items:
            return []
        if self._many is not None:
            return self._batch(items)
        scores: list[Score | None] = [None] * len(items)
        started: dict[int, float] = {}
        todo: queue.SimpleQueue[int] = queue.SimpleQueue()
        for i in range(len(items)):
            todo.put(i)

        def work() -> None:
            while True:
                try:
                    i = todo.get_nowait()
                except queue.Empty:
                    return
                started[i] = time.monotonic()
                score = self._one(*items[i])
                if scores[i] is None:
                    scores[i] = score

        workers = [self._thread(work) for _ in range(min(self._threads, len(items)))]
        limit = self._budget_s + GRACE_S
        while any(s is None for s in scores):
            for worker in workers:
                worker.join(0.01)
            now = time.monotonic()
            for i, start in list(started.items()):
                if scores[i] is None and now - start > limit:
                    scores[i] = Score.invalid(f"the reward ran past its budget of {self._budget_s:g} s")
                    workers.append(self._thread(work))  # the overdue thread is lost; go on without it
        return [s for s in scores if s is not None]

    def _batch(self, items: Sequence[tuple[Task, Outcome]]) -> list[Score]:
        found: list[Score] = []

        def work() -> None:
            try:
                assert self._many is not None
                scores = list(self._many(items, self._budget_s))
                if len(scores) != len(items) or not all(isinstance(s, Score) for s in scores):
                    raise TypeError(f"score_many gave {len(scores)} results for {len(items)} items, or no Scores")
            except BaseException as error:  # sys.exit too: it would end this thread and leave no score
                scores = [_raised(error)] * len(items)
            found.extend(scores)

        worker = self._thread(work)
        worker.join(self._budget_s * len(items) + GRACE_S)
        if worker.is_alive():
            reason = f"the reward ran past its budget of {self._budget_s:g} s for each of {len(items)} outcomes"
            return [Score.invalid(reason)] * len(items)
        return found

    def _one(self, task: Task, outcome: Outcome) -> Score:
        try:
            score = self._reward(task, outcome, self._budget_s)
        except BaseException as error:
            return _raised(error)
        if isinstance(score, Score):
            return score
        return Score.invalid(f"the reward returned {type(score).__name__}; it must return an agentrig.Score")

    @staticmethod
    def _thread(work: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=work, name="reward", daemon=True)
        thread.start()
        return thread


def _raised(error: BaseException) -> Score:
    return Score.invalid(f"the reward raised {words_of(error)}{place_of(error)}")
