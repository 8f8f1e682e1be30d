"""Which tasks a step should have drawn: `algorithm.task_sampling`, from its description and the recorded groups."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence

from agentrig.audit.record import TASKS, Group
from agentrig.audit.scores import admitted
from agentrig.audit.step import Step
from agentrig.audit.verdicts import CannotLook, Verdict, fault, some
from agentrig.traces import mapping

CAUSES = "the algorithm's sampling of tasks, the task set's `load` (is its order stable?), a task that changed since"


def drawn(step: Step) -> Iterator[Verdict]:
    """Compare the tasks of a step's groups with those that its rule and its gate draw.

    Other algorithms draw as they like, and so do demonstrations of other runs.
    """
    record, rule = step.record, step.settings.get("task_sampling", "uniform")
    groups = record.groups(step.number) if record.knows_update and record.demonstrations in ("", TASKS) else ()
    if not groups:
        return
    ids, seed = [task.id for task in step.sources.splits["train"]], record.config["run"]["seed"]
    n = step.settings["tasks_per_step"]
    if rule == "uniform":
        before = (step.number - 1) * n
        wanted = _order(ids, seed, first=before // len(ids), last=(before + n) // len(ids))[before % len(ids) :][:n]
    elif rule == "by-difficulty":
        wanted = _by_difficulty(ids, n, f"tasks {seed} {step.number}", _history(step))
    else:
        wanted = _without_solved(ids, n, seed, _history(step), int(step.settings["recheck_every"]))
    gated = mapping(record.config.get("credit")).get("max_num_gen_batches", 1) > 1
    taken = [group.task for group in (groups[:n] if gated else groups)]
    wrong, lacking = Counter(taken) - Counter(wanted), Counter(wanted) - Counter(taken)
    if wrong or lacking:
        detail = (
            f"step {step.number} trained on {some([*wrong.elements()])}, which algorithm.task_sampling={rule} does "
        )
        yield fault(f"{detail}not draw then, instead of {some([*lacking.elements()])}", CAUSES)
    if gated and record.credit[0] == "dapo":
        yield from _again(step, groups)


def _again(step: Step, groups: Sequence[Group]) -> Iterator[Verdict]:
    """Compare the batches after a step's first with DAPO's dynamic sampling (arXiv:2503.14476, section 3.2).

    Each group that is not admitted is replaced by one of another task, in at most `max_num_gen_batches` batches. The
    tasks of batch b are those that the step does not have yet, in the order of `random.Random(f"tasks {seed} {step}
    {b}")`; then, where these are too few, the others.
    """
    name, keys = step.record.credit
    n, place, batch, seen = step.settings["tasks_per_step"], 0, 1, list[str]()
    while True:
        here = groups[place : place + n]
        place += n
        seen += [group.task for group in here]
        n = sum(not admitted(name, keys, group.rewards) for group in here)
        batch += 1
        if not n or batch > keys["max_num_gen_batches"]:
            break
        ids = [task.id for task in step.sources.splits["train"]]
        random.Random(f"tasks {step.record.config['run']['seed']} {step.number} {batch}").shuffle(ids)
        ids = [task for task in ids if task not in seen] + [task for task in ids if task in seen]
        wanted = [ids[i % len(ids)] for i in range(n)]
        taken = [group.task for group in groups[place : place + n]]
        if taken != wanted:
            detail = f"batch {batch} of step {step.number} has {some(taken) or 'no task'} instead of {some(wanted)}, "
            yield fault(f"{detail}for {n} groups that were not admitted", CAUSES)
            return
    if len(groups) > place:
        yield fault(f"step {step.number} has {len(groups)} groups, and its gate asks for {place}", CAUSES)


def _order(ids: Sequence[str], seed: int, *, first: int, last: int) -> list[str]:
    """Return the tasks in the order of epochs, each shuffled with `random.Random(f"tasks {seed} {epoch}")`."""
    found: list[str] = []
    for epoch in range(first, last + 1):
        order = list(range(len(ids)))
        random.Random(f"tasks {seed} {epoch}").shuffle(order)
        found += [ids[i] for i in order]
    return found


def _history(step: Step) -> list[Sequence[Group]]:
    """Return the groups of each step before."""
    found = [step.record.groups(one) for one in range(1, step.number)]
    if not all(found):
        at = 1 + [bool(groups) for groups in found].index(False)
        raise CannotLook(f"the rollouts of step {at} are not there, so what should have been drawn is not known")
    return found


def _by_difficulty(ids: Sequence[str], n: int, stream: str, history: Sequence[Sequence[Group]]) -> list[str]:
    """Draw with weights: 0.1 + 0.9 u; u begins with 1, and each group halves its distance to 1 (differs) or 0 (equal).

    A group with fewer than two rewards says nothing. A draw without replacement takes the largest ln(1 - x) / weight
    with a random x for each task (Efraimidis and Spirakis, 2006).
    """
    u = dict.fromkeys(ids, 1.0)
    for group in (group for groups in history for group in groups):
        rewards = [reward for reward in group.rewards if reward is not None]
        if group.task in u and len(rewards) >= 2:
            goal = 0.0 if min(rewards) == max(rewards) else 1.0
            u[group.task] += (goal - u[group.task]) / 2
    numbers, found = random.Random(stream), list[str]()
    while len(found) < n:
        key = {task: math.log(1 - numbers.random()) / (0.1 + 0.9 * u[task]) for task in ids}
        found += sorted(ids, key=lambda task: -key[task])[: n - len(found)]
    return found


def _without_solved(ids: Sequence[str], n: int, seed: int, history: Sequence[Sequence[Group]], every: int) -> list[str]:
    """Walk through the order of `uniform`, step by step, past tasks whose last group before was all correct.

    A solved task is taken the `every`-th time that it comes. A step looks at n places, or once at all tasks if that is
    more; what it lacks then are the first of those that it has passed.
    """
    order, place, epoch = list[str](), 0, 0
    correct, missed = dict[str, bool](), Counter[str]()
    taken = list[str]()
    for groups in [*history, []]:
        taken, left = [], list[str]()
        for _ in range(max(n, len(ids))):
            if len(taken) == n:
                break
            if place == len(order):
                order, place, epoch = _order(ids, seed, first=epoch, last=epoch), 0, epoch + 1
            task, place = order[place], place + 1
            missed[task] += 1
            if correct.get(task) and missed[task] < every:
                left.append(task)
            else:
                taken.append(task)
        taken += left[: n - len(taken)]
        for task in taken:
            missed[task] = 0
        correct |= {group.task: group.correct for group in groups}
    return taken
