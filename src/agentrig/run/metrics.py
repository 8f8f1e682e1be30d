"""Figures of a step's rollouts: failures, nodes, parts of rewards, and what second rewards say."""

from __future__ import annotations

import json
import logging
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from agentrig.algorithms import Measurement
from agentrig.credit import rewards_of_calls, turns_compared
from agentrig.figures import mean
from agentrig.rewards import Score, rounded
from agentrig.rollouts import Rollout, mode_name
from agentrig.text import alike, cut, gist, storable

log = logging.getLogger(__name__)

SHOWN = 3
"""So many causes of a kind of failure are named, the most frequent."""


def count_failures(rollouts: Sequence[Rollout]) -> dict[str, int]:
    """Return how many rollouts failed, by kind."""
    return dict(Counter(r.failure for r in rollouts if r.failure is not None))


def reward_figures(rollouts: Sequence[Rollout], credit: Any = None) -> dict[str, Any]:
    """Return what a step's line of `metrics.jsonl` says of rewards: their mean and spread, correct answers, groups.

    Args:
        credit: The settings of the run's credit: `turn` compares only calls of one node and turn.
    """
    groups: dict[str, list[Rollout]] = defaultdict(list)
    values = [r.value for r in rollouts if r.value is not None]
    for r in rollouts:
        if r.value is not None:
            groups[r.group].append(r)
    return {
        "reward": mean(values),
        "reward_std": statistics.pstdev(values) if values else None,
        "accuracy": Measurement.of(rollouts).accuracy,
        "rollouts": len(rollouts),
        "failures": count_failures(rollouts),
        "groups": len(groups),
        "zero_variance_groups": mean([float(len({r.value for r in of}) == 1) for of in groups.values()]),
        "unlike_calls": mean([float(_unlike_calls(of, credit)) for of in groups.values()]),
    }


def _unlike_calls(group: Sequence[Rollout], credit: Any) -> bool:
    turns = turns_compared(group, credit)
    if turns is None:
        turns = [[value for r in group for value in rewards_of_calls(r) if value is not None]]
    return any(len(set(map(rounded, of))) > 1 for of in turns)


def untaught_groups(rollouts: Sequence[Rollout], calls: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the share of groups with a score of which no call was trained with an advantage other than 0.

    Args:
        rollouts: Of a step.
        calls: Where its calls went: `agentrig.ledger.StepTotals.rows`.

    Returns:
        None if the algorithm does not say what it did with the calls.
    """
    if any(call["place"] == "handed_over" for call in calls):
        return None
    taught = {call["rollout"] for call in calls if call["place"] == "trained" and _has_advantage(call)}
    groups: dict[str, bool] = {}
    for rollout in rollouts:
        if rollout.value is not None:
            groups[rollout.group] = groups.get(rollout.group, False) or rollout.id in taught
    return mean([float(not found) for found in groups.values()])


def _has_advantage(call: Mapping[str, Any]) -> bool:
    """Whether the advantage of a call is not 0, or that of one of its tokens; one that is not known may be."""
    return call["advantage"] != 0 or any(json.loads(call["token_advantages"] or "[]"))


def failure_reasons(rollouts: Sequence[Rollout]) -> dict[str, dict[str, int]]:
    """Return, by kind of failure, an example of each cause and how many rollouts it failed, the most frequent first."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    examples: dict[tuple[str, str], str] = {}
    for rollout in rollouts:
        if (kind := rollout.failure) is not None:
            reason = reason_of(rollout)
            counts[kind][alike(reason)] += 1
            examples.setdefault((kind, alike(reason)), reason)
    return {kind: {examples[kind, cause]: n for cause, n in causes.most_common()} for kind, causes in counts.items()}


def failure_lines(reasons: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return a line for each kind of failure, the most frequent first: how many, and examples of `failure_reasons`."""
    lines = []
    for kind, examples in sorted(reasons.items(), key=lambda item: -sum(item[1].values())):
        shown = list(examples.items())[:SHOWN]
        why = f": for example {cut(shown[0][0], 2000)}"
        if len(shown) > 1:
            why = f", of {len(examples)} causes: {'; '.join(f'{n} x {gist(text, 500)}' for text, n in shown)}"
        lines.append(f"{sum(examples.values())} x {kind}{why}")
    return lines


def warn_of_new_failures(rollouts: Sequence[Rollout], known: Collection[str], *, step: int, mode: str) -> None:
    """Warn of each kind of failure that a run has not had before, with how many rollouts and an example."""
    failed = [r for r in rollouts if r.failure is not None and r.failure not in known]
    first, reasons = {r.failure: r for r in reversed(failed)}, failure_reasons(failed)
    for kind, count in count_failures(failed).items():
        of = f", of {len(reasons[kind])} causes" if len(reasons[kind]) > 1 else ""
        why = gist(storable(reason_of(first[kind])), 500)
        log.warning(
            "step %d: %d of %d %s rollouts failed (%s), for example at task %s: %s",
            *(step, count, len(rollouts), mode_name(mode), f"{kind}{of}", first[kind].task.id, why),
        )


def count_nodes(rollouts: Sequence[Rollout]) -> dict[str, dict[str, int]]:
    """Return, by graph node, how many LLM calls were seen and how many became triplets."""
    seen: Counter[str] = Counter()
    trained: Counter[str] = Counter()
    for rollout in rollouts:
        for call in rollout.trace.llm_calls():
            nodes = rollout.trace.nodes(call)
            seen[nodes[0] if nodes else "(no node)"] += 1
        for triplet in rollout.triplets:
            trained[triplet.node or "(no node)"] += 1
    return {"seen": dict(seen), "trained": dict(trained)}


Scored = tuple[float, Mapping[str, Any]]
"""The value of a score, and its components."""


def component_means(scores: Iterable[Scored]) -> dict[str, float]:
    """Return the mean of each component of scores, over those that have it."""
    found: dict[str, list[float]] = defaultdict(list)
    for _, components in scores:
        for name, value in components.items():
            found[name].append(float(value))
    return {name: statistics.fmean(values) for name, values in found.items()}


def told_components(scores: Iterable[Scored]) -> list[str]:
    """Return the components that say more than the value: in some score they are another number."""
    names = (name for value, of in scores for name in of if not math.isclose(of[name], value, abs_tol=1e-9))
    return list(dict.fromkeys(names))


def second_reward_figures(
    rollouts: Sequence[Rollout], scores: Mapping[str, Mapping[str, Score]], name: str
) -> dict[str, Any]:
    """Return the figures of a second reward in a step, beside the reward that is trained on.

    Args:
        rollouts: Those that did not fail.
        scores: Rollout id to the score of each second reward.

    Returns:
        `n`, how many it scored; `mean` of their values; `differs`, how many have another value than the reward's;
        `agreement`, on how large a share of those that both judged correct or not they agree, or None; `invalid`, how
        many it could not score.
    """
    pairs = [(scores[r.id][name], r) for r in rollouts if name in scores.get(r.id, {})]
    scored = [(score, r) for score, r in pairs if score.value is not None]
    values = [score.value for score, _ in scored if score.value is not None]
    judged = [score.correct == r.correct for score, r in scored if score.correct is not None and r.correct is not None]
    return {
        "n": len(scored),
        "mean": mean(values),
        "differs": sum(score.value != r.value for score, r in scored),
        "agreement": mean([float(same) for same in judged]) if judged else None,
        "invalid": len(pairs) - len(scored),
    }


def line_of(rollout: Rollout) -> str:
    """Return a rollout's task, answer and score, for messages; or how it failed."""
    if rollout.failure:
        return f"{rollout.task.id}: failed: {rollout.failure}: {reason_of(rollout)[:200]}"
    details = str(dict(rollout.score.details)) if rollout.score and rollout.score.details else ""
    return f"{rollout.task.id}: {str(rollout.outcome.answer)[:120]!r} -> {rollout.value:g} {details[:200]}".rstrip()


def reason_of(rollout: Rollout) -> str:
    """Return why a rollout failed, as text."""
    if rollout.outcome.failure is not None:
        return rollout.outcome.message or rollout.outcome.failure
    details = rollout.score.details if rollout.score is not None else {}
    return str(details.get("reason", "the reward could not score it"))
