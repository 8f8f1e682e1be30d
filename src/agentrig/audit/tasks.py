"""Links `tasks` and `held-out`: which tasks a step should have drawn, and which a stated accuracy is of."""

from __future__ import annotations

import json
import math
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from agentrig.audit.distribution import compared
from agentrig.audit.draws import CAUSES, drawn
from agentrig.audit.record import TASKS, Call, Row, Sources
from agentrig.audit.scores import CAUSES as SCORE_CAUSES
from agentrig.audit.scores import longest, moved, scored_again
from agentrig.audit.step import Step
from agentrig.audit.text import CAUSES as TEXT_CAUSES
from agentrig.audit.text import differences
from agentrig.audit.verdicts import GIVEN, UNSEEN, CannotLook, Verdict, fault, faults, ok, some
from agentrig.tasks import fingerprint
from agentrig.text import amount
from agentrig.traces import mapping, value_digest

HELD_OUT = 16
"""Calls of a measurement whose texts, tokens and log-probabilities are looked at."""

SCORED = "scored again"

LEAK = 0.1
"""The share of held-out tasks with a training task's gold that is named, and of different golds that stand for tasks.
"""

TEXT = 16
"""Characters of the shortest text that stands for a task."""


def tasks(step: Step) -> Iterator[Verdict]:
    """Check which tasks a step trained on.

    - `grpo` states which it draws (docs/learner.md), see `agentrig.audit.draws`; others may draw as they like.
    - The agent got the task's input as the task set, loaded again, has it, also by the runner's digest, and its first
      call is not about another task; the recorded answer is what it returned; the run's tasks of all roles have the
      private part that the task set gives them; each group has `group_size` rollouts of one task; and inputs of
      different tasks differ: if two tasks out of the split, taken at random, are more likely to have the same input
      than not, the tasks are one task.
    """
    split, rows = step.sources.splits["train"], step.rows
    if step.record.demonstrations not in ("", TASKS):
        raise CannotLook(f"{GIVEN}no tasks were drawn")
    if not rows:
        raise CannotLook(f"the rollouts of step {step.number} are not in {step.record.path}/rollouts")
    known = {task.id: _text(task.input) for task in split}
    strange = sorted({row.task_id for row in rows if row.task_id not in known})
    if step.record.knows_update:
        yield from faults("not in the training split of the task set, loaded again", strange, CAUSES)
    yield from _at_the_door(step, rows, split)
    yield from _private(step.sources)
    groups: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        groups[row.group].append(row.task_id)
    mixed = [f"group {name} has rollouts of {len(set(ids))} tasks" for name, ids in groups.items() if len(set(ids)) > 1]
    yield from faults("groups are mixed up", mixed, "the labels of groups")
    inputs = {task.id: task.input for _, task in _with_tasks(rows, split)}
    yield from _own_texts(rows, inputs)
    if step.record.knows_update:
        size = step.settings["group_size"]
        wrong = [f"group {name} has {len(ids)} rollouts" for name, ids in groups.items() if len(ids) != size]
        yield from faults(f"instead of {size}", wrong, "the engine, or rollouts that got lost")
        yield from drawn(step)
    kinds = Counter(known.values())
    if sum(n * (n - 1) for n in kinds.values()) > 0.5 * len(known) * (len(known) - 1):
        most = kinds.most_common(1)[0][0]
        detail = f"{len(known)} training tasks have {len(kinds)} different inputs, {most:.80} most"
        yield fault(detail, "the task set fills the wrong field of `input`")
    note = _cut(rows, inputs)
    of = f"{amount(len(groups), 'group')} of {amount(len(rows), 'rollout')}"
    yield ok(f"{of}, {amount(len(known), 'training task')}", note=note)


OF_TASKS: Mapping[str, Sequence[str]] = {
    "tasks": ("train",),
    "score": ("train",),
    "held-out": ("validation", "report"),
}
"""The roles whose tasks a link compares a run with."""


def changed_since(step: Step, roles: Sequence[str]) -> Iterator[Verdict]:
    """Yield that a role has other tasks now than when the run began, so that nothing can be compared with them.

    What a run itself does to its tasks changes their fingerprint too, and is a fault of another kind. So the file that
    they are from was written to since, or there are more tasks or fewer.
    """
    for role in roles:
        then, loaded = step.record.data(role), step.sources.splits.get(role, ())
        now = loaded[: mapping(step.record.config.get("run")).get(f"{role}_tasks") or None]
        if then.get("fingerprint") in (None, fingerprint(now)):
            continue
        counts = f"{amount(then.get('tasks', 0), f'{role} task')} then, {len(now)} now"
        file = next((task.place.rpartition(", ")[0] for task in now if task.place), "")
        if file and _written_at(file) > step.record.began:
            named = next((f" (tasks.{k})" for k, v in step.record.config["tasks"].items() if v == file), "")
            detail = f"{file}{named} has changed since the run began ({counts})"
            yield fault(detail, "what writes to that file. Put it back as it was, or start a new run")
            return
        if then.get("tasks") != len(now):
            detail = f"the task set, loaded again, has other tasks than when the run began ({counts})"
            yield fault(detail, "data that changed since (put it back, or start a new run), or the task set's `load`")
            return


def _written_at(file: str) -> float:
    """Return when a file was written last, in Unix time; 0 if it is not there."""
    try:
        return Path(file).stat().st_mtime
    except OSError:
        return 0.0


def _at_the_door(step: Step, rows: Sequence[Row], split: Sequence[Any]) -> Iterator[Verdict]:
    """Compare what each agent got, by the record and by the runner, with the task, and its answer with the record."""
    pairs = _with_tasks(rows, split)
    changed = sorted({task.id for row, task in pairs if _text(task.input) != _text(row.input)})
    elsewhere = f"{CAUSES}, files in another folder than then, of a task or a record without `root`"
    yield from faults("the agent got another input than the task's", changed, elsewhere)
    given = [(row, task.given(whole=step.sources.whole_rows)) for row, task in pairs if row.given is not None]
    wrong = [r.id for r, one in given if isinstance(one, Mapping) and value_digest(one) not in (None, r.given)]
    what = f"the runner gave the agent another input than the task's in {amount(len(wrong), 'rollout')}"
    yield from faults(what, wrong, "what makes the jobs of tasks, or hands them to runners; a task that changed since")
    scored = [row for row in rows if row.returned is not None and row.status is not None]
    wrong = [row.id for row in scored if value_digest(row.answer) not in (None, row.returned)]
    what = f"the agent returned another answer than the one that is recorded in {amount(len(wrong), 'rollout')}"
    yield from faults(what, wrong, "what makes JSON of answers in the runner, or brings them to the reward")


def _with_tasks(rows: Sequence[Row], split: Sequence[Any]) -> list[tuple[Row, Any]]:
    """Return rollouts with their tasks, whose files are where they were when these ran; none of an unknown task."""
    known = {task.id: task for task in split}
    return [(row, known[row.task_id].under(row.root or "")) for row in rows if row.task_id in known]


def _private(sources: Sources) -> Iterator[Verdict]:
    """Compare the private parts of the run's tasks with the task set's own; one that changes with each load is left."""
    wrong = {
        (role, task.id)
        for role, used in sources.used.items()
        for task in sources.splits[role]
        if used.get(task.id) not in (None, value_digest(task.private))
    }
    if wrong and sources.again is not None:
        first, second = (
            {(role, task.id): value_digest(task.private) for role, tasks in splits.items() for task in tasks}
            for splits in (sources.splits, sources.again())
        )
        wrong = {key for key in wrong if first[key] == second.get(key)}
    names = [f"{role} task {name}" for role, name in sorted(wrong)]
    what = f"{len(wrong)} tasks have another private part than the task set, loaded again, gives"
    yield from faults(what, names, "what changes tasks after `load`, or their order; a task that changed since")


def held_out(step: Step) -> Iterator[Verdict]:
    """Check the tasks, the temperature and the weights that the accuracies stated at the start and at a step are of.

    Every task of the split once, with its own input; each call sampled at `val_temperature`, by the weights of the step
    that the file is of; answers scored again, texts and tokens of `HELD_OUT` calls as in training; and each stated
    accuracy is that of the rollouts of the file: `correct` over those without failure. At the end of a run the summary
    states the same.
    """
    record, splits, looked, scored, notes, worst = step.record, step.sources.splits, 0, 0, [], 0.0
    leaks = list[str]()
    progress = record.progress
    last = step.under(record.at(step.number, ended=True))
    best, kept = _best(last, progress), step.weights_of(step.number)
    if None not in (best, kept) and kept != best and step.number == max(record.lines):
        detail = f"the run ends with the weights of step {kept}, and those of step {best} are the ones that "
        detail += f"algorithm.final = {last.settings.get('final', 'last')} asks for (progress.json, metrics.jsonl)"
        yield fault(detail, "how the best measurement is chosen, or which weights are kept")
    for mode in ("report", "validation"):
        measured = record.steps(mode)
        looks = [at for at in sorted({0, step.number}) if at in measured or record.stated("rollouts", mode, at)]
        limits = {at: record.limit(mode, at) for at in looks}  # a resume may have changed it
        split = splits[mode][: max(limits.values(), key=lambda n: n or math.inf, default=0) or None]
        thens = {at: last if at and mode == "report" else step.under(record.at(at)) for at in looks}
        chats = record.demonstrations != TASKS and Path(record.demonstrations).is_file()  # they are of no task
        trained = () if chats else splits["train"]
        leaks += [f"{n} of {len(split)} {mode} tasks are {how}" for how, n in _shared(split, trained) if n]
        shared = mapping(mapping(progress.get("after")).get("common")) if mode == "report" else {}
        ends = [
            {row["task_id"] for row in record.table("rollouts", mode, at, "task_id")}
            for at in (0, max(measured, default=0))
            if shared
        ]
        for at in looks:
            then, rows, of = thens[at], record.rows(mode, at), f"the {mode} of step {at}"
            looked += len(rows)
            asked = Counter(task.id for task in then.sources.splits[mode][: limits[at] or None])
            if record.knows_update and Counter(row.task_id for row in rows) != asked:
                foreign = {row.task_id for row in rows} - asked.keys()
                detail = f"{of} has {len(rows)} rollouts of {len(asked)} tasks, each once; {len(foreign)} of its tasks "
                yield fault(f"{detail}are not in the split", "the measurement, or a task set that changed since")
            yield from _at_the_door(then, rows, then.sources.splits[mode])
            earlier = [one for one in measured if one < at]
            for verdict in moved(rows, record.rows(mode, max(earlier)) if earlier else ()):
                yield attrs.evolve(verdict, detail=f"{of}: {verdict.detail}")
            calls = [call for row in rows for call in row.calls]
            if rows and not calls and step.calls:
                detail = f"no rollout of {of} called the model; those of training did"
                yield fault(detail, "an agent or a client that keeps its replies")
            if unstated := sum(call.request.get("temperature") is None for call in calls):
                notes.append(f"{unstated} calls of {of} state no temperature")
            if record.knows_update:
                yield from _requests(then, calls, of)
                yield from _as_before(rows, record.rows(mode, 0) if at and not record.resumed else (), of)
                most, usual = (
                    max((call.limit or 0 for call in some), default=0) for some in (calls, step.calls.values())
                )
                limit = then.settings.get("max_tokens", 0)
                if most and usual == limit > most and (at or step.number == 1):
                    leaks.append(f"replies of {of} may have {most} tokens, and those of training {usual}")
            whose = best if at and mode == "report" else at  # None: not known
            others = sorted({call.version for call in calls if call.version is not None} - {whose})
            if others and whose is not None:
                detail = f"{of} was answered with the weights of version {others[0]}"
                yield fault(detail, "a transfer of weights that was not waited for")
            if at == step.number or step.number == 1:
                for verdict in _answers(then, rows, calls, mode):
                    worst = max(worst, verdict.ratio)
                    if verdict.result == "fault":
                        yield attrs.evolve(verdict, detail=f"{of}: {verdict.detail}")
                    elif verdict.detail == SCORED and verdict.read is not None:
                        scored += verdict.read[0]
                    elif verdict.result == UNSEEN:
                        notes.append(f"{of}: {verdict.detail}")
            when = "before" if at == 0 else "after"
            if mode == "validation":
                start, line = progress.get("validation_before"), record.lines.get(at, {})
                told, where = (line.get("validation_accuracy"), "metrics.jsonl") if at else (start, "progress.json")
                yield from _accuracy(rows, told, of, where)
            elif at in (0, max(measured)) and when in progress:
                yield from _accuracy(rows, progress[when].get("accuracy"), of, "progress.json")
                both = [row for row in rows if all(row.task_id in end for end in ends)]
                yield from _accuracy(both, mapping(shared.get(when)).get("accuracy"), of, "progress.json")
                yield from _accuracy(both, (step.stated or {}).get(when), of, "summary.json")
    if not looked:
        given = "" if step.record.demonstrations in ("", TASKS) else GIVEN
        raise CannotLook(f"{given}nothing was measured at the start and at step {step.number}")
    said = f"{amount(looked, 'rollout')}, {scored} of them {SCORED}"
    yield ok("; ".join([said, *notes[:3]]), worst, note="; ".join(leaks))


def _requests(step: Step, calls: Sequence[Call], of: str) -> Iterator[Verdict]:
    """Compare what the requests of a measurement ask for with the run's settings."""
    most = step.settings.get("max_tokens") or math.inf
    for name, wanted in {"temperature": step.settings.get("val_temperature", 0.0), "top_p": 1.0}.items():
        others = [own for call in calls if (own := call.request.get(name)) not in (None, wanted)]
        if others:
            detail = (
                f"{len(others)} of {len(calls)} calls of {of} were sampled with {name} {others[0]} instead of {wanted}"
            )
            yield fault(detail, f"the agent sets its own {name}; the sampling of the endpoint")
    if longer := [call.limit for call in calls if call.limit is not None and call.limit > most]:
        detail = f"{len(longer)} replies of {of} may have {longer[0]} tokens, and algorithm.max_tokens is {most}"
        yield fault(detail, "the sampling of the endpoint")


def _as_before(rows: Sequence[Row], before: Sequence[Row], of: str) -> Iterator[Verdict]:
    """Check that the requests of a measurement ask for the same as those of the one before training.

    That is, in most tasks, by every field of the first request of a rollout, where its messages are the same: what an
    agent asks for later may depend on replies. Of a seed only whether there is one.
    """
    first, pairs = {row.task_id: row.calls[0] for row in before if row.calls}, list[tuple[Call, Call]]()
    for row in (row for row in rows if row.calls and row.task_id in first):
        was, now = first[row.task_id], row.calls[0]
        pairs += [(was, now)] if was.asked == now.asked else []
    for name in sorted({name for pair in pairs for call in pair for name in call.asks}):
        others = [(a, b) for was, now in pairs if (a := was.asks.get(name)) != (b := now.asks.get(name))]
        if len(others) > len(pairs) / 2:
            a, b = others[0]
            detail = f"{len(others)} of {len(pairs)} first requests of {of} have {name} {b}, and before training {a}"
            yield fault(detail, "the two accuracies are not measured alike: the sampling of the endpoint, the agent")


def _shared(split: Sequence[Any], trained: Sequence[Any]) -> Iterator[tuple[str, int]]:
    """Yield how many tasks of a split are training tasks too: by their input, or else, if many, by the private part.

    That is by its longest text, such as a gold answer, unless that stands for many tasks, as a label does.
    """
    inputs = {_text(task.input) for task in trained}
    same = [task for task in split if _text(task.input) in inputs]
    yield "training tasks too, by their input", len(same)
    golds = {text for task in trained if len(text := longest(task.private)) >= TEXT}
    others = sum(longest(task.private) in golds for task in split) if len(golds) >= LEAK * len(trained) else 0
    if not same and others > LEAK * len(split):
        yield "training tasks in other words: they have the gold of one (the longest text of `private`)", others


def _best(step: Step, progress: Mapping[str, Any]) -> int | None:
    """Return the step whose weights the run ends with; None if that is not known.

    With `final = "best"` it has the highest accuracy of validation, among equals the highest mean reward, among those
    it is the first; 0 is the start. An end that was resumed may know only of the measurements since: there the step
    that the last checkpoint states is taken, if no later one is better.
    """
    record, at_end = step.record, step.stated is not None or "after" in progress
    if record.settings.get("final", "last") == "last":
        return step.number
    if not record.knows_update or not at_end or step.number != max(record.lines, default=0):
        return None
    stated, known = step.weights_of(step.number), {}
    measured = {0: (progress.get("validation_before"), progress.get("validation_reward_before"))} | {
        at: (line.get("validation_accuracy"), line.get("validation_reward")) for at, line in record.lines.items()
    }
    for at, (accuracy, reward) in measured.items():
        if accuracy is not None and reward is not None and (not record.resumed or at >= (stated or 0)):
            known[at] = -accuracy, -reward, at
    return min(known, key=lambda at: known[at], default=step.number)


def _answers(step: Step, rows: Sequence[Row], calls: Sequence[Call], role: str) -> Iterator[Verdict]:
    """Look at the answers of a measurement, and at some of its calls, as at those of training."""
    heat = step.settings.get("val_temperature", 0.0)
    some_calls = random.Random(step.number).sample(calls, min(HELD_OUT, len(calls)))
    plain = [call for call in some_calls if call.plain and call.request.get("temperature") == heat]
    versions = {call.version for call in plain}
    try:
        looked, wrong = scored_again(step, rows, role)
        yield from faults(f"{len(wrong)} of {looked} scores are others", wrong, SCORE_CAUSES)
        yield ok(SCORED, read=(looked, len(rows)))
        _, wrong, _ = differences(step, some_calls)
        yield from faults("tokens and texts differ", wrong, TEXT_CAUSES)
        if role == "report" and len(versions) == 1 and (version := versions.pop()) is not None:  # a model loads twice
            alone: dict[Call, Sequence[Sequence[int]]] = dict.fromkeys(plain, ())
            own, weights = step.evidence["held-out"], step.weights(version)
            yield from compared(step, weights, [alone], evidence=own, temperature=heat, top_p=1.0, of=len(calls))
    except CannotLook as why:
        yield Verdict(result=UNSEEN, detail=str(why))


def _accuracy(rows: Sequence[Row], stated: float | None, of: str, where: str) -> Iterator[Verdict]:
    valid = [row.correct for row in rows if row.correct is not None]
    found = sum(valid) / len(rows) if rows else None
    without = sum(valid) / len(valid) if valid else None
    if stated is not None and all(one is None or not abs(one - stated) <= 1e-9 for one in (found, without)):
        gives = "there are no rollouts of it" if found is None else f"{len(rows)} rollouts give {found:.4f}"
        detail = f"{where} states the accuracy {stated:.4f} of {of}; {gives}"
        cause = f"{where} was changed since the run wrote it, or the measurement counts other rollouts than those of "
        yield fault(detail, f"{cause}the file")


def _own_texts(rows: Sequence[Row], inputs: Mapping[str, Any]) -> Iterator[Verdict]:
    """Check that the first call of each rollout is about the rollout's own task.

    Later calls prove nothing: they may quote, in any form, what a model wrote before, and a model may have learned
    every text of every task. The first call is in the wrong rollout, or the agent mixed up its tasks, if it has a text
    of another task's input and of its own neither a beginning nor an end. A field counts if more first calls have only
    their own task's text in it than also another's: an agent may not show it, or show other tasks as examples.
    """
    texts: dict[str, dict[str, str]] = defaultdict(dict)  # by field, then by task
    for task in {row.task_id for row in rows}:
        for key, value in mapping(inputs.get(task)).items():
            if isinstance(value, str) and len(text := _words(value)) >= TEXT:
                texts[key][task] = text
    first = [(row, call, _words(call.asked)) for row in rows if (call := row.first_call) is not None]
    wrong: dict[str, str] = {}
    for key, by_task in texts.items():
        alone, beside, others = 0, 0, list[tuple[Row, Call, str, str]]()
        for row, call, said in first:
            mine = by_task.get(row.task_id, "")
            other = next((task for task, text in by_task.items() if text not in mine and text in said), None)
            if mine and mine in said:
                alone, beside = alone + (other is None), beside + (other is not None)
            elif mine and other is not None:
                others.append((row, call, said, other))
        for row, call, said, other in others if alone > beside else ():
            if not _has_own(said, row.task_id, other, texts.values()):
                wrong[row.id] = f"{call.name}, task {row.task_id}, has {key} of task {other}, and nothing of its own"
    what = f"the first call of {amount(len(wrong), 'rollout')} is about another task"
    causes = "an agent whose rollouts share what they should not (agent.use), a runner that gives an agent another "
    causes += "task's input or returns another rollout's calls (runners.use)"
    yield from faults(what, [*wrong.values()], causes)


def _has_own(said: str, task: str, other: str, texts: Iterable[Mapping[str, str]]) -> bool:
    """Whether a call has the beginning or the end of a text of a task, in any field, that the other one's has not."""
    pairs = [(by_task[task], by_task.get(other, "")) for by_task in texts if task in by_task]
    return any(end in said and end not in theirs for own, theirs in pairs for end in (own[:TEXT], own[-TEXT:]))


def _words(text: str) -> str:
    """Return the words of a text, alike however an agent lays it out: without punctuation, spaces and upper case."""
    return " ".join(re.findall(r"\w+", text.casefold()))


def _cut(rows: Sequence[Row], inputs: Mapping[str, Any]) -> str:
    """Return in how many tasks a text of the input is cut off in the messages; '' if none is.

    It is cut if `TEXT` characters of its beginning are in the first call of a rollout, which repeats no reply, and as
    many of its end are in none. It may be meant to be. Only a field that most tasks show belongs in the prompts: an
    agent that gets whole rows has the gold in one of them.
    """
    every, seen = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)  # tasks by field
    short: dict[str, dict[str, str]] = defaultdict(dict)
    for row in (row for row in rows if row.calls and isinstance(inputs.get(row.task_id), Mapping)):
        first = " ".join(row.calls[0].asked.split())
        said = " ".join(" ".join(call.asked for call in row.calls).split())
        for key, value in inputs[row.task_id].items():
            text = " ".join(value.split()) if isinstance(value, str) else ""
            if len(text) < 2 * TEXT:
                continue
            every[key].add(row.task_id)
            if text[:TEXT] in first:
                seen[key].add(row.task_id)
                if text[-TEXT:] not in said and row.task_id not in short[key]:
                    most = TEXT
                    while text[: most + 1] in said:
                        most += 1
                    short[key][row.task_id] = f"{key} of task {row.task_id}, {most} of {len(text)} characters"
    shown = [key for key in every if 2 * len(seen[key]) > len(every[key])]
    cut = {task: text for key in shown for task, text in short[key].items()}
    if not cut:
        return ""
    of = len(set().union(*(seen[key] for key in shown)))
    return f"the prompts cut off inputs of {len(cut)} of {of} tasks: {some([*cut.values()])}"


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
