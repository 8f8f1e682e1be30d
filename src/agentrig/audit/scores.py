"""Links `score` and `advantages`: from the recorded answers to what each call is trained with."""

from __future__ import annotations

import math
import random
import re
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from agentrig.audit.record import Record, Sources
from agentrig.audit.verdicts import CannotLook, Verdict, fault, ok, some

SCORED_N = 16
"""So many answers of a step are scored again, however long it takes."""

EPSILON = 1e-6
"""What grpo adds to a group's deviation (docs/learner.md)."""


def score(record: Record, step: int, sources: Sources) -> Iterator[Verdict]:
    """Score recorded answers again, with a fresh reward and the task as the task set, loaded again, has it.

    Rewards are equal or not: the contract of a reward is that equal answers get equal scores. One that gives two
    scores to one answer here can't be looked at, nor can an answer that can't be scored any more.
    """
    known = {task.id: task for task in sources.splits["train"]}
    every, line = record.rows("train", step), record.lines[step]
    values, told = [r.value for r in every if r.value is not None], line.get("reward")
    if values and line.get("rollouts") == len(every) and isinstance(told, int | float):
        mean = math.fsum(values) / len(values)
        if not abs(told - mean) <= 1e-9 * max(1.0, abs(mean)):
            detail = f"metrics.jsonl has the reward {told}, and the mean of the step's {len(values)} rewards is {mean}"
            yield fault("score", detail, causes="a line of metrics.jsonl or a file of rollouts that was changed since")
    rows = [r for r in every if r.failure is None and r.status == "ok" and r.task_id in known]
    random.Random(step).shuffle(rows)
    end, wrong, looked = time.monotonic() + sources.seconds, [], 0
    for row in rows:
        if looked >= SCORED_N and time.monotonic() > end:
            break
        task = known[row.task_id]
        found = sources.score(task, row)
        if found.status != "ok":  # a limit of time, or something that was there when the answer was given
            continue
        looked += 1
        if (found.status, found.value) == (row.status, row.value):
            continue
        again = sources.score(task, row)
        if (again.status, again.value) != (found.status, found.value):
            raise CannotLook(f"the reward gives two scores to one answer: {found.value} and {again.value}")
        wrong.append(f"rollout {row.id} of task {row.task_id} has {row.value}, and its answer scores {found.value}")
    if wrong:
        causes = "rewards that went to other rollouts, a reward that depends on more than task and answer"
        yield fault("score", f"{len(wrong)} of {looked} scores are others: {some(wrong)}", causes=causes)
    elif looked:
        yield ok("score", f"{looked} of {len(rows)} scores")
    else:
        raise CannotLook("no rollout was scored")


def expected(record: Record, step: int) -> dict[str, float]:
    """Return each rollout's advantage from the rewards of its task, by the published formula.

    GRPO (arXiv:2402.03300, section 4.1.2): the reward minus the mean of its group, over the group's standard deviation
    (n - 1 in the denominator); without `scale_rewards` only minus the mean, as in Dr. GRPO (arXiv:2503.20783).
    Negative ones are multiplied by `negative_scale`. Failed rollouts are in no group; a group is all rollouts of one
    task (with its label only where a step draws a task twice).
    """
    settings = record.settings
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in record.columns("rollouts", step, "id", "task_id", "group", "value"):
        if row["value"] is not None:
            groups[row["task_id"], row["group"]].append(row)
    found: dict[str, float] = {}
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


def advantages(record: Record, step: int) -> Iterator[Verdict]:
    """Compare the advantage that each call was trained with to that of its rollout's task.

    The bound is 1e-12 of the step's largest reward: a mean of n rewards in 64 bits rounds by at most n * 1.1e-16 of it,
    and no group has more than 1,024. A division by the deviation enlarges that to at most a millionfold.
    """
    taken = record.trained(step)
    if not record.knows_update:
        raise CannotLook(f"the formula of {record.settings['use']} is not known here")
    if not taken:
        raise CannotLook(f"step {step} has no record of the calls that were trained")
    yield from _nodes(record, step)
    wanted = expected(record, step)
    rewards = [row["value"] for row in record.columns("rollouts", step, "value") if row["value"] is not None]
    size = max(map(abs, rewards), default=0.0)
    scaled = record.settings.get("scale_rewards")
    bound = 1e-12 * (size or 1.0) / (EPSILON if scaled else 1.0)
    wrong, worst = list[str](), 0.0
    for (rollout, span), advantage in taken.items():
        right = wanted.get(rollout)
        off = math.inf if right is None else abs(advantage - right)
        if off <= bound:
            worst = max(worst, off)
        else:
            wrong.append(f"call {span} of rollout {rollout}: {advantage:.6g} instead of {right}")
    if wrong:
        detail = f"{len(wrong)} of {len(taken)} calls have another advantage (bound {bound:.1g}): {some(wrong)}"
        causes = "groups that were mixed up, an advantage of another rollout, its size"
        yield fault("advantages", detail, causes=causes)
    else:
        yield ok("advantages", f"{len(taken)} calls of {len(wanted)} rollouts", ratio=worst / bound)


def _nodes(record: Record, step: int) -> Iterator[Verdict]:
    """Check which calls `agent-match` handed over: those with its pattern in the name of a node around them."""
    adapter = record.config["adapter"]
    if adapter["use"] != "agent-match" or not adapter.get("match"):
        return
    wrong = [
        f"call {row['span']} of rollout {row['rollout']}, node {row['node']}"
        for row in record.columns("calls", step, "rollout", "span", "node", "place", "reason")
        if (row["reason"] == "unmatched-node") == bool(re.search(adapter["match"], row["node"] or ""))
        and (row["reason"] == "unmatched-node" or row["place"] == "trained")
    ]
    if wrong:
        detail = f"adapter.match = {adapter['match']!r} says otherwise of {len(wrong)} calls: {some(wrong)}"
        yield fault("advantages", detail, causes="the adapter")
