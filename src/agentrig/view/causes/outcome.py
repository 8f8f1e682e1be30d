"""How the run ended, and what became better."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from agentrig.errors import AgentrigError
from agentrig.figures import (
    SIGNIFICANT,
    count,
    figure,
    judged,
    least_gain,
    mean,
    no_room,
    number,
    p_text,
    paired_interval,
    percent,
    plain,
    points,
    sign_test,
)
from agentrig.plan import RESUME, resume_command
from agentrig.run.checkpoints import SAVED, Checkpoints
from agentrig.run.damage import CURES, read_object
from agentrig.run.directory import check_links
from agentrig.run.past import RESTORE, contradictions
from agentrig.run.resume import check_record
from agentrig.run.verdict import NAMED, SOLVED
from agentrig.text import amount
from agentrig.traces import items
from agentrig.view import figures, tables
from agentrig.view.causes.evidence import Evidence, Measured, changed, measured_of, total, tried_by_class
from agentrig.view.causes.finding import STOPPED, Finding, audited_at, problem
from agentrig.view.causes.groups import (
    ZERO_VARIANCE_LIMIT,
    better_start,
    fading,
    free_name,
    most_labels,
    warm_up_command,
)
from agentrig.view.causes.policy import collapsed, lower_rate, settings_of_rate
from agentrig.view.causes.rollouts import SHORTER, TOO_LONG
from agentrig.view.causes.trend import (
    LIKELY,
    at_least,
    at_most,
    change,
    fewer_right,
    more_right,
    quarter,
    rose,
    so_many,
    worse_reward,
)
from agentrig.view.causes.weights import LR
from agentrig.view.reading import dig, mapping, warnings_of

FEW = 10
"""A run of fewer steps is too short to say that it does not learn."""

REPEATS = 0.15
"""Least share of right training rollouts of a model that may have memorised its training tasks …"""

ELSEWHERE = 1 / 3
"""… and the largest part of that share in which it is right on tasks that it was not trained on, and surely less often.
"""

FEW_HELD_OUT = 50
"""Of fewer held-out tasks, a handful must change before that is no chance."""

APART = 0.1
"""Least difference between the shares of right answers in training and on held-out tasks that asks for more tasks."""

FEW_UNLIKE = 4
"""Of fewer tasks with other requests after training, nothing is said."""

FEW_TASKS = 10
"""Of a class of held-out tasks with fewer, nothing is said."""

Moved = Mapping[tuple[str, str], float]
"""Classes of tasks, each a slice and its class, and how likely their change is by chance."""

EXPLAINS: Mapping[str, tuple[str, ...]] = {
    "other-sampling": ("zero-variance-groups", "no-exploration", "tasks-too-hard"),
    "weights-not-arriving": ("learning-rate-too-large", "weights-unchanged", "learning-rate-too-small"),
    "sampled-differently": ("learning-rate-too-large", "weights-unchanged"),
    "server-failed": ("failures", "call-errors"),
    **dict.fromkeys(
        ("call-errors", "aborted-calls", "overlong-prompts"),
        ("calls-not-recorded", "tasks-too-hard", "constant-reward", "zero-variance-groups", "no-exploration"),
    ),
}
"""What follows from a cause that only the run itself can see."""

SETTINGS: Mapping[str, tuple[str, ...]] = {
    "unmatched-calls": ("adapter.match",),
    "no-token-ids": ("server.use",),
    "other-server": ("agent.use",),
    "calls-not-recorded": ("agent.use",),
    "call-errors": ("algorithm.model", "server.use", "agent.use"),
    "aborted-calls": ("agent.use",),
    "several-choices": ("agent.use",),
    "tasks-too-easy": ("tasks.use",),
    "tasks-too-hard": ("tasks.use", "algorithm.model"),
    "constant-reward": ("reward.use",),
    "demonstrations-rejected": ("reward.use", "agent.use", "algorithm.demonstrations"),
    "zero-variance-groups": ("algorithm.group_size", "tasks.use"),
    "weights-unchanged": ("algorithm.lr",),
    "learning-rate-too-large": ("algorithm.lr", "algorithm.warmup_steps"),
    "diverged": ("algorithm.lr", "algorithm.max_grad_norm"),
    "lost-calls": ("adapter.use", "algorithm.use"),
    "weights-not-arriving": ("server.use",),
    "sampled-differently": ("server.use", "adapter.use"),
    "server-failed": ("server.use",),
    "stale-rollouts": ("algorithm.max_staleness",),
    "out-of-memory": ("algorithm.tokens_per_batch",),
}
"""The settings of each cause that ends a run."""

AUDITED: Mapping[str, tuple[str, ...]] = {
    "tasks": ("tasks.use",),
    "text": ("adapter.use", "server.use"),
    "distribution": ("server.use",),
    "score": ("reward.use",),
    "advantages": ("credit.use", "adapter.use"),
    "gradient": ("algorithm.use",),
    "weights": ("algorithm.use",),
    "delivery": ("server.use",),
    "held-out": ("reward.use", "tasks.use"),
}
"""The settings of each link in which the auditor may find a fault that names none."""

CAUSES = "Likely causes"
"""Begins the line of a fault's causes, after that of the fault."""

KEYS = re.compile(r"\b(?:adapter|agent|algorithm|credit|reward|run|runners|server|tasks)\.[a-z]\w*")
"""A setting in the words of a fault."""


def ended(evidence: Evidence) -> Iterator[Finding]:
    """The error that ended the run; Ctrl-C and signals are none.

    A run that could write nothing more at its end has the error only as the last line of `log.jsonl`.
    """
    run = evidence.run
    error = run.error
    if not error and figures.status(run) == "crashed":
        last = next(iter(warnings_of(run)), {"level": None})
        error = {"message": last["text"]} if last["level"] == "error" else {}
    if not error:
        return
    kind, message = str(error.get("error") or "error"), str(error.get("message") or "").strip()
    if kind in STOPPED:
        yield Finding("warn", message or "interrupted")
        return
    cause = str(error.get("cause") or "error")
    first, _, rest = message.partition("\n")
    settings = SETTINGS.get(cause, ())
    if cause == "other-sampling":
        settings = ("agent.use", *dict.fromkeys(KEYS.findall(message)))
    if cause == "unmatched-calls" and evidence.value("adapter.match") is None:
        settings = ("adapter.use",)
    if cause == "overlong-prompts":
        settings, rest = evidence.setting(*TOO_LONG), f"{rest}\n{SHORTER}".lstrip()
    steps = [facts.step for facts in evidence.steps] or [int(line["step"]) for line in run.steps]
    lines = [line.strip() for line in rest.splitlines()]
    since = audited_at(error) or max(steps, default=0)
    yield problem(
        cause,
        first or kind,
        seen=(1, max(1, len(steps), since), "steps"),
        since=since,
        settings=_of_links(lines) if cause == "audit" else settings,
        advice="\n".join(lines),
        lost=1.0,
        explains=EXPLAINS.get(cause, ()),
        ended=True,
    )


def _of_links(lines: Sequence[str]) -> tuple[str, ...]:
    """Return the settings that the auditor's faults and their causes name; of a link that names none, its own."""
    named, link = dict[str, list[str]](), ""
    for line in lines:
        start, _, detail = line.partition(":")
        link = start if start in AUDITED else link if start == CAUSES else ""
        if link:
            named[link] = [*named.get(link, ()), *KEYS.findall(detail)]
    return tuple(dict.fromkeys(key for link, keys in named.items() for key in keys or AUDITED[link]))


def told(evidence: Evidence) -> Iterator[Finding]:
    """What the run itself has to say: warnings, notes, observers that failed, tasks that are solved."""
    run = evidence.run
    warnings = [*items(run.manifest.get("warnings")), *items(run.summary.get("warnings"))]
    yield from (Finding("warn", text) for text in dict.fromkeys(map(str, warnings)))
    yield from (Finding("fact", str(text)) for text in items(run.summary.get("notes")))
    if run.summary.get("solved"):
        yield Finding("ok", "the tasks are solved: every rollout of the last steps was correct, so the run ended")


def other_settings(evidence: Evidence) -> Iterator[Finding]:
    """Settings that a resume changed: figures of steps before and after it are of other settings."""
    run, told = evidence.run, dict[int, list[str]]()
    for i, (after, key, was) in enumerate(run.changes):
        then = next((value for _, later, value in run.changes[i + 1 :] if later == key), evidence.value(key))
        if then != was:
            said = f"{key} = {figures.setting_text(key, then)} (was {figures.setting_text(key, was)})"
            told.setdefault(after, []).append(said)
    for after, keys in told.items():
        yield Finding("warn", f"the run went on with other settings after step {after}: {', '.join(keys)}")


def reflections(evidence: Evidence) -> Iterator[Finding]:
    """A search for prompts whose reflections gave nothing to try: it could find no better prompt."""
    seen = mapping(evidence.run.manifest.get("reflections"))
    n, refused = (int(number(seen.get(key)) or 0) for key in ("n", "refused"))
    if 2 * refused > n:
        yield problem(
            "reflections-unusable",
            f"{refused} of {amount(n, 'attempt')} at a new prompt gave no usable text",
            seen=(refused, n, "attempts"),
            settings=("algorithm.reflection_model", "algorithm.reflection_base_url"),
            advice=f"The latest: {seen.get('example')}\nLet a stronger model reflect, or one that answers as "
            "the OpenAI API does: set algorithm.reflection_model.",
        )


def observers(evidence: Evidence) -> Iterator[Finding]:
    """Observers that failed, and what trackers and others that write in threads of their own have lost."""
    for plugin, times in mapping(evidence.run.summary.get("observer_errors")).items():
        yield Finding("warn", f"observer {plugin} failed {amount(times, 'time')}; the run continued without it")
    for name, counts in mapping(evidence.run.summary.get("observer_writes")).items():
        if isinstance(counts, Mapping):
            yield _written(name, counts)


def _written(name: str, counts: Mapping[str, Any]) -> Finding:
    written, failed, dropped, unsent = (
        int(number(counts.get(key)) or 0) for key in ("written", "failed", "dropped", "unsent")
    )
    lost = []
    if failed:
        lost.append(f"{failed} of {amount(written + failed, 'write')} failed (the latest: {counts.get('error')})")
    if dropped:
        lost.append(f"{dropped} were dropped, because it was too slow")
    if unsent:
        lost.append(f"{unsent} were not finished when the run ended")
    if not lost:
        return Finding("ok", f"{name} got all {written} writes")
    return Finding("warn", f"{name}: {'; '.join(lost)}. The run's own files have everything")


def memorised(evidence: Evidence) -> Iterator[Finding]:
    """A model that is right on the tasks of training and hardly ever on others: more steps would not help it."""
    late = evidence.steps[-quarter(evidence.steps) :]
    right, scored = total(late, "right"), total(late, "scored")
    if evidence.ends is None or not scored or more_right(evidence):
        return
    known, n = _right_of(evidence.ends[1])
    surely_less = at_most(known, n) < at_least(right, scored)
    if at_least(right, scored) < REPEATS or not surely_less or known / n >= ELSEWHERE * right / scored:
        return
    if other_mix(evidence):
        return
    before = {task for facts in evidence.steps[: -len(late)] for task in facts.tried}
    fresh = [task not in before for facts in late for task in facts.tried]
    if fewer_right(evidence) and 2 * sum(fresh) > len(fresh):
        return  # it was right on tasks that it had not trained on: the last updates took that away
    split = evidence.where.partition(" split")[0]
    yield problem(
        "memorised",
        f"the model repeats what it learned of its training tasks: {right / scored:.0%} of the training rollouts of "
        f"the last {so_many(len(late))} are right, and {known} of {n} {split} tasks",
        seen=(n - known, n, f"{split} tasks"),
        since=evidence.since("right"),
        settings=(_tasks_key(evidence), "algorithm.model"),
        advice="More steps do not help. Are held-out tasks of the same kind as training tasks? Train on more tasks, or "
        "more varied ones; a model of agentrig warmup needs demonstrations that vary, or more "
        f"labels{_more_labels(evidence)}",
        lost=1.0,
        explains=("learning-rate-too-large", "tasks-too-easy", "zero-variance-groups", "no-exploration", "low-entropy"),
    )


def changes(evidence: Evidence) -> Iterator[Finding]:
    """How many tasks became right or wrong, and whether that may be chance."""
    (better, worse, _, judged), rescored = evidence.changed, evidence.rescored
    if evidence.ends is None or not judged:
        return
    doubt: Literal["fact", "warn"] = "fact" if evidence.run.running else "warn"
    short = 0 < evidence.run.done < FEW and not (evidence.run.running or list(memorised(evidence)))
    short = short and not no_more(evidence)
    scarce = [amount(evidence.run.done, "step")] if short else []
    scarce += [amount(judged, "task")] if judged < FEW_HELD_OUT else []
    are = "is" if scarce == ["1 step"] else "are"
    few = f"; {' and '.join(scarce)} {are} few, so this is not surprising" if scarce else ""
    reward = evidence.mean_reward
    if few and ((reward and reward.sign) or any(moved_classes(evidence)) or any(reward_parts(evidence))):
        few = ""
    if without_room(evidence):
        few = "; too few were wrong before for a significant gain"
    split, _, steps = evidence.where.partition(" split, ")
    ended = not (evidence.run.running or unfinished(evidence))
    tasks = f"{count(judged)} {split} tasks measured at {'both ends' if ended else steps}"
    if not better + worse:
        yield Finding(doubt, f"none of {tasks} changed its outcome{few}")
        return
    text = (
        f"of {tasks}, {count(better)} went from wrong to right and {count(worse)} "
        f"from right to wrong ({evidence.chance})"
    )
    if not rescored:
        ends = paired_interval(better, worse, judged)
        text += f"; 95% interval of the difference {points(ends[0])} to {points(ends[1])} points"
        if (ends[0] <= 0 <= ends[1]) != (sign_test(better, worse) > SIGNIFICANT):
            text += " (it is approximate, and the test is exact)"
    better, worse = evidence.learned
    if sign_test(better, worse) > SIGNIFICANT:
        yield Finding(doubt, text if rescored else f"{text}{few}")
    elif better > worse:
        yield Finding("ok", text)
    elif not _is_blamed(evidence):
        yield Finding("warn", text)
    else:
        yield _worse(evidence, "accuracy", text, worse)


def mean_reward(evidence: Evidence) -> Iterator[Finding]:
    """How far the mean reward moved, and whether that may be chance, where it says more than right and wrong do."""
    moved = evidence.mean_reward
    if moved is None:
        return
    (low, high), before, after = moved.interval, moved.before, moved.after
    text = (
        f"the mean reward of the {count(moved.tasks)} {evidence.where.partition(' split')[0]} tasks went from "
        f"{before:.3f} to {after:.3f}: {after - before:+.3f}"
    )
    if evidence.rescored:
        same = "replies" if evidence.rescored.agent else "answer"
        scores = f"{count(evidence.rescored.scores)} of them have the same {same} at both ends and another score"
        yield Finding("fact", f"{text}; {scores}")
        return
    text += f", 95% interval {low:+.3f} to {high:+.3f} (permutation test {judged(moved.p)})"
    if worse_reward(evidence) and not fewer_right(evidence) and _is_blamed(evidence):
        tasks = f"it fell in {count(moved.lower)} of {count(moved.tasks)} tasks and rose in {count(moved.higher)}"
        yield _worse(evidence, "the reward", f"{text}; {tasks}", moved.lower)
    else:
        yield Finding("fact" if not moved.sign else "ok" if moved.sign > 0 else "warn", text)


def reward_parts(evidence: Evidence) -> Iterator[Finding]:
    """Parts of the held-out reward that fell or rose significantly."""
    if not evidence.where.startswith("held-out") or evidence.rescored:
        return
    said, fell, every = [], False, tables.held_out(evidence.run)["components"]
    for name, of in every.items():
        if of["p"] is not None and of["p"] <= SIGNIFICANT:
            down = of["after"] < of["before"]
            said.append(
                f"{name} {'fell' if down else 'rose'} ({figure(of['before'])} → {figure(of['after'])}, "
                f"{p_text(of['p'])})"
            )
            fell = fell or down
    if said:
        n = sum(of["p"] is not None for of in every.values())
        corrected = f"; p corrected for {n} parts" if n > 1 else ""
        text = f"parts of the held-out reward changed significantly: {', '.join(said)}{corrected}"
        yield Finding("warn" if fell else "ok", text)


def other_requests(evidence: Evidence) -> Iterator[Finding]:
    """Tasks whose first request is another one after training: both ends then measure different things."""
    unlike, looked, example = evidence.other_requests if _has_rate(evidence) else (0, 0, "")
    if unlike < FEW_UNLIKE or 2 * unlike < looked:
        return
    yield Finding(
        "warn",
        f"the messages of the first call of {count(unlike)} of {count(looked)} {evidence.where.partition(' split')[0]} "
        "tasks are not the same before and after training, so the two measure different things, unless only a time or "
        f"a random number differs, which is harmless ({example})",
    )


def _is_blamed(evidence: Evidence) -> bool:
    """Whether a loss is a problem of the learning rate that no other finding tells."""
    return not evidence.run.summary.get("solved") and _has_rate(evidence) and not _reward_fell_far(evidence)


def _has_rate(evidence: Evidence) -> bool:
    """Whether the run has a learning rate: a search for prompts has none."""
    return any(evidence.value(key) is not None for key in LR)


def _reward_fell_far(evidence: Evidence) -> bool:
    """Whether the reward of training, too, says that the learning rate is too large."""
    return not evidence.demonstrated and any(found.level == "problem" for found in collapsed(evidence))


def _worse(evidence: Evidence, what: str, text: str, worse: int) -> Finding:
    """Say that the accuracy or the mean reward is significantly lower after training, and what to change."""
    running = evidence.run.running
    end = "End the run with Ctrl-C, which keeps it. " if running else ""
    unlike = list(other_requests(evidence))
    first = (
        "First see why the agent asks other things than before training: that alone may be it. If not:\n"
        if unlike
        else ""
    )
    return problem(
        "learning-rate-too-large",
        f"{what} {'is falling' if running else 'fell'} significantly: {text}",
        seen=(worse, evidence.changed[3], "tasks"),
        settings=settings_of_rate(evidence),
        advice=f"{first}{end}{lower_rate(evidence)}",
        lost=1.0,
        explains=("entropy-collapse", "clip-fraction"),
    )


def without_room(evidence: Evidence) -> str:
    """Return why no training could have shown a significant gain on the tasks that were measured; else ''."""
    if evidence.ends is None:
        return ""
    first, last = evidence.ends
    both = first.keys() & last.keys()
    kind, limit = evidence.where.partition(" split")[0], evidence.value("run.report_tasks")
    limited = kind == "held-out" and limit and limit == dig(evidence.run.manifest, "data", "report", "tasks")
    right = sum(first[task][1] for task in both)
    return no_room(right, len(both), kind, limited_by="run.report_tasks" if limited else "")


def next_step(evidence: Evidence) -> str:
    """Return what to do after a gain, with the figures that say so: more steps, more tasks, or the weakest slice.

    Reads the last two validations, and the held-out rollouts once more if the others say nothing.
    """
    run = evidence.run
    if run.summary.get("solved"):
        return ""
    if learned := nothing_left(evidence):
        return learned
    steps, values = figures.validation(run)
    last = [measured_of(file) for file in run.of_mode("validation") if file.step in steps[-2:]]
    if len(values) > 2 and values[-1] == max(values) and len(last) == 2 and rose(*changed(*last)[:2]):
        shares = f"{percent(values[-2])}% at step {steps[-2]}, {percent(values[-1])}% at step {steps[-1]}"
        return f"Validation accuracy was still rising at the end ({shares}): {train_on(evidence)}"
    if never := evidence.classes_never_right:
        return f"In training, {never}"
    if more := more_tasks(evidence):
        return more
    if len(values) > 2:
        return weak_slice(evidence)
    seen = amount(len(values), "validation")
    said = f"{seen} {'does' if len(values) == 1 else 'do'} not show whether validation still rose: in the next run, "
    return no_more(evidence) or f"{said}a smaller algorithm.validate_every measures more often. Or {train_on(evidence)}"


def remarks(evidence: Evidence, held_out: Mapping[str, Any]) -> list[str]:
    """Return what to know about a run's held-out accuracy: intervals that overlap, a gain in one class, labels.

    `held_out` is what the function of that name returns; empty to leave the classes out.
    """
    accuracy, (better, worse) = figures.held_out(evidence.run)["accuracy"], evidence.learned
    p = sign_test(better, worse) if evidence.where.startswith("held-out") else None
    overlap = figures.overlap(accuracy["before_ci95"], accuracy["after_ci95"], p)
    said = [figures.PAIRED.format("")] if overlap else []
    if held_out and p is not None and p <= SIGNIFICANT and better > worse:
        said += tables.gain_alone(held_out)
    return [*said, *filter(None, [figures.held_out_labels(*figures.labels(evidence.run.manifest, "report"))])]


def weak_slice(evidence: Evidence) -> str:
    """Return which class of the held-out tasks is right significantly less often than the others, or ''.

    Fisher's exact test, one-sided; its p is multiplied by the number of classes that were looked at (Bonferroni).
    """
    found = []
    for name, parts in tables.held_out(evidence.run)["slices"].items():
        known = {part: (n, round(of["after"] * n)) for part, of in parts.items() if (n := of["n_after"])}
        every, rights = (sum(pair[i] for pair in known.values()) for i in (0, 1))
        for part, (n, right) in known.items():
            if name != "calls" and n >= FEW_TASKS:  # the calls are of rollouts, not of tasks
                found.append((_fewer(right, n, rights, every), name, part, right / n, n))
    p, name, part, share, n = min(found, default=(1.0, "", "", 0.0, 0))
    if not found or p * len(found) > SIGNIFICANT:
        return ""
    file = evidence.value("tasks.file")
    cure = f"add rows like these to {file} (tasks.file)." if file else f"see why: agentrig watch {_path(evidence)}"
    return f"Held-out tasks with {name} = {part} are right least often ({percent(share)}% of {n}): {cure}"


def _fewer(right: int, n: int, rights: int, every: int) -> float:
    """Return how likely n of all tasks have so few right ones by chance, or fewer."""
    ways = sum(math.comb(n, k) * math.comb(every - n, rights - k) for k in range(min(right, rights) + 1))
    return ways / math.comb(every, rights)


def more(evidence: Evidence) -> str:
    """Return what to do in a run without a fault and without a significant gain."""
    if room := without_room(evidence):
        return f"{room}."
    if never := evidence.classes_never_right:
        return f"In training, {never}"
    if found := more_tasks(evidence):
        return found
    if against := nothing_left(evidence) or no_more(evidence):
        return against
    limited = evidence.value("run.report_tasks") and dig(evidence.run.manifest, "data", "report", "tasks")
    judged = evidence.changed[3]
    if 0 < judged < 4 * least_gain() and not limited:
        # other shares hold out tasks that the model has seen the answers of
        warm_up = ", with a new warm-up if it is tasks.shares" if figures.labels(evidence.run.manifest)[0] else ""
        return (
            f"Few tasks, here {judged}, can show a large gain only. Measure more of them (for rows of a file: "
            f"tasks.shares, or more rows) and start anew{warm_up}, or {train_on(evidence)}"
        )
    measured = "measure more held-out tasks (run.report_tasks), or " if limited else ""
    said = f"{measured}{train_on(evidence)}"
    return f"{said[0].upper()}{said[1:]}"


def nothing_left(evidence: Evidence) -> str:
    """Say that more steps would hardly help because nearly all tasks that were measured are right; '' if fewer are."""
    after = evidence.ends[1] if evidence.ends else {}
    right = sum(correct for _, correct, *_ in after.values()) / max(1, len(after))
    if right < SOLVED:
        return ""
    split = evidence.where.partition(" split")[0]
    return f"More steps would hardly help: {percent(right)}% of the {split} tasks are right. Use harder tasks."


def no_more(evidence: Evidence) -> str:
    """Say which trend of the run means that more steps would hardly help, and what would; '' if none does."""
    steps, width = evidence.steps, quarter(evidence.steps)
    if fell := [found.text for found in collapsed(evidence) if found.level == "warn"]:
        return f"More steps would hardly help: {fell[0]}."
    signs = [found.text for found in fading(evidence) if found.level == "warn"]
    start = better_start(evidence, steps[-width:])
    rises = change(steps[-2 * width : -width], steps[-width:]).errors > LIKELY
    same, right, wrong, groups = (total(steps[-width:], key) for key in ("same", "same_right", "same_wrong", "groups"))
    # the entropy falls in runs that learn, too: groups with unlike rewards still teach
    if not signs or same <= ZERO_VARIANCE_LIMIT * groups or (rises and not start):
        return ""
    cure = (
        "Train again with a lower learning rate (algorithm.lr), a higher temperature (algorithm.temperature) or more "
        "rollouts of a task."
    )
    if right > 0.9 * same:
        cure = "Use harder tasks."
    elif start:
        cure = start
    elif wrong > 0.9 * same:
        cure = "Use easier tasks, or a model that is sometimes right."
    return f"More steps would hardly help: {'; '.join(signs)}. {cure}"


def more_tasks(evidence: Evidence) -> str:
    """Return the advice to train on more tasks where training tasks are surely right more often than others, or ''."""
    late, (right, scored), (known, n) = _late_and_measured(evidence)
    if not _is_above(right, scored, known, n) or other_mix(evidence):
        return ""
    split = evidence.where.partition(" split")[0]
    return (
        f"{percent(right / scored)}% of the training rollouts of the last {so_many(late)} are right, and "
        f"{percent(known / n)}% of the {split} tasks: train on more tasks ({_tasks_key(evidence)})."
    )


def _late_and_measured(evidence: Evidence) -> tuple[int, tuple[int, int], tuple[int, int]]:
    """Return how many steps are the last, their right and scored rollouts, and the right and all tasks at the end.

    All are 0 where these cannot be compared.
    """
    late = evidence.steps[-quarter(evidence.steps) :]
    right, scored = total(late, "right"), total(late, "scored")
    if evidence.ends is None or not evidence.ends[1] or not scored or evidence.demonstrated:
        return 0, (0, 0), (0, 0)
    return len(late), (right, scored), _right_of(evidence.ends[1])


def _right_of(measured: Measured) -> tuple[int, int]:
    return sum(correct for _, correct, *_ in measured.values()), len(measured)


def _is_above(right: float, scored: float, known: int, n: int) -> bool:
    """Whether the share of right training rollouts is surely and much above that of right tasks of a measurement."""
    sure = bool(scored) and at_least(right, scored) > at_most(known, n)
    return sure and right / scored - known / n > APART


def other_mix(evidence: Evidence) -> str:
    """Say of a slice that its mix of classes is why training rollouts are right more often than measured tasks; or ''.

    The shares of the training rollouts of each class are weighted as the classes of the measured tasks are (direct
    standardization); their interval is that of Kish's effective number of rollouts.
    """
    late, (right, scored), whole = _late_and_measured(evidence)
    if not _is_above(right, scored, *whole):
        return ""
    tried = tried_by_class(evidence.steps[-late:])
    split = evidence.where.partition(" split")[0]
    for name in dict.fromkeys(name for name, _ in evidence.classes):
        pairs = [
            (tried[of], _right_of(ends[1])) for of, ends in evidence.classes.items() if of[0] == name and of in tried
        ]
        known, n = (sum(measured[i] for _, measured in pairs) for i in (0, 1))
        if 2 * n < whole[1]:
            continue  # most of these tasks have classes that training does not have
        share = sum(of / n * hits / every for (hits, every), (_, of) in pairs)
        effective = 1 / sum((of / n) ** 2 / every for (_, every), (_, of) in pairs)
        if not _is_above(share * effective, effective, known, n):
            return (
                f"{percent(right / scored)}% of the training rollouts of the last {so_many(late)} are right, and "
                f"{percent(whole[0] / whole[1])}% of the {split} tasks, because the mix of classes differs: in the mix "
                f"by {name} of the {split} tasks it would be {percent(share)}% of the training rollouts"
            )
    return ""


def classes(evidence: Evidence) -> Iterator[Finding]:
    """Classes of tasks that became right significantly more or less often, and a mix of classes that differs."""
    rises, falls = moved_classes(evidence)
    if said := _moved(evidence, falls, rises):
        every = not falls and len(rises) == len(_large(evidence))
        yield Finding("ok" if every else "warn", said)
    if said := other_mix(evidence):
        yield Finding("warn", said)


def moved_classes(evidence: Evidence) -> tuple[Moved, Moved]:
    """Return which classes of the tasks measured at both ends rose significantly, and which fell, and the p of each.

    It is that of the sign test, multiplied by the number of classes that were looked at (Bonferroni).
    """
    rises, falls = dict[tuple[str, str], float](), dict[tuple[str, str], float]()
    looked = {} if evidence.rescored else _large(evidence)
    for of, (better, worse, _, _) in looked.items():
        p = min(1.0, sign_test(better, worse) * len(looked))
        if p <= SIGNIFICANT:
            (rises if better > worse else falls)[of] = p
    return rises, falls


def by_class(evidence: Evidence, most: int) -> tuple[str, list[tuple[str, ...]]]:
    """Return what p is corrected for, or '', and rows of classes; those whose accuracy changed by most points first.

    A row has the name, the accuracy before and after, of how many tasks, and the mean reward where rewards are graded.
    """
    moved = {of: p for found in moved_classes(evidence) for of, p in found.items()}
    graded = any(value not in (0, 1) for end in evidence.ends or () for *_, value in end.values())
    rows = []
    for of, ends in evidence.classes.items():
        pairs = [_right_of(end) for end in ends]
        shares = [right / n if n else None for right, n in pairs]
        rewards = [mean([value for *_, value in end.values()]) for end in ends]
        tasks = dict.fromkeys(str(n) for _, n in pairs)
        changes = [abs((after or 0.0) - (before or 0.0)) for before, after in (shares, rewards)]
        text = f"{' → '.join(tasks)} tasks{f', {p_text(moved[of])}' if of in moved else ''}"
        text += f", mean reward {' → '.join(plain(reward, 3) for reward in rewards)}" if graded else ""
        rows.append((changes, (" = ".join(of), *(f"{percent(share)}%" for share in shares), text)))
    first = sorted(rows, key=lambda row: row[0], reverse=True)[:most]
    n = len(_large(evidence))
    return f"p corrected for {n} classes" if moved and n > 1 else "", [row for _, row in first]


def _large(evidence: Evidence) -> dict[tuple[str, str], tuple[int, int, int, int]]:
    """Return what `changed` says of each class with enough tasks."""
    every = {of: changed(*ends) for of, ends in evidence.classes.items()}
    return {of: found for of, found in every.items() if found[3] >= FEW_TASKS}


def _moved(evidence: Evidence, falls: Moved, rises: Moved) -> str:
    """Name classes that fell or rose, the surest first."""
    said = []
    for verb, found in (("fell", falls), ("rose", rises)):
        named = []
        for of in sorted(found, key=lambda of: found[of])[:NAMED]:
            before, after = evidence.classes[of]
            both = [(before[task][1], after[task][1]) for task in before.keys() & after.keys()]
            ends = " → ".join(percent(sum(end) / len(both)) for end in zip(*both, strict=True))
            named.append(f"{' = '.join(of)} ({ends}% of {amount(len(both), 'task')}, {p_text(found[of])})")
        more = [f"{len(found) - NAMED} more"] if len(found) > NAMED else []
        said += [f"{verb} significantly in {', '.join([*named, *more])}"] if named else []
    return f"{evidence.where.partition(' split')[0]} accuracy {' and '.join(said)}" if said else ""


def fallen(evidence: Evidence) -> str:
    """Return what to do where classes of tasks fell, with their figures, in a run that is no worse otherwise; or ''."""
    rises, falls = moved_classes(evidence)
    if not falls:
        return ""
    slower = ", or with a lower learning rate (algorithm.lr)" if _has_rate(evidence) else ""
    return (
        f"Mind that {_moved(evidence, falls, rises)}. Before more steps, train on more tasks of the classes that fell "
        f"({_tasks_key(evidence)}){slower}; see what their answers became: agentrig watch {_path(evidence)}"
    )


def train_on(evidence: Evidence) -> str:
    """Return the advice to train for more steps, with the command: twice as many, or the rest of a run that stopped.

    The rest are the steps that the run asked for before a resume asked for fewer, to measure it as it was.
    It ends a sentence; no full stop follows a command, for it would become a part of that. A search for prompts has
    no steps to set, but a number of calls.
    """
    run = evidence.run
    steps = number(evidence.value("algorithm.steps"))
    done = max(run.done, int(number(run.summary.get("steps")) or 0))
    lost = bool(run.progress.get(SAVED)) and not any((run.directory / "checkpoints").glob("step-*"))
    if (calls := number(evidence.value("algorithm.max_calls"))) is not None:
        return f"let the search make more calls: {_resume(evidence, f'algorithm.max_calls={2 * calls:.0f}')}"
    if steps is None or lost:
        return "train for more steps."
    planned = int(number(run.manifest.get("most_steps")) or 0)
    wanted = planned if planned > done else 2 * done
    if against := against_resume(evidence):
        return f"train for more steps. {against}"
    return f"train for more steps: {_resume(evidence, '' if steps > done else f'algorithm.steps={wanted}')}"


def unfinished(evidence: Evidence) -> str:
    """Return where a run stopped before its gain was measured; '' for another run, or if its steps are lost."""
    run, done = evidence.run, evidence.run.done
    measured = figures.held_out(run)["accuracy"]["after"] is not None
    if measured or figures.status(run) not in ("stopped", "crashed") or (run.ended and not run.steps):
        return ""
    steps = number(evidence.value("algorithm.steps"))
    of = f" of {steps:.0f}" if steps and steps >= done else ""
    where = f"after step {done}{of}, and its gain was not measured" if done else "before its first step had ended"
    return f"The run stopped {where}."


def go_on(evidence: Evidence) -> str:
    """Return how a run that stopped goes on, or what has to be done before."""
    if against := against_resume(evidence):
        return against
    size = evidence.run.checkpoint.unread
    unsure = f"The checkpoint's {size / 1e9:.1f} GB were not compared with their digests: a resume does that. "
    return f"{unsure if size else ''}Go on with: {_resume(evidence)}"


def against_resume(evidence: Evidence) -> str:
    """Return why a resume would be refused now, as far as the run's files tell, and the cure; '' if nothing does."""
    run = evidence.run
    steps, checkpoints = number(evidence.value("algorithm.steps")), Checkpoints(run.directory / "checkpoints")
    try:
        check_links(run.directory)
        check_record(run.directory)
        apart = contradictions(run.directory, progress=run.progress, summary=run.summary, lines=run.steps)
        said = run.checkpoint.fault
        said = said or next((f"{text}. {file}: {CURES.get(file, RESTORE)}" for file, text in apart), "")
        saved = max(checkpoints.steps(), default=0)
        if steps and saved > steps:
            where = f"config.toml has algorithm.steps = {steps:.0f}, and the run has {saved} steps already"
            said = said or f"{where}. Give it more: {_resume(evidence, f'algorithm.steps={2 * saved}')}"
    except AgentrigError as error:
        said = str(error)
    said = re.sub(r"\.?\n *Nothing .*?was changed\. ?", ". ", said).strip()
    return f"A resume would be refused now: {said}" if said else ""


def _resume(evidence: Evidence, wanted: str = "") -> str:
    resumes = str(evidence.run.manifest.get("resumes") or RESUME)
    return resume_command(resumes, Path(_path(evidence)), wanted)


def _path(evidence: Evidence) -> str:
    return shlex.quote(str(evidence.run.directory))


def _tasks_key(evidence: Evidence) -> str:
    """Return the key that chooses the run's tasks: a table has a file."""
    return "tasks.file" if evidence.value("tasks.file") else "tasks.use"


def _more_labels(evidence: Evidence) -> str:
    """Return the command that warms up with more labels, '' if the starting model is not of a warm-up."""
    model = Path(str(evidence.value("algorithm.model") or ""))
    try:
        labels = len(read_object(model / "warmup.json")["labels"])
    except (OSError, ValueError, KeyError, TypeError):
        return " (--labels)."
    more = most_labels(evidence, 4 * labels) or 4 * labels
    if more <= labels:
        return " than the training split has tasks for."
    out = free_name(model.with_name(f"{model.name}-{more}"))
    return f": {warm_up_command(evidence, more, out, '--until', '0.2')}"
