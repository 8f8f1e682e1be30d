"""Links `tasks` and `held-out`: which tasks a step should have drawn, and which a stated accuracy is of."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentrig.audit.record import Call, Record, Row, Sources, readable
from agentrig.audit.verdicts import CannotLook, Verdict, fault, ok, some
from agentrig.traces import items, mapping

TEXT = 16
"""Characters of the shortest text that stands for a task."""

CAUSES = "the algorithm's sampling of tasks, the task set's `load` (is its order stable?), a task that changed since"


def tasks(record: Record, step: int, sources: Sources) -> Iterator[Verdict]:
    """Check which tasks a step trained on.

    - `grpo` states its order (docs/learner.md): each epoch shuffles the split with `random.Random(f"tasks {seed}
      {epoch}")`, and steps take consecutive slices. So each task comes once before any comes twice: in all groups up to
      this step no two tasks' counts differ by more than one. Other algorithms may draw as they like.
    - The agent got the task's input as the task set, loaded again, has it; each group has `group_size` rollouts of one
      task; and inputs of different tasks differ: if two tasks out of the split, taken at random, are more likely to
      have the same input than not, the tasks are one task.
    """
    split, settings = sources.splits["train"], record.settings
    rows = record.rows("train", step)
    if not rows:
        raise CannotLook(f"the rollouts of step {step} are not in {record.path}/rollouts")
    known = {task.id: _text(task.input) for task in split}
    strange = sorted({row.task_id for row in rows if row.task_id not in known})
    if strange and record.knows_update:
        yield fault("tasks", f"{some(strange)}: not in the training split of the task set, loaded again", causes=CAUSES)
    changed = sorted({r.task_id for r in rows if known.get(r.task_id, _text(r.input)) != _text(r.input)})
    if changed:
        yield fault("tasks", f"the agent got another input than the task's in {some(changed)}", causes=CAUSES)
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    mixed = [name for name, members in groups.items() if len({row.task_id for row in members}) > 1]
    if mixed:
        detail = f"group {mixed[0]} has rollouts of {len({row.task_id for row in groups[mixed[0]]})} tasks"
        yield fault("tasks", detail, causes="the labels of groups")
    yield from _own_texts(rows, {task.id: task.input for task in split})
    drawn = [members[0].task_id for members in groups.values()]
    if record.knows_update:
        n, size = settings["tasks_per_step"], settings["group_size"]
        wanted = _documented([task.id for task in split], n=n, step=step, seed=record.config["run"]["seed"])
        if Counter(drawn) != Counter(wanted):
            off = sorted(((Counter(wanted) - Counter(drawn)) + (Counter(drawn) - Counter(wanted))).elements())
            detail = f"step {step} trained on {some(drawn)}; its sampling should have drawn {some(wanted)}: {len(off)} "
            yield fault("tasks", f"{detail}differ", causes=CAUSES)
        wrong = [
            f"group {name} has {len(g)} rollouts instead of {size}" for name, g in groups.items() if len(g) != size
        ]
        if wrong:
            yield fault("tasks", some(wrong), causes="the engine, or rollouts that got lost")
        earlier: list[str] = []
        for one in (at for at in record.files("train") if at <= step):
            groups_of = {row["group"]: row["task_id"] for row in record.columns("rollouts", one, "group", "task_id")}
            earlier += groups_of.values()
        times = Counter({task.id: 0 for task in split})
        times.update(task for task in earlier if task in times)
        most, least = max(times.items(), key=lambda t: t[1]), min(times.items(), key=lambda t: t[1])
        whole = record.files("train")[:step] == list(range(1, step + 1))
        if whole and most[1] > least[1] + 1:
            detail = f"up to step {step}, task {most[0]} was drawn {most[1]} times and {least[0]} {least[1]} times"
            yield fault("tasks", f"{detail}; each should come once before any comes twice", causes=CAUSES)
    kinds = Counter(known.values())
    alike = sum(n * (n - 1) for n in kinds.values()) / max(len(known) * (len(known) - 1), 1)
    if alike > 0.5:
        detail = (
            f"{len(known)} training tasks have {len(kinds)} different inputs, {kinds.most_common(1)[0][0]:.80} most"
        )
        yield fault("tasks", detail, causes="the task set fills the wrong field of `input`")
    yield ok("tasks", f"{len(groups)} groups of {len(rows)} rollouts, {len(known)} training tasks")


def held_out(record: Record, step: int, sources: Sources, summed: Mapping[str, Any] | None = None) -> Iterator[Verdict]:
    """Check the tasks, the temperature and the weights that the accuracies stated at the start and at a step are of.

    Every task of the split once; each call sampled at `val_temperature`, by the weights of the step that the file is
    of; and the accuracy in `progress.json` is that of the rollouts of the file: `correct` over those without failure.
    At the end of a run the summary states the same (`summed`, its entry `accuracy`).
    """
    looked, notes = 0, []
    file = record.path / "progress.json"
    with readable(file):
        stated = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    trained = {_text(t.input) for t in sources.splits["train"]}
    for mode in ("report", "validation"):
        split = sources.splits[mode]
        shared = sum(_text(task.input) in trained for task in split)
        if shared:
            notes.append(f"{shared} of {len(split)} {mode} tasks are training tasks too, by their input")
        for at in (one for one in record.files(mode) if one in (0, step)):
            rows = record.rows(mode, at)
            if record.knows_update and Counter(row.task_id for row in rows) != Counter(task.id for task in split):
                foreign = {row.task_id for row in rows} - {task.id for task in split}
                detail = f"the {mode} of step {at} has {len(rows)} rollouts of {len(split)} tasks, each once; "
                detail += f"{len(foreign)} of its tasks are not in the split"
                yield fault("held-out", detail, causes="the session's measurement; a task set that changed since")
            calls = [call for row in rows for call in row.calls]
            if rows and not calls and record.calls(step):
                detail = f"no rollout of the {mode} of step {at} called the model; those of training did"
                yield fault("held-out", detail, causes="an agent or a client that keeps its replies")
            temperature = record.settings.get("val_temperature", 0.0)
            told = [call for call in calls if call.request.get("temperature") is not None]
            if len(told) < len(calls):
                notes.append(f"{len(calls) - len(told)} calls of the {mode} of step {at} state no temperature")
            warm = [call for call in told if call.request["temperature"] != temperature]
            if warm and record.knows_update:
                detail = f"{len(warm)} of {len(calls)} calls of the {mode} of step {at} were sampled with temperature "
                detail += f"{warm[0].request['temperature']} instead of {temperature}"
                yield fault(
                    "held-out", detail, causes="the agent sets its own temperature; the sampling of the endpoint"
                )
            others = sorted({call.version for call in calls if call.version is not None} - {at})
            if others and record.settings.get("final", "last") == "last":
                detail = f"the {mode} of step {at} was answered with the weights of version {others[0]}"
                yield fault("held-out", detail, causes="a transfer of weights that was not waited for")
            when = "before" if at == 0 else "after"
            if mode == "report" and (at == 0 or at == max(record.files("report"))) and when in stated:
                yield from _accuracy(rows, stated[when].get("accuracy"), at)
                if summed is not None:
                    yield from _accuracy(rows, summed.get(when), at)
            looked += len(rows)
    if looked:
        yield ok("held-out", "; ".join([f"{looked} rollouts", *notes[:3]]))
    else:
        raise CannotLook(f"nothing was measured at the start and at step {step}")


def _accuracy(rows: Sequence[Row], stated: float | None, at: int) -> Iterator[Verdict]:
    valid = [row for row in rows if row.correct is not None]
    found = sum(bool(row.correct) for row in valid) / len(rows) if rows else None
    without = sum(bool(row.correct) for row in valid) / len(valid) if valid else None
    if stated is not None and all(one is None or not abs(one - stated) <= 1e-9 for one in (found, without)):
        detail = f"the report of step {at} states the accuracy {stated:.4f}; {len(rows)} rollouts give {found:.4f}"
        yield fault("held-out", detail, causes="the measurement counts other rollouts than those of the file")


def _documented(ids: Sequence[str], *, n: int, step: int, seed: int) -> list[str]:
    """Return the tasks of a step of `grpo`, as docs/learner.md says."""
    stream: list[str] = []
    epoch = (step - 1) * n // len(ids)
    skipped = (step - 1) * n - epoch * len(ids)
    while len(stream) < skipped + n:
        order = list(range(len(ids)))
        random.Random(f"tasks {seed} {epoch}").shuffle(order)
        stream += [ids[i] for i in order]
        epoch += 1
    return stream[skipped : skipped + n]


def _own_texts(rows: Sequence[Row], inputs: Mapping[str, Any]) -> Iterator[Verdict]:
    """Check that calls which ask about a task's text are in a rollout of that task.

    An agent may put its task into other words. Where some calls have a text of their own task's input as it is, a call
    without it and with another task's is in the wrong rollout, or the agent mixed up its tasks.
    """
    here = {row.task_id: inputs[row.task_id] for row in rows if isinstance(inputs.get(row.task_id), Mapping)}
    for key in {key for one in here.values() for key in one}:
        texts = {task: one[key] for task, one in here.items() if isinstance(one.get(key), str)}
        texts = {task: text for task, text in texts.items() if len(text) >= TEXT}
        own, wrong = 0, []
        for row in rows:
            mine = texts.get(row.task_id, "")
            for call in row.calls if mine else ():
                said = _said(call)
                if mine in said:
                    own += 1
                    continue
                other = next((task for task, text in texts.items() if text in said and text not in mine), None)
                if other is not None:
                    wrong.append(f"{call.name}, task {row.task_id}, has {key} of task {other}")
        if own and wrong:
            causes = "calls that were recorded with another rollout, an agent whose rollouts share what they should not"
            yield fault("tasks", f"{len(wrong)} calls are about another task: {some(wrong)}", causes=causes)


def _said(call: Call) -> str:
    parts = [mapping(message).get("content") for message in items(call.request.get("messages"))]
    return "\n".join(part if isinstance(part, str) else json.dumps(part, ensure_ascii=False) for part in parts)


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
