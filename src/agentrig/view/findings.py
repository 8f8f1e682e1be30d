"""What to know before you trust a run: the findings of its diagnosis, and its failures by kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import attrs

from agentrig.view import figures
from agentrig.view.causes.finding import Finding as Finding
from agentrig.view.causes.groups import ZERO_VARIANCE_LIMIT as ZERO_VARIANCE_LIMIT
from agentrig.view.causes.rollouts import PART_LIMIT as PART_LIMIT
from agentrig.view.diagnosis import diagnose
from agentrig.view.reading import RunData, mapping, number, rollout_rows


def findings(run: RunData) -> list[Finding]:
    """Return what the diagnosis of a run finds: problems, warnings, and what is fine."""
    found = diagnose(run)
    return [*found.problems, *found.warnings, *found.checks]


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


def failures_of_steps(run: RunData) -> Failures:
    """Return the failures that the training steps have counted, without an example of each."""
    counts = figures.totals(run, "failures")
    rollouts = sum(int(number(row.get("rollouts")) or 0) for row in run.steps)
    order = sorted(counts, key=lambda kind: (-counts[kind], kind))
    return Failures(
        kinds=[Failed(kind=k, counts={"train": counts[k]}, example="") for k in order],
        rollouts={"train": rollouts} if run.steps else {},
    )
