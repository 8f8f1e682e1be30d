"""A reward that rises while another one, which is only logged, does not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from agentrig.figures import count, figure, mean, number
from agentrig.view import figures
from agentrig.view.causes.evidence import Evidence
from agentrig.view.causes.finding import Finding, problem
from agentrig.view.causes.trend import LIKELY, at_least, trend
from agentrig.view.reading import SECOND, dig, mapping

MOST = 0.5
"""The share of scored rollouts that one reason must be surely above to be named."""

APART = 0.1
"""So far a second reward falls behind the trained one, relative to the reward's range, until it is named."""


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
        width = max(1, len(rows) // 4)
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
            f"from {figure(logged[0])} to {figure(logged[1])}: the model learns what only the trained reward pays for",
            seen=(int(differ), evidence.total("scored"), "rollouts"),
            since=since,
            settings=("reward.use", "run.second_reward"),
            advice="Read the rollouts in which the two disagree (the report shows the latest), and close the gap in "
            "the trained reward.",
            lost=1.0,
        )
