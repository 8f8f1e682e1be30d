"""The scorer: runs a reward on batches, and handles rewards that raise or hang."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from agentrig.agents import Outcome
from agentrig.correctness import Correctness
from agentrig.errors import place_of
from agentrig.rewards import Reward, Score
from agentrig.tasks import Task
from agentrig.text import words_of
from agentrig.traces import Trace

GRACE_S = 1.0
"""Seconds by which a reward may exceed its budget before its score is `invalid`."""

NO_ANSWER = Score.invalid(
    "the agent computed a reward itself and has no answer that another reward could judge: use --reward own, or let it "
    "have an answer (lightning.agent(answer=...))"
)
"""The score of an outcome with an own reward and nothing else."""


class Scorer:
    """Runs a reward on batches in threads, and handles a reward that raises or hangs.

    Args:
        reward: What `RewardSpec.build` returned.
        budget_s: Seconds for one outcome.
        threads: How many outcomes are scored at once; they don't help a reward that holds the GIL.
        correctness: What counts as correct; returned scores have `correct` set.
        sees_trace: Whether the reward is called with the rollout's trace too.
    """

    def __init__(
        self,
        reward: Reward,
        *,
        budget_s: float,
        threads: int = 4,
        correctness: Correctness | None = None,
        sees_trace: bool = False,
    ) -> None:
        self.correctness = correctness or Correctness()
        self._reward, self._budget_s, self._threads = reward, budget_s, threads
        self._own = bool(getattr(reward, "takes_own_reward", False))
        self._many: Callable[[Sequence[tuple[Any, ...]], float], Sequence[Score]] | None = getattr(
            reward, "score_many", None
        )
        self._sees_trace = sees_trace

    def __call__(self, rollouts: Sequence[tuple[Task, Outcome, Trace]]) -> list[Score]:
        """Score a batch; returns a score for each item, in their order. Never raises."""
        items: list[tuple[Any, ...]] = [each if self._sees_trace else each[:2] for each in rollouts]
        judged = {i: item for i, item in enumerate(items) if self._own or _has_answer(item[1])}
        scores = dict(zip(judged, self._scores(list(judged.values())), strict=True))
        return [scores.get(i, NO_ANSWER).judged(self.correctness) for i in range(len(items))]

    def _scores(self, items: Sequence[tuple[Any, ...]]) -> list[Score]:
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
                score = self._one(items[i])
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
                    workers.append(
                        self._thread(work)
                    )  # the thread exceeds its time limit and can't be ended; continue without it
        return [s for s in scores if s is not None]

    def _batch(self, items: Sequence[tuple[Any, ...]]) -> list[Score]:
        found: list[Score] = []

        def work() -> None:
            try:
                assert self._many is not None
                scores = list(self._many(items, self._budget_s))
                if len(scores) != len(items) or not all(isinstance(s, Score) for s in scores):
                    raise TypeError(f"score_many gave {len(scores)} results for {len(items)} items, or no Scores")
            except BaseException as error:  # sys.exit too: it would end this thread without a score
                scores = [_raised(error)] * len(items)
            found.extend(scores)

        worker = self._thread(work)
        worker.join(self._budget_s * len(items) + GRACE_S)
        if worker.is_alive():
            reason = f"the reward ran past its budget of {self._budget_s:g} s for each of {len(items)} outcomes"
            return [Score.invalid(reason)] * len(items)
        return found

    def _one(self, item: tuple[Any, ...]) -> Score:
        task, outcome, *trace = item
        try:
            score = self._reward(task, outcome, self._budget_s, *trace)
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


def _has_answer(outcome: Outcome) -> bool:
    """Return whether there is something to judge; a plain agent that answers None is judged as ever."""
    return outcome.answer is not None or outcome.own_reward is None
