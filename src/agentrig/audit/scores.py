"""Links `score` and `advantages`: from the recorded answers to what each call is trained with."""

from __future__ import annotations

import math
import random
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from agentrig.audit.step import Step
from agentrig.audit.verdicts import CannotLook, Verdict, fault, ok, some

SCORED_N = 16
"""So many answers of a step are scored again, however long it takes."""

EPSILON = 1e-6
"""What grpo adds to a group's deviation, as the docstring of `agentrig.credit.advantages` says."""


def score(step: Step) -> Iterator[Verdict]:
    """Score recorded answers again, with a fresh reward and the task as the task set, loaded again, has it.

    Rewards are equal or not: the contract of a reward is that equal answers get equal scores. One that gives two
    scores to one answer here can't be looked at, nor can an answer that can't be scored any more.
    """
    known, sources = {task.id: task for task in step.sources.splits["train"]}, step.sources
    values, told = [r.value for r in step.rows if r.value is not None], step.line.get("reward")
    if values and step.line.get("rollouts") == len(step.rows) and isinstance(told, int | float):
        mean = math.fsum(values) / len(values)
        if not abs(told - mean) <= 1e-9 * max(1.0, abs(mean)):
            detail = f"metrics.jsonl has the reward {told}, and the mean of the step's {len(values)} rewards is {mean}"
            yield fault(detail, "a line of metrics.jsonl or a file of rollouts that was changed since")
    rows = [r for r in step.rows if r.failure is None and r.status == "ok" and r.task_id in known]
    random.Random(step.number).shuffle(rows)
    end, wrong, looked = time.monotonic() + sources.seconds, [], 0
    for row in rows:
        if looked >= SCORED_N and time.monotonic() > end:
            break
        found = sources.score(known[row.task_id], row)
        if found.status != "ok":  # a limit of time, or something that was there when the answer was given
            continue
        looked += 1
        if found.value != row.value:
            again = sources.score(known[row.task_id], row)
            if (again.status, again.value) != (found.status, found.value):
                raise CannotLook(f"the reward gives two scores to one answer: {found.value} and {again.value}")
            wrong.append(f"rollout {row.id} of task {row.task_id} has {row.value}, and its answer scores {found.value}")
    if wrong:
        causes = "rewards that went to other rollouts, a reward that depends on more than task and answer"
        yield fault(f"{len(wrong)} of {looked} scores are others: {some(wrong)}", causes)
    elif looked:
        yield ok(f"{looked} of {len(rows)} scores")
    else:
        raise CannotLook("no rollout was scored")


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
