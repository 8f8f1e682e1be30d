"""What to know before you trust a run: its learning checks, warnings and failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

import attrs

from agentrig._moved import former
from agentrig.report import figures
from agentrig.report.reading import RunData, mapping, number, rollout_rows
from agentrig.report.samples import Pairs
from agentrig.report.text import count, figure

ZERO_VARIANCE_LIMIT = 0.8
"""Warn if a larger share of groups has zero variance in the reward: there is little to learn from."""

PART_LIMIT = 0.05
"""Warn if a larger share of rollouts failed, long before `run.failure_limit` stops the run."""


@attrs.frozen
class Finding:
    """One line of the page: `ok`, or `warn` for a warning."""

    level: Literal["ok", "warn"]
    text: str


def findings(run: RunData, pairs: Pairs | None) -> list[Finding]:
    """Return the run's own warnings, and what its metrics say about whether it learned."""
    warnings = [*_strings(run.manifest.get("warnings")), *_strings(run.summary.get("warnings"))]
    found = [Finding("warn", text) for text in dict.fromkeys(warnings)]
    if run.error:
        found.append(Finding("warn", f"{run.error.get('error')}: {run.error.get('message')}"))
    found += [Finding("ok", text) for text in _strings(run.summary.get("notes"))]
    if run.summary.get("solved"):
        found.append(
            Finding("ok", "the tasks are solved: every rollout of the last steps was correct, so the run ended")
        )
    if run.steps:
        found += [
            *_trained(run),
            *_weights(run),
            *_tokens(run),
            *_delivery(run),
            *_stale(run),
            *_zero_variance(run),
            *_failed(run),
        ]
    if pairs is not None:
        found += _changed(pairs)
    for plugin, times in mapping(run.summary.get("observer_errors")).items():
        found.append(Finding("warn", f"observer {plugin} failed {times} times; the run continued without it"))
    return found


def _strings(value: Any) -> list[str]:
    return [str(v) for v in value] if isinstance(value, list) else []


def _trained(run: RunData) -> list[Finding]:
    trained = figures.totals(run, "nodes", "trained")
    total = sum(trained.values())
    if not total:
        return [Finding("warn", "nothing was trained: no step logged a triplet")]
    empty = [int(r["step"]) for r in run.steps if number(r.get("transitions_per_rollout")) == 0]
    if empty:
        return [Finding("warn", f"{len(empty)} steps had nothing to train on, the first is step {empty[0]}")]
    return [Finding("ok", f"every step had calls to train on, {count(total)} in all ({', '.join(sorted(trained))})")]


def _weights(run: RunData) -> list[Finding]:
    steps, values = figures.series(run, "algorithm", "weight_change")
    logged = [r for r in run.steps if "weight_change" in mapping(r.get("algorithm"))]
    if len(values) < len(logged):
        return [Finding("warn", "the weight change was NaN or infinite in some step: training diverged")]
    if not values:
        return []
    unchanged = [s for s, v in zip(steps, values, strict=True) if v == 0]
    if unchanged:
        text = f"the weights did not change in {len(unchanged)} steps, the first is step {unchanged[0]}"
        return [Finding("warn", text)]
    return [
        Finding("ok", f"the weights changed in every step (L2 norm {figure(min(values))} to {figure(max(values))})")
    ]


def _tokens(run: RunData) -> list[Finding]:
    """Say how many tokens of the updates were computed, where the algorithm computes shared ones once."""
    traced, computed = (sum(figures.series(run, "algorithm", name)[1]) for name in ("traced_tokens", "computed_tokens"))
    if not traced:
        return []
    text = f"the updates traced {count(int(traced))} tokens and computed {count(int(computed))}"
    if computed < traced:
        text += f": {1 - computed / traced:.0%} were saved, because calls share them or have no advantage"
    found = [Finding("ok", text)]
    again = sum(figures.series(run, "algorithm", "repeated_tokens")[1])
    if again:
        found.append(
            Finding(
                "warn",
                f"{count(int(again))} of the computed tokens ({again / computed:.0%}) were computed again, because "
                "some groups don't fit into one pass: a larger algorithm.tokens_per_batch saves them",
            )
        )
    return found


def _delivery(run: RunData) -> list[Finding]:
    """Say how often the server was shown to answer with the trained weights."""
    if "delivery" not in run.summary:  # a run of an earlier version
        return []
    seen = mapping(run.summary["delivery"])
    algorithm = mapping(mapping(run.manifest.get("components")).get("algorithm")).get("name") or "this algorithm"
    proofs, arrived = int(number(seen.get("proofs")) or 0), int(number(seen.get("arrived")) or 0)
    notes = [Finding("warn", text) for text in _strings(seen.get("notes"))]
    if seen.get("on") is False:
        return [Finding("warn", "nothing shows that the trained weights arrived: run.delivery is false")]
    if not proofs:
        return [
            Finding(
                "warn",
                f"nothing shows that the trained weights arrived at the model's server: {algorithm} has no learner "
                "that could be asked",
            )
        ]
    gap, bound = number(seen.get("difference")), number(seen.get("bound"))
    text = f"weights arrived {count(arrived)} of {count(proofs)} times"
    if gap is not None:
        text += f", largest difference of a log-probability {figure(gap)} (bound {figure(bound)})"
    tensors = int(number(seen.get("tensors")) or 0)
    if tensors:
        text += f", {count(tensors)} tensors equal bit by bit"
    calls = number(seen.get("calls_difference"))
    if calls is not None:
        text += f"; recorded calls agree with the learner within {figure(calls)}"
    return [Finding("ok" if arrived == proofs else "warn", text), *notes]


def _stale(run: RunData) -> list[Finding]:
    """Say how many steps learned from rollouts of earlier weights, and how much of that was corrected."""
    behind = [row for row in run.steps if (number(row.get("max_staleness")) or 0) > 0]
    if not behind:
        return []
    most = int(max(number(row.get("max_staleness")) or 0 for row in behind))
    text = f"rollouts of {count(len(behind))} of {count(len(run.steps))} steps were sampled by weights "
    text += "one version behind" if most == 1 else f"up to {most} versions behind"
    cut = [number(mapping(row.get("algorithm")).get("rollout_is_ratio_fraction_high")) for row in behind]
    known = [share for share in cut if share is not None]
    if known:
        text += f"; the importance weights of {figures.mean(known):.2%} of their tokens were truncated"
    return [Finding("ok", text)]


def _zero_variance(run: RunData) -> list[Finding]:
    _, values = figures.series(run, "zero_variance_groups")
    if not values:
        return []
    last = figures.mean(values[-figures.SMOOTHING :]) or 0.0
    text = (
        f"{last:.0%} of the groups had one and the same reward in the last {min(len(values), figures.SMOOTHING)} steps"
    )
    if last > ZERO_VARIANCE_LIMIT:
        return [Finding("warn", f"{text}: little was left to learn from")]
    return [Finding("ok", text)]


def _failed(run: RunData) -> list[Finding]:
    rollouts = sum(int(number(r.get("rollouts")) or 0) for r in run.steps)
    failed = sum(figures.totals(run, "failures").values())
    if not rollouts:
        return []
    share = f"{failed / rollouts:.1%}"
    text = f"{count(failed)} of {count(rollouts)} training rollouts failed ({share}) and were not trained on"
    return [Finding("warn" if failed > PART_LIMIT * rollouts else "ok", text)]


def _changed(pairs: Pairs) -> list[Finding]:
    if not pairs.better + pairs.worse:
        return [Finding("warn", f"none of {count(pairs.judged)} tasks measured at both ends changed its outcome")]
    p = figures.sign_test(pairs.better, pairs.worse)
    text = (
        f"of {count(pairs.judged)} tasks measured at both ends, {count(pairs.better)} went from wrong to right and "
        f"{count(pairs.worse)} from right to wrong (sign test p {_p(p)})"
    )
    if p > 0.05:
        return [Finding("warn", f"{text}: this could be chance")]
    return [Finding("ok" if pairs.better > pairs.worse else "warn", text)]


def _p(p: float) -> str:
    return f"= {p:.2f}" if p >= 0.01 else "< 0.01" if p >= 0.001 else "< 0.001"


@attrs.frozen(kw_only=True)
class Failed:
    """One kind of failure.

    Attributes:
        counts: Mode to the number of rollouts with this failure.
        example: The message of one of them.
    """

    kind: str
    counts: Mapping[str, int]
    example: str


@attrs.frozen(kw_only=True)
class Failures:
    """All failures of a run, and the number of rollouts by mode."""

    kinds: list[Failed]
    rollouts: Mapping[str, int]


def failures_by_kind(run: RunData, missing: list[str]) -> Failures:
    """Count the failures in the rollout files, the most frequent kind first."""
    counts: dict[str, Counter[str]] = {}
    examples: dict[str, str] = {}
    rollouts: Counter[str] = Counter()
    for row in rollout_rows(run.files, ("failure", "message", "details"), missing=missing):
        rollouts[row["mode"]] += 1
        kind = row["failure"]
        if kind:
            counts.setdefault(kind, Counter())[row["mode"]] += 1
            examples.setdefault(kind, str(row["message"] or mapping(row["details"]).get("reason") or ""))
    order = sorted(counts, key=lambda kind: (-counts[kind].total(), kind))
    return Failures(
        kinds=[Failed(kind=k, counts=counts[k], example=examples[k]) for k in order],
        rollouts=rollouts,
    )


__getattr__ = former(__name__)
