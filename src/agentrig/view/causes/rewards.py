"""A reward that rises while another one, which is only logged, does not."""

from __future__ import annotations

from collections.abc import Iterator

from agentrig.figures import mean, number
from agentrig.view import figures
from agentrig.view.causes.evidence import Evidence
from agentrig.view.causes.finding import Finding, problem
from agentrig.view.causes.trend import LIKELY, trend
from agentrig.view.reading import SECOND, mapping
from agentrig.view.text import figure

APART = 0.1
"""So far a second reward falls behind the trained one, relative to the reward's range, until it is named."""


def second_rewards(evidence: Evidence) -> Iterator[Finding]:
    """Second rewards that the trained reward has left behind."""
    run = evidence.run
    names = dict.fromkeys(name for line in run.steps for name in mapping(line.get(SECOND)))
    for name in names:
        rows = [
            (int(line["step"]), reward, second)
            for line in run.steps
            if (reward := number(line.get("reward"))) is not None
            and (second := number(mapping(mapping(line.get(SECOND)).get(name)).get("mean"))) is not None
        ]
        gaps = [reward - second for _, reward, second in rows]
        if len(rows) < 4 or trend(gaps) <= LIKELY or trend([second for *_, second in rows]) > LIKELY:
            continue
        width = max(1, len(rows) // 4)
        first, last = (mean(part) or 0.0 for part in (gaps[:width], gaps[-width:]))
        spread = mean(figures.series(run, "reward_std")[1]) or 1.0
        if last - first <= APART * 2 * spread:
            continue
        began, ended = rows[:width], rows[-width:]
        trained = [mean([r for _, r, _ in part]) for part in (began, ended)]
        logged = [mean([a for *_, a in part]) for part in (began, ended)]
        since = next(step for (step, _, _), gap in zip(rows, gaps, strict=True) if gap > (first + last) / 2)
        yield problem(
            "second-reward-behind",
            f"the trained reward went from {figure(trained[0])} to {figure(trained[1])}, and the second reward {name} "
            f"from {figure(logged[0])} to {figure(logged[1])}: the model learns what only the trained reward pays for",
            count=_differing(evidence, str(name)),
            of=evidence.total("scored"),
            unit="rollouts",
            since=since,
            settings=("reward.use", "run.second_reward"),
            advice="Read the rollouts in which the two disagree (the report shows the latest), and close the gap in "
            "the trained reward.",
            lost=1.0,
        )


def _differing(evidence: Evidence, name: str) -> int:
    found = (mapping(mapping(line.get(SECOND)).get(name)) for line in evidence.run.steps)
    return int(sum(number(second.get("differs")) or 0 for second in found))
