"""The process that judges: how it builds the reward, and which outcome is charged when it dies, hangs or breaks."""

from __future__ import annotations

import json
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any

import attrs

from agentrig.agents import Agent, Outcome
from agentrig.endpoints import Endpoint
from agentrig.errors import AgentFailure, AgentrigError
from agentrig.pools import Job, Result
from agentrig.processes.put_back import left_alone
from agentrig.rewards import Reward, Score
from agentrig.runners.jobs import AgentPlan
from agentrig.runners.judging import CURE, GRACE_S, Late, NoScores, alone_words, late_words, score_many, score_one
from agentrig.runners.pools import ANSWER_S, Worker
from agentrig.runners.processes import Pool, ProcessWorker
from agentrig.text import amount, json_text, storable, words_of

log = logging.getLogger(__name__)

NOWHERE = Endpoint(base_url="http://127.0.0.1:9/v1", model="none")
"""A reward's job has no model."""

POLL_S = 0.1
"""Seconds between two looks at whether a reward's process is late, or the scorer is closed."""

SHOWN = 8
"""So many tasks are named in the message of a process that has ended."""

HELD = "; native code, or a regular expression, held Python's interpreter: give that code a limit of its own"
"""Added to the reason of a late score whose process did not answer."""


class RewardWorker:
    """Runs the reward in a runner process; the runner calls it like an agent."""

    records_itself = True

    def __init__(self, reward: Reward, budget_s: float) -> None:
        self._reward, self._budget_s = reward, budget_s

    def __call__(self, task_input: Any, endpoint: Any) -> Any:
        """Raise: a runner must pass whole jobs to `run_job`."""
        raise TypeError("a reward judges jobs")

    def run_job(self, job: Job) -> str:
        """Judge the outcomes of a job; return their scores' fields as JSON, or as a text why a batch has none.

        Raises:
            AgentFailure: It took too long; the pool judges it again alone, because another outcome may have held it up.
        """
        items: Sequence[tuple[Any, ...]] = job.input
        many = getattr(self._reward, "score_many", None)
        with left_alone("the reward", CURE):
            try:
                if many is not None:
                    scores = score_many(many, items, self._budget_s)
                else:
                    scores = [score_one(self._reward, item, self._budget_s) for item in items]
            except NoScores as error:
                return json_text(str(error))
            except Late as error:
                raise AgentFailure(str(error), kind="deadline") from None
        return json_text([attrs.asdict(score, recurse=False) for score in scores])


@attrs.frozen(kw_only=True)
class RewardPlan(AgentPlan):
    """How a process builds the run's reward. A job's input is a list: task, outcome and, if it sees it, the trace."""

    environment: Sequence[str] = ("*",)
    budget_s: float

    def build(self) -> Agent:
        """Load the plugins and build the reward."""
        from agentrig.plugins import composing

        registry, component, config = self._found("reward")
        return RewardWorker(composing.build(component, config, registry)[0], self.budget_s)


class RewardPool(Pool):
    """The process that judges. One that dies, hangs or breaks starts again, and its outcomes are judged alone then.

    Which outcome did it is known only if that process has judged nothing else: what was judged beside it, or before it,
    may have stopped the process, kept its interpreter or taken its messages. So an outcome that was lost gets a new
    process for itself, and its score is `invalid` if it is lost there too.

    Attributes:
        waited_s: Seconds that calls of `judge` have waited until a process had built the reward.
    """

    builds = "reward"
    runs = ("process", "processes")
    process = title = "the reward's process"
    cure = "call its `build` in a Python shell"

    def __init__(self, plan: RewardPlan, *, threads: int) -> None:
        super().__init__(plan, n=1, threads=threads, deadline_s=plan.budget_s + GRACE_S, retries=1)
        self._budget_s = plan.budget_s
        self.waited_s = 0.0

    def judge(
        self, items: Sequence[tuple[Any, ...]], *, together: bool, closed: threading.Event | None = None
    ) -> list[Score]:
        """Judge outcomes.

        Args:
            together: Whether one call gets all of them; if it gives no scores, each is judged by a call of its own.
            closed: Ends this call once it is set.
        """
        closed = closed or threading.Event()
        if together and len(items) > 1:
            (outcome,) = self._outcomes([items], closed)
            try:
                return scores_of(outcome, len(items))
            except NoScores as error:
                log.warning("%s", alone_words(len(items), str(error)))
        found = []
        for outcome in self._outcomes([[item] for item in items], closed):
            try:
                found += scores_of(outcome, 1)
            except NoScores as error:
                found.append(Score.invalid(str(error)))
        return found

    def _outcomes(self, parts: Sequence[Sequence[tuple[Any, ...]]], closed: threading.Event) -> list[Outcome]:
        """Return what became of jobs, each of one part of the items."""
        start = time.perf_counter()
        while not self.build_first(POLL_S):
            self._check_built(time.monotonic())
            _check_open(closed)
        self.waited_s += time.perf_counter() - start
        for i, part in enumerate(parts):
            self.submit(Job(id=str(i), input=part, endpoint=NOWHERE))
        found: dict[int, Outcome] = {}
        while len(found) < len(parts):
            found.update({int(result.id): result.outcome for result in self.poll(POLL_S)})
            _check_open(closed)
        return [found[i] for i in range(len(parts))]

    def _limit_s(self, job: Job) -> float:
        return self._budget_s * len(job.input) + GRACE_S

    def _dispatch(self) -> None:
        """Give out the outcomes that wait; one that was lost gets a process that has judged nothing else."""
        if self._waiting and self._waiting[0].id in self._lost:
            for worker in [worker for worker in self._workers if worker.given and not worker.jobs]:
                self._workers.remove(worker)
                self._kill(worker)
            self.start()
        super()._dispatch()

    def _ended(self, worker: ProcessWorker, result: Result) -> list[Result]:
        """Store a result. A process that sends none for an outcome, or sends it late, has lost it."""
        if result.outcome.failure is None:
            return super()._ended(worker, result)
        job, _ = worker.jobs.pop(result.id)
        late = result.outcome.failure == "deadline"
        if not self._lose(worker, job, late=late):
            return []
        words = self._deadline_words(False) if late else result.outcome.message
        return [attrs.evolve(result, outcome=attrs.evolve(result.outcome, message=words))]

    def _runs_again(self, worker: ProcessWorker, job: Job, *, late: bool) -> bool:
        if len(job.input) > 1:
            return False  # each of its outcomes is judged alone instead
        return worker.given > 1 or super()._runs_again(worker, job, late=late)

    def _spawn(self) -> ProcessWorker:
        worker = super()._spawn()
        with socket.socket(fileno=os.dup(worker.pipe.fileno())) as pipe:
            pipe.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(ANSWER_S), 0))
        return worker

    def _send(self, worker: ProcessWorker, job: Job) -> bool:
        """Send a job; a process that does not read it, because its interpreter is held, is ended."""
        sent = super()._send(worker, job)
        if not sent:
            worker.process.terminate()
        return sent

    def _beside(self, worker: Worker) -> bool:
        return worker.given > 1

    def _deadline_words(self, held: bool) -> str:
        return late_words(self._budget_s) + (HELD if held else "")

    def _late_words(self, worker: Worker, jobs: Sequence[Job]) -> str:
        return (
            f"{self.process} is killed: {_tasks(jobs)} ran past the budget of {self._budget_s:g} s "
            "(run.reward_budget_s)"
            + ("; each is judged again alone" if worker.given > 1 or any(len(job.input) > 1 for job in jobs) else "")
        )

    def _died_words(self, worker: Worker, code: str, failed: int) -> str:
        judged = [job for job, _ in worker.jobs.values()]
        again = len(judged) > failed or any(len(job.input) > 1 for job in judged)
        return (
            f"{worker.title} died {code}"
            + (f", while it judged {_tasks(judged)}" if judged else "")
            + ("; each is judged again alone" if again else "")
        )


def _check_open(closed: threading.Event) -> None:
    """Raise once the scorer is closed."""
    if closed.is_set():
        raise AgentrigError("the reward judges no more: this command ends")


def _tasks(jobs: Sequence[Job]) -> str:
    """Name the tasks that were judged, the first of them if they are many."""
    ids = [str(storable(item[0].id)) for job in jobs for item in job.input]
    more = f" and {len(ids) - SHOWN} more" if len(ids) > SHOWN else ""
    return f"{'task' if len(ids) == 1 else 'tasks'} {', '.join(ids[:SHOWN])}{more}"


def scores_of(outcome: Outcome, count: int) -> list[Score]:
    """Read the scores that the reward's process sent; nothing in them is trusted."""
    if outcome.failure == "deadline":
        raise NoScores(outcome.message)
    if outcome.failure is not None:
        kind = "" if outcome.failure == "runner-died" else f" ({outcome.failure})"  # no runner of the agent did
        raise NoScores(f"the reward gave no score{kind}: {outcome.message}")
    try:
        sent = json.loads(outcome.answer)
        if isinstance(sent, str):
            raise NoScores(sent)
        scores = [Score(**fields) for fields in sent]
    except (TypeError, ValueError) as error:
        raise NoScores(f"the reward's process sent no score: {words_of(error)}") from None
    if len(scores) != count:
        raise NoScores(f"the reward's process sent {amount(len(scores), 'score')} for {amount(count, 'outcome')}")
    return scores
