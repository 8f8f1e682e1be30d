"""Links `score` and `advantages`: from the recorded answers to what each call is trained with."""

from __future__ import annotations

import math
import random
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentrig.audit.record import Row
from agentrig.audit.step import Step
from agentrig.audit.verdicts import CannotLook, Verdict, fault, ok, some

SCORED_N = 16
"""So many answers of a step are scored again, however long it takes."""

ANSWER = 8
"""Characters of the shortest answer that is looked for in replies."""

CAUSES = "rewards that went to other rollouts, a reward that depends on more than task and answer"

EPSILON = 1e-6
"""What grpo adds to a group's deviation, as the docstring of `agentrig.credit.advantages` says."""


def score(step: Step) -> Iterator[Verdict]:
    """Score recorded answers again, with a fresh reward and the task as the task set, loaded again, has it.

    Rewards are equal or not: the contract of a reward is that equal answers get equal scores. One that gives two
    scores to one answer here can't be looked at, nor can an answer that can't be scored any more.
    """
    values, told = [r.value for r in step.rows if r.value is not None], step.line.get("reward")
    if values and step.line.get("rollouts") == len(step.rows) and isinstance(told, int | float):
        mean = math.fsum(values) / len(values)
        if not abs(told - mean) <= 1e-9 * max(1.0, abs(mean)):
            detail = f"metrics.jsonl has the reward {told}, and the mean of the step's {len(values)} rewards is {mean}"
            yield fault(detail, "a line of metrics.jsonl or a file of rollouts that was changed since")
    yield from _exchanged(step.rows)
    looked, wrong = scored_again(step, step.rows, "train")
    if wrong:
        yield fault(f"{len(wrong)} of {looked} scores are others: {some(wrong)}", CAUSES)
    elif looked:
        yield ok(f"{looked} of {len(step.rows)} scores")
    else:
        raise CannotLook("no rollout was scored")


def _exchanged(rows: Sequence[Row]) -> Iterator[Verdict]:
    """Check that answers are those of the rollouts whose calls are recorded with them.

    An agent may change what the model says. Where most answers are in the replies of their rollouts as they are, some
    of a group that are only in each other's were exchanged: an agent that changes texts gives none of them to another.
    """
    texts = {row.id: text for row in rows if len(text := _longest(row.answer)) >= ANSWER}
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row.id in texts:
            groups[row.group].append(row)
    own, wrong = 0, list[str]()
    for members in groups.values():
        said = {row.id: "\n".join(call.answered for call in row.calls) for row in members}
        lost = [row.id for row in members if texts[row.id] not in said[row.id]]
        own += len(members) - len(lost)
        here = [(a, b) for a in lost for b in lost if texts[a] in said[b]]
        if lost and {a for a, _ in here} == set(lost) == {b for _, b in here}:
            wrong += [f"rollouts {a} and {b}" for a, b in here]
    if own > len(texts) / 2 and wrong:
        detail = f"answers are only in the replies of another rollout of their group: {some(wrong)}"
        yield fault(detail, "answers, calls or whole rollouts that were mixed up")


def _longest(answer: Any) -> str:
    """Return the longest text in an answer; '' without one."""
    if isinstance(answer, str):
        return answer.strip()
    inside = answer.values() if isinstance(answer, Mapping) else answer if isinstance(answer, list) else ()
    return max(map(_longest, inside), key=len, default="")


def scored_again(step: Step, rows: Sequence[Row], role: str) -> tuple[int, list[str]]:
    """Return how many answers were scored again, and those whose score is another, or whether it is correct.

    Raises:
        CannotLook: The reward gives two scores to one answer.
    """
    known, sources = {task.id: task for task in step.sources.splits[role]}, step.sources
    rows = [r for r in rows if r.failure is None and r.status == "ok" and r.task_id in known]
    random.Random(step.number).shuffle(rows)
    end, wrong, looked = time.monotonic() + sources.seconds, [], 0
    for row in rows:
        if looked >= SCORED_N and time.monotonic() > end:
            break
        found = sources.score(known[row.task_id], row)
        if found.status != "ok":  # a limit of time, or something that was there when the answer was given
            continue
        looked += 1
        if (found.value, found.correct) != (row.value, row.correct):
            again = sources.score(known[row.task_id], row)
            if (again.status, again.value, again.correct) != (found.status, found.value, found.correct):
                raise CannotLook(f"the reward gives two scores to one answer: {found.value} and {again.value}")
            was, now = (f"{one.value}{' (correct)' if one.correct else ''}" for one in (row, found))
            wrong.append(f"rollout {row.id} of task {row.task_id} has {was}, and its answer scores {now}")
    return looked, wrong


def expected(step: Step) -> dict[str, float]:
    """Return the advantage of each scored rollout by its id: GRPO's (arXiv:2402.03300), as the settings say."""
    settings, found = step.settings, dict[str, float]()
    groups: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for row in step.record.table("rollouts", "train", step.number, "id", "task_id", "group", "value"):
        if row["value"] is not None:
            groups[row["task_id"], row["group"]].append(row)
    for rows in groups.values():
        values = [float(row["value"]) for row in rows]
        mean = math.fsum(values) / len(values)
        spread = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / max(len(values) - 1, 1))
        for row, value in zip(rows, values, strict=True):
            advantage = 0.0 if max(values) == min(values) else value - mean
            if settings.get("scale_rewards") and advantage:
                advantage /= spread + EPSILON
            found[row["id"]] = advantage * (settings.get("negative_scale", 1.0) if advantage < 0 else 1.0)
    return found


def by_call(step: Step) -> Mapping[tuple[str, str], float]:
    """Return the advantage of each call by rollout and span: by the formula, or as recorded where none is known."""
    if "advantages" not in step.record.formulas:
        return step.trained
    wanted = expected(step)
    return {key: wanted[key[0]] for key in {*step.calls, *step.trained} if key[0] in wanted}


def advantages(step: Step) -> Iterator[Verdict]:
    """Compare the advantage that each call was trained with to that of its rollout's task.

    The bound is 1e-12 of the step's largest reward: a mean of n rewards in 64 bits rounds by at most n * 1.1e-16 of it,
    and no group has more than 1,024. A division by the deviation enlarges that to at most a millionfold.
    """
    if not step.trained:
        raise CannotLook(f"step {step.number} has no record of the calls that were trained")
    yield from _nodes(step)
    if "advantages" not in step.record.formulas:
        raise CannotLook(f"the credit of {step.settings['use']} has a formula of its own, which is not known here")
    wanted = expected(step)
    rewards = [row["value"] for row in step.record.table("rollouts", "train", step.number, "value")]
    size = max((abs(reward) for reward in rewards if reward is not None), default=0.0)
    bound = 1e-12 * (size or 1.0) / (EPSILON if step.settings.get("scale_rewards") else 1.0)
    wrong, worst = list[str](), 0.0
    for (rollout, span), advantage in step.trained.items():
        off = abs(advantage - wanted.get(rollout, math.inf))
        if off <= bound:
            worst = max(worst, off)
        else:
            wrong.append(f"call {span} of rollout {rollout}: {advantage:.6g} instead of {wanted.get(rollout)}")
    if wrong:
        detail = f"{len(wrong)} of {len(step.trained)} calls have another advantage (bound {bound:.1g}): {some(wrong)}"
        yield fault(detail, "groups that were mixed up, an advantage of another rollout, its size")
    else:
        yield ok(f"{len(step.trained)} calls of {len(wanted)} rollouts", worst / bound)


def _nodes(step: Step) -> Iterator[Verdict]:
    """Check which calls `agent-match` handed over: those with its pattern in the name of a node around them."""
    adapter = step.record.config["adapter"]
    if adapter["use"] != "agent-match" or not adapter.get("match"):
        return
    wrong = []
    for row in step.record.table("calls", "train", step.number, "rollout", "span", "node", "place", "reason"):
        unmatched, matches = row["reason"] == "unmatched-node", bool(re.search(adapter["match"], row["node"] or ""))
        if unmatched == matches and (unmatched or row["place"] == "trained"):
            wrong.append(f"call {row['span']} of rollout {row['rollout']}, node {row['node']}")
    if wrong:
        detail = f"adapter.match = {adapter['match']!r} says otherwise of {len(wrong)} calls: {some(wrong)}"
        yield fault(detail, "the adapter")
