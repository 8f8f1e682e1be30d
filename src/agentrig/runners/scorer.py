"""The scorer: runs a reward on batches, and handles rewards that raise or hang."""

from __future__ import annotations

import ctypes
import inspect
import json
import logging
import os
import queue
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from time import monotonic  # a reward may replace that of the module
from typing import Any

import attrs

from agentrig.agents import Agent, Outcome
from agentrig.correctness import Correctness
from agentrig.endpoints import Endpoint
from agentrig.errors import AgentFailure, AgentrigError, place_of
from agentrig.pools import Job, Result
from agentrig.processes.ends import forks_ended
from agentrig.processes.put_back import restored
from agentrig.processes.replaced import left_alone
from agentrig.processes.shared import current_folder
from agentrig.rewards import Reward, Score
from agentrig.runners.jobs import AgentPlan
from agentrig.runners.pools import ANSWER_S, Worker
from agentrig.runners.processes import Pool, ProcessWorker
from agentrig.tasks import Task, field_hint
from agentrig.text import Room, TooLong, amount, copied, json_text, plain_values, storable, words_of
from agentrig.traces import Span, Trace

log = logging.getLogger(__name__)

NOWHERE = Endpoint(base_url="http://127.0.0.1:9/v1", model="none")
"""A reward's job has no model."""

GRACE_S = 1.0
"""Seconds by which a reward may exceed its budget before its score is `invalid`."""

POLL_S = 0.1
"""Seconds between two looks at whether a reward's process is late, or the scorer is closed."""

SHOWN = 8
"""So many tasks are named in the message of a process that has ended."""

HELD = "; native code, or a regular expression, held Python's interpreter: give that code a limit of its own"
"""Added to the reason of a late score whose process did not answer."""

CURE = "Let the reward use them as they are: other code of its process needs them"
"""What to do about a reward that changes the process that it judges in, or is built in."""

DETAILS_LIMIT = 4_000_000
"""Longest details of a score, in characters of JSON: those of a process are within `ANSWER_LIMIT` even as a text."""

NO_ANSWER = Score.invalid(
    "the agent computed a reward itself and has no answer that another reward could judge: use --reward own, or let it "
    "have an answer (lightning.agent(answer=...))"
)
"""The score of an outcome with an own reward and nothing else."""


class RewardWorker:
    """Runs the reward in a runner process; the runner calls it like an agent.

    Args:
        reward: What `RewardSpec.build` returned.
        budget_s: Seconds for one outcome.
    """

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
        with left_alone("the reward", CURE, tell=log.debug):  # what it replaces must not change how scores are sent
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
    """How a process builds the run's reward. A job's input is a list of a task, an outcome and, if it sees it, a trace.

    Attributes:
        budget_s: Seconds for one outcome.
    """

    environment: Sequence[str] = ("*",)
    budget_s: float

    def build(self) -> Agent:
        """Load the plugins and build the reward.

        Raises:
            agentrig.errors.AgentrigError: It cannot be built; the message names the plugin's file and line.
        """
        from agentrig.plugins import composing

        registry, component, config = self._found("reward")
        return RewardWorker(composing.build(component, config, registry)[0], self.budget_s)


class RewardPool(Pool):
    """The process that judges. One that dies, hangs or breaks starts again, and its outcomes are judged alone then.

    Which outcome did it is known only if that process has judged nothing else: what was judged beside it, or before it,
    may have stopped the process, kept its interpreter or taken its messages. So an outcome that was lost gets a new
    process for itself, and its score is `invalid` if it is lost there too.

    Args:
        plan: How the reward is built.
        threads: How many outcomes are judged at once.
    """

    builds = "reward"
    runs = ("process", "processes")
    cure = "call its `build` in a Python shell"

    def __init__(self, plan: RewardPlan, *, threads: int) -> None:
        super().__init__(plan, n=1, threads=threads, deadline_s=plan.budget_s + GRACE_S, retries=1)
        self._budget_s = plan.budget_s

    def judge(
        self, items: Sequence[tuple[Any, ...]], *, together: bool, closed: threading.Event | None = None
    ) -> list[Score]:
        """Judge outcomes.

        Args:
            items: Outcomes, as the reward gets them.
            together: Whether one call gets all of them; if it gives no scores, each is judged by a call of its own.
            closed: Ends this call once it is set.

        Raises:
            AgentrigError: The reward cannot be built in its process, or `closed` is set.
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
        for i, part in enumerate(parts):
            self.submit(Job(id=str(i), input=part, endpoint=NOWHERE))
        self.start()
        found: dict[int, Outcome] = {}
        while len(found) < len(parts):
            found.update({int(result.id): result.outcome for result in self.poll(POLL_S)})
            if closed.is_set():
                raise AgentrigError("the reward judges no more: this command ends")
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

    def _process(self) -> str:
        return "the reward's process"

    def _title(self, pid: int) -> str:
        return f"{self._process()} {pid}"

    def _deadline_words(self, held: bool) -> str:
        return late_words(self._budget_s) + (HELD if held else "")

    def _late_words(self, worker: Worker, jobs: Sequence[Job]) -> str:
        return (
            f"{self._process()} is killed: {_tasks(jobs)} ran past the budget of {self._budget_s:g} s "
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


def _tasks(jobs: Sequence[Job]) -> str:
    """Name the tasks that were judged, the first of them if they are many."""
    ids = [str(storable(item[0].id)) for job in jobs for item in job.input]
    more = f" and {len(ids) - SHOWN} more" if len(ids) > SHOWN else ""
    return f"{'task' if len(ids) == 1 else 'tasks'} {', '.join(ids[:SHOWN])}{more}"


class Late(Exception):
    """A reward came back after its budget."""


class NoScores(Exception):
    """A batch, or a job of the reward's process, gave no scores; the message is the reason."""


def alone_words(count: int, reason: str) -> str:
    """Say that a batch of so many outcomes gave no scores, and what becomes of them."""
    return f"no scores for {amount(count, 'outcome')} at once, and each is judged alone: {reason}"


def scores_of(outcome: Outcome, count: int) -> list[Score]:
    """Read the scores that the reward's process sent; nothing in them is trusted.

    Args:
        outcome: Of the process's job.
        count: How many scores it must have.

    Raises:
        NoScores: There are none.
    """
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
        self._reward = reward if plan is None else None  # its process has one: no model is twice in memory
        self._budget_s, self._threads = budget_s, threads
        self._own = bool(getattr(reward, "takes_own_reward", False))
        self._batches = getattr(reward, "score_many", None) is not None
        self._sees_trace = sees_trace
        self._folder = current_folder()

    def __call__(self, rollouts: Sequence[tuple[Task, Outcome, Trace]]) -> list[Score]:
        """Score a batch; returns a score for each item, in their order.

        Raises:
            AgentrigError: The reward cannot be built in its process.
            PluginError: In threads, the reward replaced functions of Python that this process uses.
        """
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
        with left_alone("the reward", CURE, folder=self._folder):
            if self._batches:
                return self._batch(items)
            reward: Any = self._reward
            return self._each(items, partial(score_one, reward))

    def _in_process(self, items: Sequence[tuple[Any, ...]], plan: RewardPlan) -> list[Score]:
        with self._lock:
            pool = self._pool = self._pool or RewardPool(plan, threads=self._threads)
            try:
                return pool.judge(items, together=self._batches, closed=self._closed)
            except BaseException:  # its jobs are of no use to a later call
                self._pool = None
                pool.close()
                raise

    def close(self) -> None:
        """End the reward's process, if there is one, also while it judges."""
        self._closed.set()
        with self._lock:
            if self._pool is not None:
                self._pool.close()
                self._pool = None

    def _each(self, items: Sequence[tuple[Any, ...]], judge: Callable[[tuple[Any, ...], float], Score]) -> list[Score]:
        """Judge in threads, one outcome in each at a time."""
        scores: list[Score | None] = [None] * len(items)
        started: dict[int, tuple[float, threading.Thread]] = {}
        todo: queue.SimpleQueue[int] = queue.SimpleQueue()
        for i in range(len(items)):
            todo.put(i)
        limit, ending = self._budget_s + GRACE_S, threading.Lock()

        def work() -> None:
            while True:
                try:
                    i = todo.get_nowait()
                except queue.Empty:
                    return
                started[i] = monotonic(), threading.current_thread()
                try:
                    score = judge(items[i], self._budget_s)
                except Late:
                    score = late(self._budget_s)
                with ending:
                    if scores[i] is not None:
                        return  # too late, and this thread may be interrupted
                    scores[i] = score

        workers = [self._thread(work) for _ in range(min(self._threads, len(items)))]
        while any(s is None for s in scores):
            for worker in workers:
                worker.join(0.01)
            for i, (start, worker) in list(started.items()):
                with ending:
                    if scores[i] is None and monotonic() - start > limit:
                        scores[i] = late(self._budget_s)
                        _interrupt(worker)
                        workers.append(self._thread(work))  # goes on without it
        return [s for s in scores if s is not None]

    def _batch(self, items: Sequence[tuple[Any, ...]]) -> list[Score]:
        """Judge in a thread, by one call of `score_many`; if it gives no scores, each outcome by a call of its own."""
        reward: Any = self._reward

        def alone(item: tuple[Any, ...], budget_s: float) -> Score:
            return score_many(reward.score_many, [item], budget_s)[0]

        if len(items) > 1:
            try:
                return self._at_once(items)
            except NoScores as error:
                self.batch_fault = str(error)
                log.debug("%s", alone_words(len(items), self.batch_fault))
        return self._each(items, alone)

    def _at_once(self, items: Sequence[tuple[Any, ...]]) -> list[Score]:
        """Judge by one call of `score_many` in a thread.

        Raises:
            NoScores: It gave none, or took too long.
        """
        found: list[Score] = []
        faults: list[Exception] = []
        reward: Any = self._reward

        def work() -> None:
            try:
                found.extend(score_many(reward.score_many, items, self._budget_s))
            except (NoScores, Late) as error:
                faults.append(error)

        worker = self._thread(work)
        worker.join(self._budget_s * len(items) + GRACE_S)
        if worker.is_alive():
            _interrupt(worker)
            faults.append(Late(late_words(self._budget_s)))
        if faults:
            raise NoScores(str(faults[0]))
        return found

    @staticmethod
    def _thread(work: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=work, name="reward", daemon=True)
        thread.start()
        return thread


def _interrupt(worker: threading.Thread) -> None:
    """End a thread that does not end by itself, if it runs Python."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(worker.ident or 0), ctypes.py_object(SystemExit))


def late_words(budget_s: float) -> str:
    """Return the reason of `late`."""
    return f"the reward ran past its budget of {budget_s:g} s"


def late(budget_s: float) -> Score:
    """Return the score of an outcome whose judging took too long, whether or not a value came back."""
    return Score.invalid(late_words(budget_s))


def score_one(reward: Reward, item: tuple[Any, ...], budget_s: float) -> Score:
    """Judge one outcome; whatever the reward raises or returns is a score.

    Raises:
        Late: It came back after its budget.
    """
    try:
        task, outcome, *trace = _copied(item)
        return _sound(_called(reward, task, outcome, budget_s, *trace, budget_s=budget_s))
    except Late:
        raise
    except BaseException as error:
        place = item[0].place or "made by the task set"
        return _raised(error, answer=item[1].answer, place=place, input=item[0].input, private=item[0].private)


def score_many(many: Callable[..., Any], items: Sequence[tuple[Any, ...]], budget_s: float) -> list[Score]:
    """Judge a batch by a reward's `score_many`. An item for which it gives something else than a score is `invalid`.

    Raises:
        NoScores: It raised, or did not give one result for each of several items. That of a single one is `invalid`.
        Late: It came back after its budget, `budget_s` for each item.
    """

    def called(given: Sequence[tuple[Any, ...]], budget_s: float) -> Any:
        found = many(given, budget_s)
        if isinstance(found, Mapping | str) or not isinstance(found, Iterable):
            return found
        return list(islice(found, len(items) + 1))  # a generator may have no end

    fault: Score | None = None
    try:
        results = _called(called, [_copied(item) for item in items], budget_s, budget_s=budget_s, items=len(items))
        if not isinstance(results, list):
            fault = _no_score(results, "a list of them from score_many, one for each item")
        elif len(results) != len(items):
            count = f"{len(results)}" if len(results) < len(items) else f"more than {len(items)}"
            fault = Score.invalid(f"score_many gave {count} results for {amount(len(items), 'item')}")
    except Late:
        raise
    except BaseException as error:  # sys.exit too: it would end this thread without a score
        fault = _raised(error)
    if fault is None:
        return [_checked(each) for each in results]
    if len(items) > 1:
        raise NoScores(fault.details["reason"])
    return [fault]


def _checked(score: Any) -> Score:
    """Return a plain score of the same fields, or why it is none."""
    try:
        return _sound(score)
    except BaseException as error:
        return _raised(error)


def _no_score(found: Any, cure: str = "for example Score.ok(0.5)") -> Score:
    """Return the score of a reward that has returned something else."""
    cure = "write def, not async def" if inspect.iscoroutine(found) else cure
    return Score.invalid(f"the reward returned {type(found).__name__}; it must return an agentrig.Score, {cure}")


def _called(reward: Callable[..., Any], *given: Any, budget_s: float, items: int = 1) -> Any:
    """Return what a reward returns. A coroutine, which nobody awaits, is closed: Python would warn of it.

    Only this call counts toward the budget: the copies that it gets, and the check of what it returns, do not.

    Raises:
        Late: It took more than its budget and the grace.
    """
    begun = monotonic()
    try:
        with forks_ended("the reward"):
            made = reward(*given)
    finally:
        took = monotonic() - begun
        restored("the reward")  # at once: other threads of this process need it
    if took > budget_s * items + GRACE_S:
        raise Late(late_words(budget_s))
    if inspect.iscoroutine(made):
        made.close()
    return made


def _of_calls(score: Score, trace: Trace | None = None) -> Score:
    """Return the score, `invalid` if it has values for other calls than those of the rollout."""
    if not score.calls or trace is None or len(score.calls) == (recorded := len(trace.llm_calls())):
        return score
    return Score.invalid(
        f"the reward gave {len(score.calls)} values of calls, and the rollout has {recorded} recorded calls: "
        "Score.calls needs one value or None for each of trace.llm_calls()"
    )


def _sound(score: Any) -> Score:
    """Return a plain score of the same fields, each read once and checked: nothing else reads what a reward returned.

    Its fields may have been changed since it was made, or change whenever they are read. Its names and details become
    JSON values, and its numbers plain ones, so that it counts the same in this process and in another one.

    Raises:
        ValueError: A field has a value that no score has.
    """
    if not isinstance(score, Score):
        return _no_score(score)
    found = Score(**{field.name: getattr(score, field.name) for field in attrs.fields(Score)})
    try:
        text = json_text(plain_values(found.details, room=Room(DETAILS_LIMIT)))
        if len(text) > DETAILS_LIMIT:
            raise TooLong
    except TooLong:
        return Score.invalid(f"the details of its score are longer than the {DETAILS_LIMIT} characters of JSON allowed")
    return attrs.evolve(
        found,
        value=None if found.value is None else float(found.value),
        components={str(name): float(part) for name, part in found.components.items()},
        calls=[None if call is None else float(call) for call in found.calls],
        details=json.loads(text),
    )


def _copied(item: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return copies for a reward: what it changes must not change the record, or other rollouts of the task."""
    task, outcome, *traces = item

    def spans(trace: Trace) -> tuple[Span, ...]:
        return tuple(attrs.evolve(s, attributes=copied(s.attributes), otel=copied(s.otel)) for s in trace.spans)

    return (
        attrs.evolve(task, input=copied(task.input), private=copied(task.private), row=copied(task.row)),
        attrs.evolve(outcome, answer=copied(outcome.answer)),
        *(attrs.evolve(trace, spans=spans(trace)) for trace in traces),
    )


def _raised(error: BaseException, **task: Any) -> Score:
    return Score.invalid(f"the reward raised {words_of(error)}{place_of(error)}{field_hint(error, **task)}")
