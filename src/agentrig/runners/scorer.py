"""The scorer: runs a reward on batches, and handles rewards that raise or hang."""

from __future__ import annotations

import ctypes
import inspect
import json
import logging
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from time import monotonic  # a reward may replace that of the module
from typing import Any

import attrs

from agentrig.agents import Agent, Outcome
from agentrig.correctness import Correctness
from agentrig.endpoints import Endpoint
from agentrig.errors import AgentrigError, place_of
from agentrig.pools import Job
from agentrig.processes.ends import forks_ended
from agentrig.processes.held import Watch
from agentrig.processes.put_back import current_folder, restored
from agentrig.processes.replaced import left_alone
from agentrig.rewards import Reward, Score
from agentrig.runners.jobs import AgentPlan
from agentrig.runners.pools import Worker
from agentrig.runners.processes import Pool
from agentrig.tasks import Task, field_hint
from agentrig.text import amount, copied, json_text, plain_values, storable, words_of
from agentrig.traces import Span, Trace

log = logging.getLogger(__name__)

NOWHERE = Endpoint(base_url="http://127.0.0.1:9/v1", model="none")
"""A reward's job has no model."""

GRACE_S = 1.0
"""Seconds by which a reward may exceed its budget before its score is `invalid`."""

SHOWN = 8
"""So many tasks are named in the message of a killed command."""

HELD_S = 30.0
"""Seconds more in which native code may hold the interpreter; then the command is killed."""

REWARD_CURE = "Write run.reward_process=true: then the reward judges in processes of its own, and harms no other"
"""What to do about a reward that changes the process that it judges in."""

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
        """Judge one outcome; return the score's fields as JSON."""
        many, begun = getattr(self._reward, "score_many", None), monotonic()
        with left_alone("the reward", REWARD_CURE, tell=log.debug):  # this process is its own: only the score matters
            if many is not None:
                (score,) = score_many(many, [job.input], self._budget_s)
            else:
                score = score_one(self._reward, job.input, self._budget_s)
        if monotonic() - begun > self._budget_s + GRACE_S:  # it came back before this process was killed
            score = late(self._budget_s)
        return json_text(attrs.asdict(score, recurse=False))


@attrs.frozen(kw_only=True)
class RewardPlan(AgentPlan):
    """How a process builds the run's reward; each of its jobs has a task, an outcome and, if it sees it, a trace.

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
    """Processes that judge; what is said of one that ends or takes too long are words of a reward."""

    builds = "reward"
    runs = ("process", "processes")
    cure = "start again with run.reward_process=false"

    def _process(self) -> str:
        return "the reward's process"

    def _title(self, pid: int) -> str:
        return f"{self._process()} {pid}"

    def _late_words(self, worker: Worker, jobs: Sequence[Job]) -> str:
        assert isinstance(self._plan, RewardPlan)
        return (
            f"{self._process()} is killed: task {_tasks(jobs)} ran past the budget of {self._plan.budget_s:g} s "
            "(run.reward_budget_s)"
        )

    def _died_words(self, worker: Worker, code: str, failed: int) -> str:
        judged = [job for job, _ in worker.jobs.values()]
        return f"{worker.title} died {code}{f', while it judged task {_tasks(judged)}' if judged else ''}"


def _tasks(jobs: Sequence[Job]) -> str:
    return ", ".join(str(storable(job.input[0].id)) for job in jobs)


class Scorer:
    """Runs a reward on batches in threads, or in processes, and handles a reward that raises or hangs.

    A thread that does not end is interrupted, which ends a loop in Python, and is left alone. Native code goes on. So
    once that has happened, the reward judges in processes if `plan` says how to build it. Native code that does not
    release the interpreter, such as a regular expression, stops this whole process: another one then kills it. If it
    ends before that, the outcomes that were judged meanwhile are judged again in processes: one of them held it.

    Args:
        reward: What `RewardSpec.build` returned.
        budget_s: Seconds for one outcome.
        threads: How many outcomes are scored at once; they don't help a reward that holds the GIL.
        correctness: What counts as correct; returned scores have `correct` set.
        sees_trace: Whether the reward is called with the rollout's trace too.
        plan: How a process builds the reward; None if it stays in threads.
        process: Whether it judges in processes from the start.

    Attributes:
        in_processes: Whether it judges in processes now.
        record: The run's `error.json`, for a reward that ends the run's process; None outside of a run.
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
        process: bool = False,
    ) -> None:
        self._plan, self.in_processes = plan, process and plan is not None
        self._pool: RewardPool | None = None
        self._watch: Watch | None = None
        self.record: Path | None = None
        self._lock = threading.Lock()
        self.correctness = correctness or Correctness()
        self._reward, self._budget_s, self._threads = reward, budget_s, threads
        self._own = bool(getattr(reward, "takes_own_reward", False))
        self._many: Callable[[Sequence[tuple[Any, ...]], float], Sequence[Score]] | None = getattr(
            reward, "score_many", None
        )
        self._sees_trace = sees_trace
        self._folder = current_folder()

    def __call__(self, rollouts: Sequence[tuple[Task, Outcome, Trace]]) -> list[Score]:
        """Score a batch; returns a score for each item, in their order.

        Raises:
            PluginError: The reward replaced functions of Python that this process uses, or closed its files.
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
        if self.in_processes:
            return self._elsewhere(items)
        with left_alone(f"the reward{self._name()}", REWARD_CURE, folder=self._folder):
            try:
                return self._batch(items) if self._many is not None else self._each(items)
            finally:
                self._beat(None)

    def _name(self) -> str:
        return f" {self._plan.name}" if self._plan is not None else ""

    def _each(self, items: Sequence[tuple[Any, ...]]) -> list[Score]:
        scores: list[Score | None] = [None] * len(items)
        started: dict[int, tuple[float, threading.Thread]] = {}
        todo: queue.SimpleQueue[int] = queue.SimpleQueue()
        for i in range(len(items)):
            todo.put(i)
        ending = threading.Lock()

        def work() -> None:
            while not self.in_processes:
                try:
                    i = todo.get_nowait()
                except queue.Empty:
                    return
                started[i] = monotonic(), threading.current_thread()
                self._tell([items[k][0].id for k in list(started) if scores[k] is None])
                score = score_one(self._reward, items[i], self._budget_s)
                with ending:
                    if scores[i] is not None or i not in started:
                        return  # too late, and this thread may be interrupted
                    if monotonic() - started[i][0] > limit:
                        give_up(i)
                    else:
                        scores[i] = score

        def give_up(i: int) -> None:
            """Let a process judge what came back too late, or was judged while the interpreter was held."""
            if self._plan is None:
                scores[i] = late(self._budget_s)
            else:
                del started[i]
            self._distrust()

        limit = self._budget_s + GRACE_S
        self._beat(limit)
        now = monotonic()
        workers = [self._thread(work) for _ in range(min(self._threads, len(items)))]
        while any(s is None for s in scores):
            self._beat(limit)
            for worker in workers:
                worker.join(0.01)
            before, now = now, monotonic()
            for i, (start, worker) in list(started.items()):
                with ending:
                    if i in started and scores[i] is None and now - start > limit:
                        if now - before > GRACE_S:  # this thread stood still too: it need not be this outcome
                            give_up(i)
                        else:
                            scores[i] = late(self._budget_s)
                        self._abandon(worker)
                        workers.append(self._thread(work))  # goes on without it
            if self.in_processes and not any(scores[i] is None for i in list(started)):
                left = [i for i, score in enumerate(scores) if score is None]
                for i, score in zip(left, self._elsewhere([items[i] for i in left]), strict=True):
                    scores[i] = score
        return [s for s in scores if s is not None]

    def _abandon(self, worker: threading.Thread) -> None:
        """Interrupt a thread that does not end, and trust no other one."""
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(worker.ident or 0), ctypes.py_object(SystemExit))
        self._distrust()

    def _distrust(self) -> None:
        """Judge in processes from now on, if the reward can be built there."""
        if self._plan is not None and not self.in_processes:
            self.in_processes = True
            log.warning(
                "the reward %s did not end within its budget of %g s: it judges in processes from now on, which can be "
                "ended (run.reward_process)",
                self._plan.name,
                self._budget_s,
            )

    def _beat(self, limit_s: float | None) -> None:
        """Tell the watching process that this one runs, and that the reward may hold the interpreter that long."""
        if self._plan is None or (self._watch is None and limit_s is None):
            return
        if self._watch is None:
            self._watch = Watch(
                f"this command is killed: the reward {self._plan.name} ran past its budget of "
                f"{self._budget_s:g} s (tasks that it judged then: {{during}}) and does not release Python's "
                "interpreter, as a regular expression or other native code that never ends. Start it again with "
                "run.reward_process=true: then only such a score is invalid",
                f"this command has ended without a word of its own while the reward {self._plan.name} judged (tasks: "
                "{during}): native code in it crashed or called exit, or a SIGKILL came from outside.\n  If it was the "
                f"reward: {REWARD_CURE}",
                self.record,
            )
        self._watch.beat(None if limit_s is None else limit_s + HELD_S)

    def _tell(self, tasks: Sequence[str]) -> None:
        """Tell the watching process what is judged now."""
        if self._watch is not None:
            self._watch.during([str(storable(task)) for task in tasks[:SHOWN]])

    def _elsewhere(self, items: Sequence[tuple[Any, ...]]) -> list[Score]:
        """Judge in processes; one that does not end is killed and replaced."""
        assert self._plan is not None
        self._beat(None)
        with self._lock:
            if self._pool is None:
                limit = self._budget_s + GRACE_S
                self._pool = RewardPool(self._plan, n=self._threads, threads=1, deadline_s=limit, retries=0)
            for i, item in enumerate(items):
                self._pool.submit(Job(id=str(i), input=item, endpoint=NOWHERE))
            found: dict[int, Score] = {}
            try:
                while len(found) < len(items):
                    found.update({int(r.id): self._score_of(r.outcome) for r in self._pool.poll(1.0)})
            except AgentrigError as error:
                self._pool.close()
                self._pool = None
                return [found.get(i, Score.invalid(f"no process can judge: {error}")) for i in range(len(items))]
        return [found[i] for i in range(len(items))]

    def _score_of(self, outcome: Outcome) -> Score:
        if outcome.failure == "deadline":
            return late(self._budget_s)
        if outcome.failure is not None:
            kind = "" if outcome.failure == "runner-died" else f" ({outcome.failure})"  # no runner of the agent did
            return Score.invalid(f"the reward gave no score{kind}: {outcome.message}")
        try:
            return Score(**json.loads(outcome.answer))
        except (TypeError, ValueError) as error:
            return _raised(error)

    def replace(self, other: Scorer) -> None:
        """Close another scorer of the same reward and budget; the process that watches this command goes on."""
        self._watch, other._watch, self.record = other._watch, None, other.record
        other.close()

    def close(self) -> None:
        """End the processes, if there are any."""
        with self._lock:
            if self._watch is not None:
                self._watch.close()
                self._watch = None
            if self._pool is not None:
                self._pool.close()
                self._pool = None

    def _batch(self, items: Sequence[tuple[Any, ...]]) -> list[Score]:
        found: list[Score] = []

        def work() -> None:
            assert self._many is not None
            found.extend(score_many(self._many, items, self._budget_s))

        limit = self._budget_s * len(items) + GRACE_S
        self._beat(limit)
        self._tell([item[0].id for item in items])
        begun, worker = monotonic(), self._thread(work)
        worker.join(limit)
        stuck = worker.is_alive()
        if stuck:
            self._abandon(worker)
        if stuck or monotonic() - begun > limit:
            self._distrust()
            outcomes = amount(len(items), "outcome")
            reason = f"the reward ran past its budget of {self._budget_s:g} s for each of {outcomes}"
            return [Score.invalid(reason)] * len(items)
        return found

    @staticmethod
    def _thread(work: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=work, name="reward", daemon=True)
        thread.start()
        return thread


def late(budget_s: float) -> Score:
    """Return the score of an outcome whose judging took too long, whether or not a value came back."""
    return Score.invalid(f"the reward ran past its budget of {budget_s:g} s")


def score_one(reward: Reward, item: tuple[Any, ...], budget_s: float) -> Score:
    """Judge one outcome; whatever the reward raises or returns is a score."""
    try:
        task, outcome, *trace = _copied(item)
        return _sound(_called(reward, task, outcome, budget_s, *trace))
    except BaseException as error:
        place = item[0].place or "made by the task set"
        return _raised(error, answer=item[1].answer, place=place, input=item[0].input, private=item[0].private)


def score_many(many: Callable[..., Any], items: Sequence[tuple[Any, ...]], budget_s: float) -> list[Score]:
    """Judge a batch by a reward's `score_many`; whatever it raises or returns is a score for each item."""
    try:
        scores = _called(many, [_copied(item) for item in items], budget_s)
        if isinstance(scores, Mapping | str) or not isinstance(scores, Iterable):
            return [_no_score(scores, "a list of them from score_many, one for each item")] * len(items)
        scores = list(scores)
        if len(scores) != len(items):
            raise ValueError(f"score_many gave {len(scores)} results for {len(items)} items")
        return [_sound(score) for score in scores]
    except BaseException as error:  # sys.exit too: it would end this thread without a score
        return [_raised(error)] * len(items)


def _no_score(found: Any, cure: str = "for example Score.ok(0.5)") -> Score:
    """Return the score of a reward that has returned something else."""
    cure = "write def, not async def" if inspect.iscoroutine(found) else cure
    return Score.invalid(f"the reward returned {type(found).__name__}; it must return an agentrig.Score, {cure}")


def _called(reward: Callable[..., Any], *given: Any) -> Any:
    """Return what a reward returns. A coroutine, which nobody awaits, is closed: Python would warn of it."""
    try:
        with forks_ended("the reward"):
            made = reward(*given)
    finally:
        restored("the reward")  # at once: other threads of this process need it
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
    text = json_text(plain_values(found.details))
    if len(text) > DETAILS_LIMIT:
        said = f"the details of its score have {len(text)} characters of JSON, {DETAILS_LIMIT} are allowed"
        return Score.invalid(said)
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
