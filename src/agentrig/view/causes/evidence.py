"""The evidence that the rules look at: a run's metrics, and counts from its files of rollouts.

Each file is read once; the run's `Seen` keeps the counts, so that a run that goes on can be asked again and again.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import attrs

from agentrig.correctness import CORRECT_TOLD, NO_RULE, as_much
from agentrig.figures import SIGNIFICANT, flip_interval, flip_test, number, points
from agentrig.rollouts import mode_name
from agentrig.run.guards import FORM_ONLY, NO_SIGNAL, OVERLONG
from agentrig.run.verdict import by_class, never_right
from agentrig.text import alike, amount, json_text
from agentrig.traces import LLM_CALL, RUNNER, items, message_digest
from agentrig.view import figures
from agentrig.view.reading import (
    SLICES,
    RolloutFile,
    RunData,
    decoded,
    dig,
    is_correct,
    mapping,
    rollout_rows,
    spans_of,
    warnings_of,
)

COLUMNS = (
    "id", "task_id", "group", "failure", "message", "details", "value", "correct", "calls", "truncated", "triplets",
    "answer", "own_reward", "replies", "status", SLICES,
)  # fmt: skip

RESCORED, RESCORED_N = 0.1, 2
"""The share of equal answers, and the least number, that get two scores of a reward which is not to be believed."""

REANSWERED, REANSWERED_N = 0.5, 3
"""The share of tasks with equal requests and replies, and the least number, that an agent which changed scores anew."""

APART = 0.1
"""How far scores of one answer must differ, relative to the reward's range, to be two: a judge, or a clock, varies."""


FailureReason = tuple[str, str]
"""The kind of a failure, and its message without what differs between rollouts."""


@attrs.frozen(kw_only=True)
class StepFacts:
    """Counts of a step's training rollouts.

    Attributes:
        failures: How many failed, by kind.
        reasons_of_failures: How many failed for each reason: its kind, and its message as `alike` has it.
        examples: A message of each of these reasons.
        overlong: Of the failed ones, those whose message says that a prompt was longer than the model's context.
        right: Of these, the correct ones.
        silent: Scored ones without a call to the model.
        untrained: Scored ones with calls, but without a trained one.
        unanswered: Scored ones without an answer, if none of these is correct and all got one reward.
        cut: Scored ones with an answer that was cut at the token limit.
        cut_reward: The sum of their rewards.
        cut_right: How many of them are correct.
        reward: The sum of all rewards.
        squares: The sum of the squares of all rewards.
        right_most: The highest reward of a correct one; None if none is correct.
        wrong_most: The highest reward of one that is not correct; None if all are correct.
        overpaid: How many that are not correct have no lower reward than `right_most`, or without it, `wrong_most`.
        overpaid_example: The answer of one of them, and its task.
        groups: Groups of at least two scored rollouts.
        same: Of these, those with a single reward.
        same_right: Those with a single reward, all correct.
        same_wrong: Those with a single reward, none correct.
        same_answer: Those with a single answer.
        only_answer: The answer (JSON) of all scored ones, if it is the same in all and not None; else empty.
        unlike_replies: Groups with different replies of the model.
        one_reply: Of these, those whose only answer is a whole line, or several, of the replies in one rollout, and no
            part of those in another.
        same_replies: Pairs of scored rollouts of a task with the same replies of the model, and an answer.
        unlike_answers: Of these, those with different answers.
        unlike_scores: Of these, those with different scores.
        unlike_example: The answers of such a pair, and their task.
        late: Scored ones whose answer ran past its time, by the reward's own word.
        late_reward: The sum of their rewards.
        late_reasons: What the reward says of these: how often.
        judged_only: Groups whose agent returned rewards without answers, so that nobody knows how alike these were.
        stuck: The task of each group of `same_wrong`.
        alive: Tasks with a correct rollout, or unlike rewards in a group.
        tried: Tasks with a scored rollout.
        classes: Of each class of each slice of the tasks: how many scored ones are correct, and how many there are.
        reasons: What the reward says of scored ones that are not correct, without names and numbers: how often.
        group_means: The mean reward of each group, also of one rollout.
        group_slices: The slices of each of these groups' tasks.
        repeated: Answers that several scored rollouts of a group gave.
        contradicted: Of these, those that are right and wrong where the model's replies are the same, too.
    """

    step: int
    rollouts: int = 0
    failures: Mapping[str, int] = attrs.field(factory=dict)
    reasons_of_failures: Mapping[FailureReason, int] = attrs.field(factory=dict)
    examples: Mapping[FailureReason, str] = attrs.field(factory=dict)
    overlong: int = 0
    scored: int = 0
    right: int = 0
    silent: int = 0
    untrained: int = 0
    unanswered: int = 0
    cut: int = 0
    cut_reward: float = 0.0
    cut_right: int = 0
    reward: float = 0.0
    squares: float = 0.0
    right_most: float | None = None
    wrong_most: float | None = None
    overpaid: int = 0
    overpaid_example: str = ""
    groups: int = 0
    same: int = 0
    same_right: int = 0
    same_wrong: int = 0
    same_answer: int = 0
    only_answer: str = ""
    unlike_replies: int = 0
    one_reply: int = 0
    same_replies: int = 0
    unlike_answers: int = 0
    unlike_scores: int = 0
    unlike_example: str = ""
    late: int = 0
    late_reward: float = 0.0
    late_reasons: Mapping[str, int] = attrs.field(factory=dict)
    judged_only: int = 0
    stuck: Sequence[str] = ()
    alive: Collection[str] = ()
    tried: Collection[str] = ()
    solved: Collection[str] = ()
    classes: Mapping[tuple[str, str], Sequence[int]] = attrs.field(factory=dict)
    reasons: Mapping[str, int] = attrs.field(factory=dict)
    group_means: Sequence[float] = ()
    group_slices: Sequence[Mapping[str, str]] = ()
    repeated: int = 0
    contradicted: int = 0


Measured = Mapping[str, tuple[str, bool, str, float]]
"""A measurement: task to the id of its rollout, whether it is correct, the answer and the reward; scored ones only."""


def reason_of(details: Any) -> str:
    """Return what a reason in a score's details (JSON) has in common with others, without a last name; or ''."""
    told = _reason(details)
    kind, _, name = told.rpartition(": ")
    return alike(kind if ": " in kind and " " not in name else told)[:120]


def _reason(details: Any) -> str:
    try:
        return str(mapping(json.loads(details or "{}")).get("reason") or "")
    except (ValueError, RecursionError):
        return ""


def _judged_only(row: Mapping[str, Any]) -> bool:
    """Whether the agent returned a reward and no answer, as agents of Agent Lightning do."""
    return row["answer"] == "null" and row["own_reward"] is not None


def _one_reply(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether all rollouts of a group have the reply of one of them as their answer, also one that holds no such text.

    Where replies differ and mean the same, most of them hold the answer, or none is the answer word for word.
    """
    answers = {str(row["answer"]) for row in rows}
    answer = decoded({"answer": answers.pop()})["answer"] if len(answers) == 1 else None
    if not isinstance(answer, str) or not answer.strip():
        return False
    text = _lines(answer)
    replies = [_lines(str(row["replies"] or "")) for row in rows]
    return any(text in reply for reply in replies) and any(
        reply.strip() and text.strip() not in reply for reply in replies
    )


def _lines(text: str) -> str:
    """Return a text in lower case, each line without space around it and with a line break on both sides."""
    return "".join(f"\n{line.strip()}" for line in text.strip().casefold().splitlines()) + "\n"


def facts_of(file: RolloutFile) -> StepFacts:
    """Return the counts of a file of training rollouts."""
    failures: Counter[str] = Counter()
    reasons: Counter[FailureReason] = Counter()
    examples: dict[FailureReason, str] = {}
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    rollouts = overlong = 0
    for row in rollout_rows([file], COLUMNS, decode=False, optional=("replies", "status")):
        rollouts += 1
        if row["failure"]:
            kind = str(row["failure"])
            text = str(row["message"] or row["details"] or "")
            failures[kind] += 1
            message = str(row["message"] or _reason(row["details"]) or text)
            reason = kind, alike(message)[:500]
            reasons[reason] += 1
            examples.setdefault(reason, message)
            overlong += bool(OVERLONG.search(text))
        elif number(row["value"]) is not None:
            groups[str(row["group"] if row["group"] is not None else row["task_id"])].append(row)
    scored = [row for rows in groups.values() for row in rows]
    cut = [row for row in scored if row["truncated"]]
    empty = [row for row in scored if row["answer"] == "null" and row["own_reward"] is None]
    judged_alike = len({row["value"] for row in empty}) == 1 and not any(map(is_correct, empty))
    several = [rows for rows in groups.values() if len(rows) > 1]
    same = [rows for rows in several if len({row["value"] for row in rows}) == 1]
    stuck = [rows for rows in same if not any(map(is_correct, rows))]
    answering = [rows for rows in several if not all(map(_judged_only, rows))]
    unlike = [rows for rows in several if len({row["value"] for row in rows}) > 1]
    answers = {str(row["answer"]) for row in scored}
    only = answers.pop() if len(answers) == 1 and "null" not in answers else ""
    given: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for name, rows in groups.items():
        for row in rows:
            if row["status"] == "ok":
                given[name, row["answer"], row["own_reward"]].append(row)
    repeated = [rows for rows in given.values() if len(rows) > 1]
    contradicted = [rows for rows in repeated if len({is_correct(row) for row in rows}) > 1]
    said: dict[tuple[str, str], list[tuple[str, float]]] = defaultdict(list)
    for row in scored:
        if row["replies"] and not _judged_only(row):
            said[str(row["task_id"]), str(row["replies"])].append((str(row["answer"]), float(row["value"])))
    replied = [(task, Counter(answer for answer, _ in some)) for (task, _), some in said.items()]
    late = [row for row in scored if row["status"] == "timeout"]
    values = [float(row["value"]) for row in scored]
    wrong = [row for row in scored if not is_correct(row)]
    right_most = max((float(row["value"]) for row in scored if is_correct(row)), default=None)
    wrong_most = max((float(row["value"]) for row in wrong), default=None)
    full = wrong_most if right_most is None else right_most
    overpaid = [row for row in wrong if full is not None and as_much(float(row["value"]), full)]
    return StepFacts(
        step=file.step,
        rollouts=rollouts,
        failures=dict(failures),
        reasons_of_failures=dict(reasons),
        examples=examples,
        overlong=overlong,
        scored=len(scored),
        right=sum(map(is_correct, scored)),
        silent=sum(row["calls"] == 0 for row in scored),
        untrained=sum(row["triplets"] == 0 and row["calls"] != 0 for row in scored),
        unanswered=len(empty) if judged_alike else 0,
        cut=len(cut),
        cut_reward=sum(float(row["value"]) for row in cut),
        cut_right=sum(map(is_correct, cut)),
        reward=sum(values),
        squares=sum(v * v for v in values),
        right_most=right_most,
        wrong_most=wrong_most,
        overpaid=len(overpaid),
        overpaid_example=next((f"{row['answer']!s:.200} to task {row['task_id']}" for row in overpaid), ""),
        groups=len(several),
        same=len(same),
        same_right=sum(all(map(is_correct, rows)) for rows in same),
        same_wrong=len(stuck),
        stuck=[str(rows[0]["task_id"]) for rows in stuck],
        alive={str(row["task_id"]) for row in [*filter(is_correct, scored), *(rows[0] for rows in unlike)]},
        tried={str(row["task_id"]) for row in scored},
        solved={str(row["task_id"]) for row in scored if is_correct(row)},
        classes=by_class((_slices_of(row), is_correct(row)) for row in scored),
        reasons=Counter(told for row in wrong if (told := reason_of(row["details"]))),
        same_answer=sum(len({row["answer"] for row in rows}) == 1 for rows in answering),
        only_answer=only,
        unlike_replies=sum(len({row["replies"] for row in rows}) > 1 for rows in several),
        one_reply=sum(map(_one_reply, answering)),
        same_replies=sum(math.comb(len(some), 2) for some in said.values()),
        unlike_answers=sum(math.comb(len(some), 2) - _pairs(answer for answer, _ in some) for some in said.values()),
        unlike_scores=sum(
            math.comb(len(some), 2) - _pairs(a for a, _ in some) - _pairs(v for _, v in some) + _pairs(some)
            for some in said.values()
        ),
        unlike_example=next(
            (f"{a:.100} and {b:.100} to task {task}" for task, (a, b, *_) in (p for p in replied if len(p[1]) > 1)), ""
        ),
        late=len(late),
        late_reward=sum(float(row["value"]) for row in late),
        late_reasons=Counter(_reason(row["details"])[:200] for row in late),
        judged_only=len(several) - len(answering),
        group_means=[sum(float(row["value"]) for row in rows) / len(rows) for rows in groups.values()],
        group_slices=[_slices_of(rows[0]) for rows in groups.values()],
        repeated=len(repeated),
        contradicted=sum(
            len({(row["replies"], is_correct(row)) for row in rows}) > len({row["replies"] for row in rows})
            for rows in contradicted
        ),
    )


def _pairs(values: Iterable[Any]) -> int:
    """Return how many pairs of equal values there are."""
    return sum(math.comb(k, 2) for k in Counter(values).values())


def _slices_of(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the slices of a row's task; the slice `calls` is the rollout's."""
    slices = mapping(decoded({SLICES: row.get(SLICES)})[SLICES])
    return {name: str(part) for name, part in slices.items() if name != "calls"}


def measured_of(file: RolloutFile) -> Measured:
    """Return the measurement that a file of rollouts holds; an agent without answers said what the model replied."""
    columns = ("id", "task_id", "failure", "value", "correct", "answer", "own_reward")
    rows = list(rollout_rows([file], columns, decode=False))
    if any(map(_judged_only, rows)):
        replies = {row["id"]: row["replies"] for row in rollout_rows([file], ("id", "replies"), decode=False)}
        rows = [{**row, "answer": replies.get(row["id"])} if _judged_only(row) else row for row in rows]
    return {
        str(row["task_id"]): (str(row["id"]), is_correct(row), str(row["answer"]), float(row["value"]))
        for row in rows
        if not row["failure"] and number(row["value"]) is not None
    }


def task_slices(file: RolloutFile) -> dict[str, dict[str, str]]:
    """Return the slices of each task of a file of rollouts."""
    rows = rollout_rows([file], ("task_id", SLICES), decode=False, optional=(SLICES,))
    return {str(row["task_id"]): _slices_of(row) for row in rows}


def heard_of(file: RolloutFile) -> dict[str, tuple[str, float | None]]:
    """Return, of each scored rollout of a file, what the model replied in it and the agent's own reward, by id."""
    columns = ("status", "replies", "own_reward")
    rows = rollout_rows([file], ("id", *columns), decode=False, optional=columns)
    heard = [row for row in rows if row["status"] == "ok" and row["replies"] is not None]
    return {str(row["id"]): (str(row["replies"]), row["own_reward"]) for row in heard}


Tally = tuple[tuple[int, int], tuple[int, int]]
"""On each of two sides: how many of how many."""


@attrs.frozen
class Rescored:
    """Tasks of the same replies in two measurements, whose scores differ for another cause than the model.

    Attributes:
        same: How many have the same replies, and where the reward is that cause, the same answer.
        scores: Of these, those with another score, or another verdict.
        better: Of these, those that went from wrong to right.
        worse: Those that went from right to wrong.
        agent: Whether the agent is that cause: it gave another answer to the same requests and replies.
        one_process: Then, of the tasks that one process of a runner ran both times, and of the others: how many have
            another score, and how many there are.
        early: The same of those in the first half of what their process ran in the first measurement, and of others.
    """

    same: int = 0
    scores: int = 0
    better: int = 0
    worse: int = 0
    agent: bool = False
    one_process: Tally = ((0, 0), (0, 0))
    early: Tally = ((0, 0), (0, 0))


Requests = Mapping[str, tuple[str, Collection[str]]]
"""Of each rollout that was looked at: digests of the messages of its first call, and of all of its calls."""

LOOKED_AT = 100
"""So many rollouts of a measurement have their requests read, those of the first tasks."""


def requests_of(file: RolloutFile) -> Requests:
    """Return what the first rollouts of a file asked the model."""
    found: dict[str, tuple[str, Collection[str]]] = {}
    for row in _looked_at(file):
        digests = [digest for messages in asked(row) if (digest := message_digest(messages))]
        if digests:
            found[str(row["id"])] = digests[0], frozenset(digests)
    return found


def _looked_at(file: RolloutFile) -> Iterator[Mapping[str, Any]]:
    rows = sorted(rollout_rows([file], ("id", "task_id"), decode=False), key=lambda row: str(row["task_id"]))
    ids = {row["id"] for row in rows[:LOOKED_AT]}
    yield from rollout_rows([file], ("id", "spans"), ids=ids, optional=("spans",))


def runners_of(file: RolloutFile) -> dict[str, tuple[str, bool]]:
    """Return of the first rollouts of a file, by id, the process that ran it, and whether in the first half of its own.

    Those of other processes than runners, and of an earlier version, are left out.
    """
    order: dict[str, list[str]] = defaultdict(list)
    roots = [(str(row["id"]), spans[0]) for row in _looked_at(file) if (spans := spans_of(row["spans"]))]
    for id, root in sorted(roots, key=lambda found: found[1].start):
        if RUNNER in root.attributes:
            order[str(root.attributes[RUNNER])].append(id)
    return {id: (runner, 2 * n < len(ids)) for runner, ids in order.items() for n, id in enumerate(ids)}


def _tally(found: Iterable[tuple[bool, bool]]) -> Tally:
    """Count what is of the first side, and what of the other: how many are true, and how many there are."""
    n = Counter(found)
    return (n[True, True], n[True, True] + n[True, False]), (n[False, True], n[False, True] + n[False, False])


def asked(row: Mapping[str, Any]) -> list[Any]:
    """Return the messages of each answered call in a rollout's row."""
    calls = [span for span in spans_of(row["spans"]) if span.name == LLM_CALL and span.error is None]
    return [messages for call in calls if (messages := dig(call.attributes, "request", "messages"))]


@attrs.frozen(kw_only=True)
class MeanReward:
    """How the mean reward of the tasks that were measured at both ends moved: a paired test's p and 95% interval.

    Attributes:
        lower: How many tasks have a lower reward at the last measurement.
        higher: How many have a higher one.
    """

    tasks: int
    lower: int
    higher: int
    before: float
    after: float
    interval: tuple[float, float]
    p: float

    @property
    def sign(self) -> int:
        """1 if it rose significantly, -1 if it fell so, else 0."""
        return 0 if self.p > SIGNIFICANT else 1 if self.after > self.before else -1


@attrs.frozen(kw_only=True, slots=False)
class Evidence:
    """A run, and the counts of its rollouts.

    Attributes:
        run: Its files.
        steps: The counts of each step that has training rollouts; also of a step that the run ended in.
        ends: The first and the last measurement of the same split, held out if there are two, and their steps.
        where: The name of that split, and the two steps; empty without two measurements.
        unread: Whether one of the two measurements cannot be read, or its rollouts are gone.
    """

    run: RunData
    steps: Sequence[StepFacts]
    ends: tuple[Measured, Measured] | None
    where: str
    unread: bool = False

    @classmethod
    def of(cls, run: RunData) -> Evidence:
        """Read a run's rollouts; those that were read before are not read again."""
        return attrs.evolve(cls.of_ends(run), steps=[run.seen.of(file, facts_of) for file in run.of_mode("train")])

    @classmethod
    def of_ends(cls, run: RunData) -> Evidence:
        """Read only the first and the last measurement, which takes much less time: `steps` is empty."""
        held_out, files = run.of_mode("report"), run.measured()
        if len(held_out) < 2 and run.done and {"before", "after"} <= run.progress.keys():
            # a file is gone: the validation split gives no verdict instead
            return cls(run=run, steps=(), ends=None, where="", unread=True)
        if not files:
            return cls(run=run, steps=(), ends=None, where="")
        ends = run.seen.of(files[0], measured_of), run.seen.of(files[-1], measured_of)
        where = f"{mode_name(files[0].mode)} split, step {files[0].step} and step {files[-1].step}"
        unread = bool(files[0].damage or files[-1].damage)
        return cls(run=run, steps=(), ends=ends, where=where, unread=unread)

    def total(self, key: str) -> int:
        """Return the sum of a count over all steps."""
        return total(self.steps, key)

    def since(self, key: str) -> int | None:
        """Return the first step in which a count is not 0."""
        return next((facts.step for facts in self.steps if getattr(facts, key)), None)

    def setting(self, *keys: str) -> tuple[str, ...]:
        """Return those of these dotted keys that the run's configuration has; the first if it has none of them."""
        there = tuple(key for key in keys if self.value(key) is not None)
        return there or keys[:1]

    def value(self, key: str) -> Any:
        """Return a dotted key of the configuration, or None."""
        return dig(self.run.config, *key.split("."))

    @cached_property
    def never_right(self) -> set[str]:
        """The training tasks that were tried and had no correct rollout in any step."""
        tried = {task for facts in self.steps for task in facts.tried}
        return tried - {task for facts in self.steps for task in facts.solved}

    @cached_property
    def classes_never_right(self) -> str:
        """Which classes of the training tasks were right in no rollout of any step, and what to do; '' if none was."""
        return "" if self.demonstrated else never_right(tried_by_class(self.steps))

    @cached_property
    def classes(self) -> Mapping[tuple[str, str], tuple[Measured, Measured]]:
        """Of each class of each slice of the measured tasks: its part of both measurements; a single class is none."""
        if self.ends is None:
            return {}
        files, found = self.run.measured(), dict[tuple[str, str], tuple[dict[str, Any], dict[str, Any]]]()
        for i, (file, end) in enumerate(zip((files[0], files[-1]), self.ends, strict=True)):
            slices = self.run.seen.of(file, task_slices)
            for task, measured in end.items():
                for of in slices.get(task, {}).items():
                    found.setdefault(of, ({}, {}))[i][task] = measured
        several = Counter(name for name, _ in found)
        return {of: ends for of, ends in found.items() if several[of[0]] > 1}

    @property
    def none_right(self) -> bool:
        """Whether no training rollout was correct, by the reward's own word: one that names no threshold has none."""
        if self.total("right") or not self.total("scored"):
            return False
        told = bool(self.run.summary) and self.run.summary.get(CORRECT_TOLD) is not False
        return told or not any(facts.reward for facts in self.steps)

    @property
    def no_rule(self) -> str:
        """The run's warning that nothing says which of its rewards above 1 are correct; '' if it had none."""
        told = [*items(self.run.manifest.get("warnings")), *items(self.run.summary.get("warnings"))]
        ends = (reward for end in self.ends or () for *_, reward in end.values())
        above = any(reward > 1 for reward in ends) or any((facts.right_most or 0) > 1 for facts in self.steps)
        return next((text for text in map(str, told) if text.startswith(NO_RULE)), "") if above else ""

    @cached_property
    def form_only(self) -> str:
        """What the run said of an answer that is right but for its form; '' if it said nothing of that."""
        told = [str(self.run.error.get("message") or ""), *(warning["text"] for warning in warnings_of(self.run))]
        lines = [line.strip() for text in told for line in text.splitlines() if FORM_ONLY in line]
        return next((re.sub(r"^step \d+: ", "", line) for line in lines), "")

    @property
    def demonstrated(self) -> bool:
        """Whether the training rollouts are demonstrations: their rewards are not the model's."""
        return bool(self.value("algorithm.demonstrations"))

    @cached_property
    def silent(self) -> Sequence[StepFacts]:
        """The last steps, in which no group had unlike rewards, if these ended the run; else none."""
        found: list[StepFacts] = []
        if self.run.error.get("cause") == NO_SIGNAL:
            for facts in reversed(self.steps):
                if facts.same < facts.groups or (found and not facts.groups):
                    break
                found.insert(0, facts)
        return found

    @cached_property
    def changed(self) -> tuple[int, int, int, int]:
        """Of the tasks measured at both ends: how many got right, wrong, another answer; and how many there are."""
        return changed(*self.ends) if self.ends else (0, 0, 0, 0)

    @cached_property
    def rescored(self) -> Rescored | None:
        """The tasks of the same replies at both ends, if the reward or the agent changed many scores; else None."""
        first, last = self.ends or ({}, {})
        scores = [reward for end in (first, last) for *_, reward in end.values()]
        far = APART * (max(scores) - min(scores)) if scores else 0.0

        def apart(pairs: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
            return [(a, b) for a, b in pairs if a[1] != b[1] or abs(a[3] - b[3]) > far]

        both = [(first[task], last[task]) for task in first.keys() & last.keys()]
        if len(apart(both)) < RESCORED_N:
            return None  # the replies, which take time, need not be read
        files = self.run.measured()
        heard = self.run.seen.of(files[0], heard_of) | self.run.seen.of(files[-1], heard_of)
        both = [(a, b) for a, b in both if a[0] in heard and heard[a[0]] == heard.get(b[0])]
        pairs = [(a, b) for a, b in both if a[2] == b[2]]
        found, agent = apart(pairs), False
        if len(found) < max(RESCORED_N, RESCORED * len(pairs)):
            pairs, agent = both, True
            found = [(a, b) for a, b in apart(both) if a[2] != b[2]]
            if len(found) < max(REANSWERED_N, REANSWERED * len(both)):
                return None
            before, after = (self.run.seen.of(file, requests_of) for file in (files[0], files[-1]))
            pairs = [(a, b) for a, b in both if a[0] in before and before[a[0]] == after.get(b[0])]
            found = [pair for pair in found if pair in pairs]
            if len(found) < max(REANSWERED_N, REANSWERED * len(pairs)):
                return None
        better, worse = sum(b[1] > a[1] for a, b in found), sum(a[1] > b[1] for a, b in found)
        tallies = list[Tally]()
        if agent:
            ran = self.run.seen.of(files[0], runners_of) | self.run.seen.of(files[-1], runners_of)
            known = [(ran[a[0]], ran[b[0]], (a, b) in found) for a, b in pairs if a[0] in ran and b[0] in ran]
            tallies = [_tally((a[0] == b[0], new) for a, b, new in known), _tally((a[1], new) for a, _, new in known)]
        return Rescored(len(pairs), len(found), better, worse, agent, *tallies)

    @cached_property
    def learned(self) -> tuple[int, int]:
        """How many tasks got right, and wrong, without those that only the reward changed: see `rescored`.

        None did where the agent is another one: it may have changed the others, too.
        """
        better, worse, *_ = self.changed
        none = self.rescored or Rescored()
        return (0, 0) if none.agent else (better - none.better, worse - none.worse)

    @property
    def chance(self) -> str:
        """In words whether the split of the changed tasks may be chance, see `figures.chance`."""
        better, worse, *_ = self.changed
        if self.rescored and self.rescored.agent:
            n = self.rescored.better + self.rescored.worse
            return f"{n} of these {better + worse} have the same replies at both ends: not the model's doing"
        same = better + worse - sum(self.learned)
        of = f"{same} of these {better + worse} have the same answer at both ends; without them, " if same else ""
        return f"{of}{figures.chance(*self.learned)}"

    @cached_property
    def mean_reward(self) -> MeanReward | None:
        """How the mean reward moved between both ends; None where it says no more than right and wrong do."""
        first, last = self.ends or ({}, {})
        both = [(first[task], last[task]) for task in sorted(first.keys() & last.keys())]
        if len(both) < 2 or not says_more(end for pair in both for end in pair):
            return None
        before, after = (sum(end[3] for end in ends) / len(both) for ends in zip(*both, strict=True))
        differences = [end[3] - start[3] for start, end in both]
        p = flip_test(differences)
        interval = flip_interval(differences, p)
        lower, higher = sum(d < 0 for d in differences), sum(d > 0 for d in differences)
        return MeanReward(
            tasks=len(both), lower=lower, higher=higher, before=before, after=after, interval=interval, p=p
        )

    @cached_property
    def other_requests(self) -> tuple[int, int, str]:
        """How many tasks have another first request at the last measurement, of how many looked at; and an example."""
        first, last = self.ends or ({}, {})
        files = self.run.measured()
        if not files:
            return 0, 0, ""
        before, after = (self.run.seen.of(file, requests_of) for file in (files[0], files[-1]))
        ids = [(first[task][0], last[task][0], task) for task in sorted(first.keys() & last.keys())]
        looked = [(a, b, task) for a, b, task in ids if a in before and b in after]
        # calls that are made at once have no order: another one of them may be the first
        unlike = [
            pair for pair in looked
            if before[pair[0]][0] not in after[pair[1]][1] and after[pair[1]][0] not in before[pair[0]][1]
        ]  # fmt: skip
        example = ""
        for a, b, task in unlike[:1]:
            rows = [
                next(rollout_rows([file], ("id", "spans"), ids={id})) for file, id in ((files[0], a), (files[-1], b))
            ]
            example = f"task {task}, {_where_they_differ(*(json_text(asked(row)[0]) for row in rows))}"
        return len(unlike), len(looked), example

    @cached_property
    def gain(self) -> float | None:
        """The change of the held-out accuracy, see `gain_of`; None if both ends are not known."""
        return gain_of(*self.ends) if self.ends and self.where.startswith("held-out") else None

    @property
    def gain_text(self) -> str:
        """The gain in words: `-6.3 points, of 366 tasks measured at both ends`; '' if it is not known."""
        if self.gain is None or self.ends is None:
            return ""
        return f"{points(self.gain)} points{both_ends(self.changed[3], unpaired(*self.ends))}"


def _where_they_differ(before: str, after: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after)))
    shown = [f"{'… ' if at > 40 else ''}{text[max(0, at - 40) : at + 60]}" for text in (before, after)]
    return f"before: {shown[0]}, after: {shown[1]}"


def changed(first: Measured, last: Measured) -> tuple[int, int, int, int]:
    """Of the tasks in two measurements: how many got right, wrong, another answer; and how many there are."""
    both = [(first[task], last[task]) for task in first.keys() & last.keys()]
    better = sum(b[1] and not a[1] for a, b in both)
    worse = sum(a[1] and not b[1] for a, b in both)
    return better, worse, sum(a[2] != b[2] for a, b in both), len(both)


def says_more(measured: Iterable[tuple[str, bool, str, float]]) -> bool:
    """Whether the rewards of measured tasks say more than right and wrong do."""
    graded = {(right, reward) for _, right, _, reward in measured}
    return len(graded) > len({right for right, _ in graded})


def gain_of(first: Measured, last: Measured) -> float | None:
    """Return the change of the accuracy on the tasks in both measurements; None if there are none."""
    better, worse, _, n = changed(first, last)
    return (better - worse) / n if n else None


def unpaired(first: Measured, last: Measured) -> int:
    """Return how many tasks are in one measurement only: they count in its accuracy, and not in the gain."""
    return len(first.keys() ^ last.keys())


def both_ends(n: float, others: float) -> str:
    """Return on how many tasks a gain is, where `others` were measured at one end only; else ''."""
    return f", of {amount(round(n), 'task')} measured at both ends" if others else ""


def tried_by_class(steps: Iterable[StepFacts]) -> dict[tuple[str, str], tuple[int, int]]:
    """Return, of each class of each slice of the tasks of steps: its right rollouts, and its scored ones."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for facts in steps:
        for of, (right, n) in facts.classes.items():
            rights, every = found.get(of, (0, 0))
            found[of] = rights + right, every + n
    return found


def total(steps: Iterable[StepFacts], key: str) -> int:
    """Return the sum of a count over steps."""
    return sum(getattr(facts, key) for facts in steps)
