"""A reward that contradicts itself, pays for wrong answers, or rises while one that is only logged does not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from agentrig.correctness import as_much
from agentrig.figures import count, figure, mean, number
from agentrig.view import figures
from agentrig.view.causes.evidence import RESCORED, RESCORED_N, Evidence
from agentrig.view.causes.finding import Finding, problem
from agentrig.view.causes.rollouts import unlike_answers
from agentrig.view.causes.trend import LIKELY, at_least, more_right, quarter, rose, so_many, trend
from agentrig.view.reading import SECOND, RunData, dig, mapping

MOST = 0.5
"""The share of scored rollouts that one reason must be surely above to be named."""

APART = 0.1
"""So far a second reward falls behind the trained one, relative to the reward's range, until it is named."""

OVERPAID = 0.05
"""The share of the latest answers that must surely get the full reward and not be correct, to be named."""


def two_scores(evidence: Evidence) -> Iterator[Finding]:
    """A reward that depends on more than task and answer: on the time, on its earlier calls, on chance."""
    found, repeated, n = evidence.rescored, evidence.total("repeated"), evidence.total("contradicted")
    if evidence.demonstrated:
        repeated = n = 0
    if found and not found.agent:
        verdicts = found.better + found.worse
        scores = f" ({count(found.scores)} their score)" if found.scores > verdicts else ""
        changed = f"{count(verdicts)} of these changed their verdict{scores}"
        if not verdicts:
            changed = f"{count(found.scores)} of these changed their score"
        what = "the gain" if rose(*evidence.changed[:2]) and not more_right(evidence) else "this change"
        text = (
            f"{count(found.same)} of {count(evidence.changed[3])} {evidence.where.partition(' split')[0]} answers are "
            f"the same before and after, and {changed}; so {what} is the reward's, not the model's"
        )
        seen = (found.scores, found.same, "answers")
    elif n >= max(RESCORED_N, RESCORED * repeated):
        text = (
            f"of {count(repeated)} answers that several training rollouts of a task gave in a step, {count(n)} are "
            "both right and wrong, of the same replies of the model"
        )
        seen = (n, repeated, "answers")
    else:
        return
    yield problem(
        "reward-contradicts-itself",
        f"the reward gives one answer two scores: {text}",
        seen=seen,
        since=evidence.since("contradicted") if n else None,
        settings=("reward.use",),
        advice="A reward must depend on the task and the answer alone: not on the time, on its earlier calls, or on "
        "random numbers. A model that judges needs temperature 0.",
        lost=1.0,
        explains=(
            "reward-exploited", "second-reward-behind", "truncated-answers", "tasks-too-hard", "tasks-too-easy",
            "constant-reward", "zero-variance-groups", "credit-leaves-out", "memorised", "entropy-collapse",
            "low-entropy", "no-exploration", "learning-rate-too-large", "learning-rate-too-small", "warmup-too-long",
            "kl-too-strong", "clip-fraction",
        ),
    )  # fmt: skip


def contradiction(run: RunData) -> str:
    """Return how a run's reward or its agent contradicts itself, in the words of that cause; '' if none does."""
    evidence = Evidence.of(run)
    found = [*two_scores(evidence), *unlike_answers(evidence)]
    return next((finding.text for finding in found if finding.cause), "")


def exploited(evidence: Evidence) -> Iterator[Finding]:
    """Answers that are not correct, by the reward's own word, and get as much as the best correct ones."""
    steps, late = evidence.steps, quarter(evidence.steps)
    full = max((facts.right_most for facts in steps if facts.right_most is not None), default=None)
    if full is None:
        return
    paid = [facts.overpaid if as_much(facts.wrong_most or 0.0, full) else 0 for facts in steps]
    n, scored = sum(paid[-late:]), sum(facts.scored for facts in steps[-late:])
    if at_least(n, scored) <= OVERPAID:
        return
    example = next(facts.overpaid_example for facts, k in zip(steps[::-1], paid[::-1], strict=True) if k)
    text = (
        f"{count(n)} of {count(scored)} answers of the last {so_many(late)} got the "
        f"full reward, {figure(full)}, although the reward says correct=False, for example {example}"
    )
    if more_right(evidence):
        yield Finding("warn", f"{text}. Close this gap in the reward (reward.use) before the model learns to use it")
        return
    yield problem(
        "reward-exploited",
        text,
        seen=(sum(paid), evidence.total("scored"), "rollouts"),
        since=next(facts.step for facts, k in zip(steps, paid, strict=True) if k),
        settings=("reward.use",),
        advice="The model learns what is paid for. Let the reward give such answers less, then train again from the "
        "starting model.",
        lost=1.0,
        explains=(
            "zero-variance-groups", "entropy-collapse", "no-exploration", "low-entropy", "learning-rate-too-large",
            "tasks-too-easy", "second-reward-behind", "memorised",
        ),
    )  # fmt: skip


def one_reason(evidence: Evidence) -> Iterator[Finding]:
    """One reason that the reward gives for most wrong answers, where most answers are wrong."""
    reasons = Counter[str]()
    for facts in evidence.steps:
        reasons.update(facts.reasons)
    scored = evidence.total("scored")
    for reason, n in reasons.most_common(1):
        if len(reasons) > 1 and at_least(n, scored) > MOST:  # a reward that has one reason only says nothing
            text = f"{count(n)} of {count(scored)} scored training rollouts are wrong for one reason: {reason}"
            yield Finding("warn", f"{text}. Read one (agentrig watch): does the agent show the model what it needs?")


def second_rewards(evidence: Evidence) -> Iterator[Finding]:
    """Second rewards that the trained reward has left behind."""
    run = evidence.run
    names = dict.fromkeys(name for line in run.steps for name in mapping(line.get(SECOND)))
    for name in names:
        rows = [
            (int(line["step"]), reward, second)
            for line in run.steps
            if (reward := number(line.get("reward"))) is not None
            and (second := number(dig(line, SECOND, name, "mean"))) is not None
        ]
        gaps = [reward - second for _, reward, second in rows]
        if len(rows) < 4 or trend(gaps) <= LIKELY or trend([second for *_, second in rows]) > LIKELY:
            continue
        width = quarter(rows)
        first, last = (mean(part) or 0.0 for part in (gaps[:width], gaps[-width:]))
        spread = mean(figures.series(run, "reward_std")[1]) or 1.0
        if last - first <= APART * 2 * spread:
            continue
        parts, differ = (rows[:width], rows[-width:]), sum(figures.series(run, SECOND, name, "differs")[1])
        trained, logged = ([mean([row[i] for row in part]) for part in parts] for i in (1, 2))
        since = next(step for (step, _, _), gap in zip(rows, gaps, strict=True) if gap > (first + last) / 2)
        yield problem(
            "second-reward-behind",
            f"the trained reward went from {figure(trained[0])} to {figure(trained[1])}, and the second reward {name} "
            f"from {figure(logged[0])} to {figure(logged[1])} (means of the first and the last {so_many(width)}): "
            "the model learns what only the trained reward pays for",
            seen=(int(differ), evidence.total("scored"), "rollouts"),
            since=since,
            settings=("reward.use", "run.second_reward"),
            advice="Read the rollouts in which the two disagree (the report shows the latest), and close the gap in "
            "the trained reward.",
            lost=1.0,
        )
