"""Which tasks a step should have drawn: `algorithm.task_sampling`, from its description and the recorded groups."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence

import attrs

from agentrig.audit.record import TASKS
from agentrig.audit.scores import admitted
from agentrig.audit.step import Step
from agentrig.audit.verdicts import CannotLook, Verdict, fault, some
from agentrig.traces import mapping

CAUSES = "the algorithm's sampling of tasks, the task set's `load` (is its order stable?), a task that changed since"


@attrs.frozen
class Seen:
    """A recorded group: its task, the rewards of what was scored, and whether each of its rollouts is correct."""

    task: str
    rewards: Sequence[float]
    correct: bool


def drawn(step: Step, taken: list[str]) -> Iterator[Verdict]:
    """Compare the tasks of a step's groups with those that its rule draws.

    By `uniform`, each task also comes once before any comes twice: in all groups up to this step no two tasks' counts
    differ by more than one.
    """
    yield from _compared(step, _first(step, taken))
    if _gated(step):
        yield from _again(step, _rewards(step))
    if _rule(step) == "uniform":
        yield from _in_turn(step)


def order(step: Step) -> Iterator[Verdict]:
    """Compare only what a step has drawn itself, for any step. Other algorithms may draw as they like."""
    taken = _taken(step, step.number)
    if taken and step.record.knows_update and step.record.demonstrations in ("", TASKS):
        yield from _compared(step, _first(step, taken))
        if _gated(step):
            yield from _again(step, _rewards(step))


def _gated(step: Step) -> bool:
    """Whether a step samples again for groups that are not admitted, by a gate that is known here."""
    name, keys = step.record.credit
    return name == "dapo" and keys["max_num_gen_batches"] > 1


def _first(step: Step, taken: list[str]) -> list[str]:
    """Return the tasks of a step's first batch; what comes after it no rule draws."""
    keys = mapping(step.record.config.get("credit"))
    return taken[: step.settings["tasks_per_step"]] if keys.get("max_num_gen_batches", 1) > 1 else taken


def _rewards(step: Step) -> list[tuple[str, Sequence[float | None]]]:
    """Return the task and the rewards of each group of a step, in their order."""
    groups: dict[str, tuple[str, list[float | None]]] = {}
    for row in step.record.table("rollouts", "train", step.number, "group", "task_id", "value"):
        groups.setdefault(row["group"], (row["task_id"], []))[1].append(row["value"])
    return [*groups.values()]


def _compared(step: Step, taken: list[str]) -> Iterator[Verdict]:
    rule, ids = _rule(step), [task.id for task in step.sources.splits["train"]]
    n, seed = step.settings["tasks_per_step"], step.record.config["run"]["seed"]
    if rule == "uniform":
        before = (step.number - 1) * n
        wanted = _order(ids, seed, first=before // len(ids), last=(before + n) // len(ids))[before % len(ids) :][:n]
    elif rule == "by-difficulty":
        wanted = _by_difficulty(ids, n, f"tasks {seed} {step.number}", _history(step))
    else:
        wanted = _without_solved(ids, n, seed, _history(step), int(step.settings["recheck_every"]))
    wrong, lacking = Counter(taken) - Counter(wanted), Counter(wanted) - Counter(taken)
    if wrong or lacking:
        detail = f"step {step.number} trained on {some([*wrong.elements()])}, which {rule} does not draw then, "
        yield fault(f"{detail}instead of {some([*lacking.elements()])}", CAUSES)


def _again(step: Step, groups: Sequence[tuple[str, Sequence[float | None]]]) -> Iterator[Verdict]:
    """Compare the batches after a step's first with DAPO's dynamic sampling (arXiv:2503.14476, section 3.2).

    Each group that is not admitted is replaced by one of another task, in at most `max_num_gen_batches` batches. The
    tasks of batch b are those that the step does not have yet, in the order of `random.Random(f"tasks {seed} {step}
    {b}")`; then, where these are too few, the others.

    Args:
        step: The step.
        groups: Task and rewards of each group, in their order.
    """
    name, keys = step.record.credit
    n, place, batch, seen = step.settings["tasks_per_step"], 0, 1, list[str]()
    while True:
        here = groups[place : place + n]
        place += n
        seen += [task for task, _ in here]
        n = sum(not admitted(name, keys, rewards) for _, rewards in here)
        batch += 1
        if not n or batch > keys["max_num_gen_batches"]:
            break
        ids = [task.id for task in step.sources.splits["train"]]
        random.Random(f"tasks {step.record.config['run']['seed']} {step.number} {batch}").shuffle(ids)
        ids = [task for task in ids if task not in seen] + [task for task in ids if task in seen]
        wanted = [ids[i % len(ids)] for i in range(n)]
        taken = [task for task, _ in groups[place : place + n]]
        if taken != wanted:
            detail = f"batch {batch} of step {step.number} has {some(taken) or 'no task'} instead of {some(wanted)}, "
            yield fault(f"{detail}for {n} groups that were not admitted", CAUSES)
            return
    if len(groups) > place:
        yield fault(f"step {step.number} has {len(groups)} groups, and its gate asks for {place}", CAUSES)


def _rule(step: Step) -> str:
    return str(step.settings.get("task_sampling", "uniform"))


def _taken(step: Step, at: int) -> list[str]:
    """Return the task of each group of a step."""
    rows = step.record.table("rollouts", "train", at, "group", "task_id")
    found: dict[str, str] = {}
    for row in rows:
        found.setdefault(row["group"], row["task_id"])
    return [*found.values()]


def _order(ids: Sequence[str], seed: int, *, first: int, last: int) -> list[str]:
    """Return the tasks in the order of epochs, each shuffled with `random.Random(f"tasks {seed} {epoch}")`."""
    found: list[str] = []
    for epoch in range(first, last + 1):
        order = list(range(len(ids)))
        random.Random(f"tasks {seed} {epoch}").shuffle(order)
        found += [ids[i] for i in order]
    return found


def _history(step: Step) -> list[Sequence[Seen]]:
    """Return the groups of each step before; a step's file is read once.

    Raises:
        CannotLook: A step's file is gone.
    """
    known = step.record.groups
    for one in range(1, step.number):
        if one not in known:
            known[one] = _groups(step, one)
    return [known[one] for one in range(1, step.number)]


def _groups(step: Step, at: int) -> Sequence[Seen]:
    groups: dict[str, list[dict[str, object]]] = {}
    for row in step.record.table("rollouts", "train", at, "group", "task_id", "value", "correct"):
        groups.setdefault(row["group"], []).append(row)
    if not groups:
        raise CannotLook(f"the rollouts of step {at} are not there, so what should have been drawn is not known")
    return [
        Seen(
            str(rows[0]["task_id"]),
            [float(row["value"]) for row in rows if isinstance(row["value"], float)],
            all(row["correct"] is True for row in rows),
        )
        for rows in groups.values()
    ]


def _by_difficulty(ids: Sequence[str], n: int, stream: str, history: Sequence[Sequence[Seen]]) -> list[str]:
    """Draw with weights: 0.1 + 0.9 u; u begins with 1, and each group halves its distance to 1 (differs) or 0 (equal).

    A group with fewer than two rewards says nothing. A draw without replacement takes the largest ln(1 - x) / weight
    with a random x for each task (Efraimidis and Spirakis, 2006).
    """
    u = dict.fromkeys(ids, 1.0)
    for seen in (group for groups in history for group in groups if len(group.rewards) >= 2):
        if seen.task in u:
            goal = 0.0 if min(seen.rewards) == max(seen.rewards) else 1.0
            u[seen.task] += (goal - u[seen.task]) / 2
    numbers, found = random.Random(stream), list[str]()
    while len(found) < n:
        key = {task: math.log(1 - numbers.random()) / (0.1 + 0.9 * u[task]) for task in ids}
        found += sorted(ids, key=lambda task: -key[task])[: n - len(found)]
    return found


def _without_solved(ids: Sequence[str], n: int, seed: int, history: Sequence[Sequence[Seen]], every: int) -> list[str]:
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


def _in_turn(step: Step) -> Iterator[Verdict]:
    ids = [task.id for task in step.sources.splits["train"]]
    recorded = [one for one in step.record.steps("train") if one <= step.number]
    times = dict.fromkeys(ids, 0)
    for one in recorded:
        for task in _first(step, _taken(step, one)):
            if task in times:
                times[task] += 1
    most, least = max(times, key=lambda task: times[task]), min(times, key=lambda task: times[task])
    if len(recorded) == step.number and times[most] > times[least] + 1:
        detail = f"up to step {step.number}, task {most} was drawn {times[most]} times and {least} {times[least]} times"
        yield fault(f"{detail}; each should come once before any comes twice", CAUSES)
