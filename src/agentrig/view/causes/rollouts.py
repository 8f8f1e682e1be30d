"""Rollouts that taught nothing: they failed, their prompt was too long, or their answer was cut."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from agentrig.figures import SIGNIFICANT, count, number, percent, stratified_test
from agentrig.run.directory import see_rollouts
from agentrig.text import amount, cut
from agentrig.view.causes.evidence import Evidence, FailureReason, Rescored, StepFacts, total
from agentrig.view.causes.finding import Finding, problem
from agentrig.view.causes.trend import SURE, at_least, at_most, quarter
from agentrig.view.figures import series, totals

PART_LIMIT = 0.05
"""A larger share of failed rollouts is a problem, long before `run.failure_limit` stops the run."""

CUT_LIMIT = 0.1
"""A larger share of rollouts with a cut answer is a problem, if these get less reward."""

CURES: Mapping[str, tuple[tuple[str, ...], str]] = {
    "deadline": (
        ("runners.deadline_s",),
        "Give a rollout more time, or find out where the agent waits, by the seconds of each span.\n{see}",
    ),
    "llm-error": (("server.use",), "Calls to the model failed: look at the message, and at server.log."),
    "runner-died": (
        ("runners.threads", "runners.n"),
        "The process of the agent died: look for a lack of memory, or for a library that ends its process.",
    ),
    "infrastructure": (
        (),
        "Neither the agent nor the model failed: look at the message, at the machine's limits and its memory.",
    ),
    "adapter-error": (("adapter.use",), "The adapter raised: mend it, agentrig validate checks it."),
}
"""Kind of a failure to the settings and the advice; `{see}` is how to see rollouts."""


TOO_LONG = (
    *("algorithm.max_length", "algorithm.verl.data.max_prompt_length"),
    *("agent.table_info_truncate", "agent.max_tokens", "algorithm.max_tokens"),
)
"""The settings of prompts that are too long …"""

SHORTER = (
    "Prompt and max_tokens must fit into the server's context: let it take longer contexts, lower max_tokens, or put "
    "less into the prompt (cut schemas and results, fewer turns)."
)
"""… and the advice."""

LATE = "the reward ran past its budget"
"""How the reason begins if the reward took too long."""

OWN_TIME = "the program ran longer than time_s"
"""What it says if a program took longer than it may by its own setting, which ends it before `runners.deadline_s`."""

RAISED = "the reward raised "
"""How it begins if the reward raised; the place in its code comes at the end."""

PLACE = re.compile(r" \(([^()\s]+:\d+ in [^()]+)\)")
"""The place in the user's code at the end of a message, as `agentrig.errors.place_of` has it."""

ONE_PROCESS = "{} of {} tasks of one runner process, {} of {} of two"
EARLY = "{} of {} tasks of the first half that a process ran, {} of {} later ones"
"""Where the agent answered anew, in words: see `unlike_answers`."""

SHOWN = 3
"""So many causes of failures are named, the most frequent."""


def _invalid_cure(reason: str) -> tuple[tuple[str, ...], str]:
    """Return the settings and the advice for an outcome that the reward gave no score for this reason."""
    if reason.startswith(LATE):
        return ("run.reward_budget_s",), "Give the reward more time, or find out what it waits for."
    place = PLACE.findall(reason)
    if reason.startswith(RAISED):
        where = f" at {place[-1]}" if place else ""
        return ("reward.use",), f"The reward raised: mend its code{where}; agentrig validate checks it."
    return ("reward.use",), "The reward gave no score: mend what the message says; agentrig validate checks it."


def unanswered(evidence: Evidence) -> Iterator[Finding]:
    """Agents that return no answer, from the first step on: the reward has nothing to judge."""
    empty, scored = evidence.total("unanswered"), evidence.total("scored")
    first = next((facts for facts in evidence.steps if facts.scored), StepFacts(step=0))
    if 2 * empty <= scored or 2 * first.unanswered <= first.scored:
        return
    yield problem(
        "no-answers",
        f"the agent returned None in {count(empty)} of {count(scored)} scored rollouts: the reward has no answer to "
        "judge",
        seen=(empty, scored, "rollouts"),
        since=first.step,
        settings=("agent.use",),
        advice="Does the agent return its answer? Or does it read the model's text too strictly?\n"
        + see_rollouts(evidence.run.directory),
        explains=(
            *("tasks-too-hard", "constant-reward", "zero-variance-groups", "no-exploration", "low-entropy"),
            *("learning-rate-too-small", "weights-unchanged", "memorised"),
        ),
    )


def one_answer(evidence: Evidence) -> Iterator[Finding]:
    """Agents that answer the same whatever the model replies, to all tasks or to each: the reward judges no reply."""
    scored, groups, unlike = (evidence.total(key) for key in ("scored", "groups", "unlike_replies"))
    answers = {facts.only_answer for facts in evidence.steps if facts.scored}
    tasks = {task for facts in evidence.steps for task in facts.tried}
    if len(tasks) < 2 or evidence.total("same_right") == groups:
        return
    among = f"{count(unlike)} of {amount(count(groups), 'group')} (one task's rollouts in a step)"
    text = f"the model's replies differ in {among}"
    advice = "Look at how the agent makes its answer of the reply: does it find none in it, and return a constant?"
    if len(answers) == 1 and "" not in answers and unlike > 0.9 * groups:
        text += f", and all {count(scored)} answers are the same ({cut(answers.pop(), 100)})"
    elif unlike >= max(SHOWN, groups / 2) and evidence.total("one_reply") > 0.9 * unlike:
        text += ", the agent's answers do not: all rollouts of a group have the reply of one of them"
        advice = "Does the agent cache the replies, or ignore them?"
    else:
        return
    yield problem(
        "one-answer",
        text,
        seen=(scored, scored, "rollouts"),
        since=evidence.since("scored"),
        settings=("agent.use",),
        advice=f"{advice}\n" + see_rollouts(evidence.run.directory),
        explains=(
            *("tasks-too-hard", "constant-reward", "zero-variance-groups", "no-exploration", "low-entropy"),
            *("learning-rate-too-small", "weights-unchanged", "memorised"),
        ),
    )


def unlike_answers(evidence: Evidence) -> Iterator[Finding]:
    """Answers that differ although the model replied the same: something else than the model makes them.

    State that rollouts of a process share is named if the other answers depend on it by the exact test of both sides
    (`stratified_test`, p doubled for two such tests): whether one process ran a task both times, or two did; or whether
    the task was among the first half of those that its process ran in the first measurement, or came later.
    """
    found = evidence.rescored
    if found and found.agent:
        yield problem(
            "agent-contradicts-itself",
            f"{count(found.scores)} of {count(evidence.changed[3])} {evidence.where.partition(' split')[0]} tasks have "
            "the same requests and replies at both ends, another answer and another score: this change is the "
            f"agent's, not the model's{_of_processes(found)}",
            seen=(found.scores, found.same, "tasks with the same requests and replies"),
            settings=("agent.use",),
            advice="The agent must do the same before and after training: does it keep something from earlier "
            f"rollouts, or read what changes?\n{see_rollouts(evidence.run.directory)}",
            lost=1.0,
            explains=("tasks-too-easy", "zero-variance-groups", "constant-reward", "memorised", "no-exploration"),
        )
    pairs, unlike = evidence.total("same_replies"), evidence.total("unlike_answers")
    if unlike < SHOWN or 2 * unlike < pairs:
        return
    example = next(facts.unlike_example for facts in evidence.steps if facts.unlike_example)
    scores = evidence.total("unlike_scores")
    harm = f"{count(scores)} of these pairs have unlike scores, too, which teaches the model nothing (agent.use)"
    harm = harm if scores else "A time or a random number in the answer is harmless if the reward ignores it"
    yield Finding(
        "warn",
        f"the answer is not made from the model's replies alone: {count(unlike)} of {count(pairs)} pairs of rollouts "
        f"of a task with the same replies have unlike answers (for example {example}). Does the agent use the reply? "
        f"{harm}",
    )


def _of_processes(found: Rescored) -> str:
    for tally, sides in ((found.one_process, ONE_PROCESS), (found.early, EARLY)):
        if 2 * stratified_test([tally]) <= SIGNIFICANT:
            (new, n), (other, m) = tally
            return f", and depends on what its process ran before ({sides.format(new, n, other, m)})"
    return ""


def late(evidence: Evidence) -> Iterator[Finding]:
    """Answers that the reward scored as `timeout`: they are trained on with the value that it gave them."""
    n, scored, reasons = evidence.total("late"), evidence.total("scored"), Counter[str]()
    for facts in evidence.steps:
        reasons.update(facts.late_reasons)
    if not n:
        return
    reason, times = reasons.most_common(1)[0]
    often = "" if times == n else f"most often ({count(times)} times) "
    value = sum(facts.late_reward for facts in evidence.steps) / n
    settings = "run.reward_budget_s, reward.use" if "budget" in reason else "reward.use"
    yield Finding(
        "warn" if n > PART_LIMIT * scored else "fact",
        f"the reward scored {count(n)} of {count(scored)} training answers as `timeout`"
        f"{f': {often}{reason}' if reason else ''}. They count as wrong and were trained on with the value that it "
        f"gave them, {value:.3g} on average (settings: {settings})",
    )


def failures(evidence: Evidence) -> Iterator[Finding]:
    """Rollouts that failed."""
    rollouts, failed, kinds = evidence.total("rollouts"), 0, dict[str, int]()
    for facts in evidence.steps:
        for kind, n in facts.failures.items():
            kinds[kind] = kinds.get(kind, 0) + n
    if not rollouts:  # without files of rollouts, the metrics have the counts
        rollouts = sum(int(number(line.get("rollouts")) or 0) for line in evidence.run.steps)
        kinds = totals(evidence.run, "failures")
    failed = sum(kinds.values())
    if not rollouts:
        return
    text = (
        f"{count(failed)} of {count(rollouts)} training rollouts failed ({failed / rollouts:.1%}) and were not trained "
        "on"
    )
    if not failed:
        yield Finding("ok", f"none of {count(rollouts)} training rollouts failed")
        return
    worst = max(kinds, key=lambda kind: (kinds[kind], kind))
    since = next((f.step for f in evidence.steps if f.failures.get(worst)), None)
    reasons, examples = Counter[FailureReason](), dict[FailureReason, str]()
    for facts in evidence.steps:
        reasons.update(facts.reasons_of_failures)
        examples = {**facts.examples, **examples}
    listed = ", ".join(f"{count(n)} {kind}" for kind, n in sorted(kinds.items(), key=lambda item: -item[1]))
    text += f": {listed}{_most_frequent(reasons, examples)}"
    if at_least(failed, rollouts) <= PART_LIMIT:
        yield Finding("fact" if evidence.run.running else "warn", text)
        return
    if worst == "reward-invalid":
        known = [reason for reason, _ in reasons.most_common() if reason[0] == worst][:SHOWN]
        cures = [_invalid_cure(examples[reason]) for reason in known] or [_invalid_cure("")]
        settings = tuple(dict.fromkeys(name for names, _ in cures for name in names))
        advice = "\n".join(dict.fromkeys(text for _, text in cures)).replace("{", "{{").replace("}", "}}")
    else:
        settings, advice = CURES.get(worst, ((), "{see}"))
        most = next((reason for reason, _ in reasons.most_common() if reason[0] == worst), None)
        if most is not None and OWN_TIME in examples[most]:
            settings = ("agent.time_s",)
    yield problem(
        "failures",
        text,
        seen=(failed, rollouts, "rollouts"),
        since=since,
        settings=settings,
        advice=advice.format(see=see_rollouts(evidence.run.directory)),
        explains=("zero-variance-groups",),
    )


def _most_frequent(reasons: Counter[FailureReason], examples: Mapping[FailureReason, str]) -> str:
    """Return an example of each of the most frequent causes of failures, and how often each was, as the end of a text.

    Only the first line of a message is shown.
    """
    told = {reason: next(iter(examples[reason].strip().splitlines()), "")[:200] for reason in reasons}
    shown = [(n, told[reason]) for reason, n in reasons.most_common() if told[reason]]
    if len(shown) < 2:
        return "".join(f"; for example: {example}" for _, example in shown)
    all_of_them = f" (of {count(len(shown))} causes)" if len(shown) > SHOWN else ""
    return f"; most often{all_of_them}: " + "; ".join(f"{count(n)} x {example}" for n, example in shown[:SHOWN])


def overlong_prompts(evidence: Evidence) -> Iterator[Finding]:
    """Prompts that leave no room for an answer."""
    rollouts, refused = evidence.total("rollouts"), evidence.total("overlong")
    steps, told = series(evidence.run, "algorithm", "overlong_prompts")
    overlong = max(refused, int(sum(told)))
    if not rollouts or at_least(overlong, rollouts) <= PART_LIMIT / 5:
        return
    since = evidence.since("overlong") or next((s for s, n in zip(steps, told, strict=True) if n), None)
    yield problem(
        "overlong-prompts",
        f"{count(overlong)} of {count(rollouts)} training rollouts had a prompt that is longer than the model's "
        "context leaves room for",
        seen=(overlong, rollouts, "rollouts"),
        since=since,
        settings=evidence.setting(*TOO_LONG),
        advice=SHORTER,
        lost=min(1.0, overlong / rollouts),
        explains=("failures", "call-errors", "zero-variance-groups"),
    )


def truncated_answers(evidence: Evidence) -> Iterator[Finding]:
    """Answers that were cut at the token limit, where these get less reward."""
    steps = evidence.steps
    scored, cut = total(steps, "scored"), total(steps, "cut")
    late = steps[-quarter(steps) :]
    if at_least(total(late, "cut"), total(late, "scored")) <= CUT_LIMIT:  # also if it stopped by itself
        return
    whole = scored - cut
    cut_mean = sum(facts.cut_reward for facts in steps) / cut
    text = f"{count(cut)} of {count(scored)} scored rollouts had an answer that was cut at the token limit"
    if _harmless(steps, cut, whole):
        text += f"; their mean reward, {cut_mean:.3g}, is no lower than that of the others"
        right, others = total(steps, "cut_right"), total(steps, "right") - total(steps, "cut_right")
        less = at_most(right, cut) < at_least(others, whole)
        text += (
            f", although {percent(right / cut)}% of them are right, and {percent(others / whole)}% of those"
            if less
            else ""
        )
        yield Finding("warn" if less else "fact", text)
        return
    if whole:
        mean = sum(facts.reward - facts.cut_reward for facts in steps) / whole
        text += f": their mean reward is {cut_mean:.3g}, that of the others {mean:.3g}"
    else:
        text += f": their mean reward is {cut_mean:.3g}"
    yield problem(
        "truncated-answers",
        text,
        seen=(cut, scored, "rollouts"),
        since=next((facts.step for facts in steps if facts.cut), None),
        settings=evidence.setting(
            "agent.max_tokens", "algorithm.max_tokens", "algorithm.verl.data.max_response_length"
        ),
        advice="Raise the token limit, or ask for shorter answers in the prompt.",
        explains=("tasks-too-hard", "zero-variance-groups", "constant-reward", "failures"),
    )


def _harmless(steps: Sequence[StepFacts], cut: int, whole: int) -> bool:
    """Whether cut answers get about as much reward as the others; without others, whether they get any."""
    reward, cut_reward = sum(f.reward for f in steps), sum(f.cut_reward for f in steps)
    scored = cut + whole
    if whole < max(5, scored // 50):
        differ = total(steps, "groups") - total(steps, "same")
        return at_most(total(steps, "right"), scored) > PART_LIMIT or differ > 0.2 * total(steps, "groups")
    spread = max(1e-12, sum(f.squares for f in steps) / scored - (reward / scored) ** 2)
    gap = (reward - cut_reward) / whole - cut_reward / cut
    return gap < SURE * math.sqrt(spread * (1 / cut + 1 / whole))
