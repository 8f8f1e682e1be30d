"""The scorer: runs a reward on batches, and handles rewards that raise or hang."""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic  # a reward may replace that of the module
from typing import Any

from agentrig.agents import Outcome
from agentrig.correctness import Correctness
from agentrig.processes.put_back import left_alone
from agentrig.rewards import Reward, Score
from agentrig.runners.judging import CURE, GRACE_S, Late, NoScores, alone_words, late_words, score_many, score_one
from agentrig.runners.reward_process import RewardPlan, RewardPool
from agentrig.tasks import Task
from agentrig.traces import Trace

log = logging.getLogger(__name__)

NO_ANSWER = Score.invalid(
    "the agent computed a reward itself and has no answer that another reward could judge: use --reward own, or let it "
    "have an answer (lightning.agent(answer=...))"
)
"""The score of an outcome with an own reward and nothing else."""


Judged = tuple[list[Score] | None, str]
"""The scores of a call of the reward, or None and why there are none."""


class Scorer:
    """Runs a reward on batches, and handles a reward that raises, hangs or ends its process.

    With a `plan`, the reward judges in a process of its own, so that it can't harm this one, and can be ended. Without,
    it judges in threads: one that does not end is interrupted, which ends a loop in Python, and is left alone.

    Args:
        reward: What `RewardSpec.build` returned; with a `plan`, only what it needs is asked of it.
        budget_s: Seconds for one outcome.
        threads: How many outcomes are scored at once; they don't help a reward that holds the GIL.
        correctness: What counts as correct; returned scores have `correct` set.
        sees_trace: Whether the reward is called with the rollout's trace too.
        plan: How its process builds the reward; None to judge in threads of this one.

    Attributes:
        batch_fault: In threads, why a batch gave no scores at once; '' if each did.
        waited_s: Seconds that calls have waited for the start of the reward's process, before it judged anything.
    """

    def __init__(
        self,
        reward: Reward,
        *,
        budget_s: float,
        threads: int = 4,
        correctness: Correctness | None = None,
        sees_trace: bool = False,
        plan: RewardPlan | None = None,
    ) -> None:
        self._plan = plan
        self._pool: RewardPool | None = None
        self._lock, self._closed = threading.Lock(), threading.Event()
        self.correctness = correctness or Correctness()
        self.batch_fault = ""
        self.waited_s = 0.0
        self._reward = reward if plan is None else None  # its process has one: no model is twice in memory
        self._budget_s, self._threads = budget_s, threads
        self._own = bool(getattr(reward, "takes_own_reward", False))
        self._batches = getattr(reward, "score_many", None) is not None
        self._sees_trace = sees_trace

    def __call__(self, rollouts: Sequence[tuple[Task, Outcome, Trace]]) -> list[Score]:
        """Score a batch; returns a score for each item, in their order."""
        items: list[tuple[Any, ...]] = [each if self._sees_trace else each[:2] for each in rollouts]
        judged = {
            i: item  # a plain agent that answers None is judged too
            for i, item in enumerate(items)
            if self._own or item[1].answer is not None or item[1].own_reward is None
        }
        scores = dict(zip(judged, self._scores(list(judged.values())), strict=True))
        found = [scores.get(i, NO_ANSWER).with_correct(self.correctness) for i in range(len(items))]
        return [_of_calls(score, *each[2:]) for score, each in zip(found, rollouts, strict=True)]

    def _scores(self, items: Sequence[tuple[Any, ...]]) -> list[Score]:
        if not items:
            return []
        if self._plan is not None:
            return self._in_process(items, self._plan)
        with left_alone("the reward", CURE):
            return self._in_threads(items)

    def _in_process(self, items: Sequence[tuple[Any, ...]], plan: RewardPlan) -> list[Score]:
        with self._lock:
            pool = self._pool = self._pool or RewardPool(plan, threads=self._threads)
            waited_s = pool.waited_s
            try:
                return pool.judge(items, together=self._batches, closed=self._closed)
            except BaseException:  # its jobs are of no use to a later call
                self._pool = None
                pool.close()
                raise
            finally:
                self.waited_s += pool.waited_s - waited_s

    def close(self) -> None:
        """End the reward's process, if there is one, also while it judges."""
        self._closed.set()
        with self._lock:
            if self._pool is not None:
                self._pool.close()
                self._pool = None

    def _in_threads(self, items: Sequence[tuple[Any, ...]]) -> list[Score]:
        """Judge a batch by one call of `score_many`; where there is none, or it gives no scores, one by one."""
        reward: Any = self._reward

        def judged(few: Sequence[tuple[Any, ...]]) -> list[Score]:
            if self._batches:
                return score_many(reward.score_many, few, self._budget_s)
            return [score_one(reward, few[0], self._budget_s)]

        if self._batches and len(items) > 1:
            ((found, why),) = self._called([lambda: judged(items)], self._budget_s * len(items) + GRACE_S)
            if found is not None:
                return found
            self.batch_fault = why
            log.debug("%s", alone_words(len(items), why))
        alone = self._called([partial(judged, [item]) for item in items], self._budget_s + GRACE_S)
        return [found[0] if found is not None else Score.invalid(why) for found, why in alone]

    def _called(self, calls: Sequence[Callable[[], list[Score]]], limit_s: float) -> list[Judged]:
        """Call in threads; return what each call returned, or None and why: one that takes longer is interrupted."""
        found: dict[int, Judged] = {}
        started: dict[int, tuple[float, threading.Thread]] = {}
        todo, ending = iter(range(len(calls))), threading.Lock()

        def work() -> None:
            while True:
                with ending:
                    i = next(todo, None)
                if i is None:
                    return
                started[i] = monotonic(), threading.current_thread()
                scores, why = None, ""
                try:
                    scores = calls[i]()
                except (NoScores, Late) as error:
                    why = str(error)
                with ending:
                    if i in found:
                        return  # too late, and this thread may be interrupted
                    found[i] = scores, why

        def thread() -> threading.Thread:
            made = threading.Thread(target=work, name="reward", daemon=True)
            made.start()
            return made

        workers = [thread() for _ in range(min(self._threads, len(calls)))]
        while len(found) < len(calls):
            for worker in workers:
                worker.join(0.01)
            for i, (start, worker) in list(started.items()):
                with ending:
                    if i not in found and monotonic() - start > limit_s:
                        found[i] = None, late_words(self._budget_s)
                        _interrupt(worker)
                        workers.append(thread())  # goes on without it
        return [found[i] for i in range(len(calls))]


def _interrupt(worker: threading.Thread) -> None:
    """End a thread that does not end by itself, if it runs Python."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(worker.ident or 0), ctypes.py_object(SystemExit))


def _of_calls(score: Score, trace: Trace | None = None) -> Score:
    """Return the score, `invalid` if it has values for other calls than those of the rollout."""
    if not score.calls or trace is None or len(score.calls) == (recorded := len(trace.llm_calls())):
        return score
    return Score.invalid(
        f"the reward gave {len(score.calls)} values of calls, and the rollout has {recorded} recorded calls: "
        "Score.calls needs one value or None for each of trace.llm_calls()"
    )
