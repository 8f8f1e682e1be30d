"""Compares a repeated step with the recorded one, stage by stage."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs

from agentrig.algorithms import WeightDifference
from agentrig.rollouts import Rollout

Result = Literal["ok", "differs", "not compared"]

FIGURE_BOUND = 0.05
"""Largest relative difference of a figure from the recorded one, where equal bits cannot be expected."""

FIGURE_FLOOR = 1e-3
"""Smaller absolute differences count as rounding where equal bits cannot be expected: `kl` and others are near 0."""

WEIGHT_BOUND = 0.25
"""Bound where equal bits cannot be expected: L2 norm of the difference of the new weights, over that of their change.

AdamW divides each gradient by its own size. If a gradient is as small as rounding errors, its step may change sign.
"""

MEASURED = ("_s", "_gb", "mfu")
"""Name endings of figures that differ each time: times, speeds and memory."""

LINE = ("rollouts", "failures", "reward", "reward_std", "accuracy", "zero_variance_groups")
"""The fields of a line of `metrics.jsonl` about rewards."""

CALLS = ("nodes", "transitions_per_rollout", "prompt_tokens", "response_tokens")
"""The fields of a line of `metrics.jsonl` about triplets."""


@attrs.frozen(kw_only=True)
class Stage:
    """One stage of a step, compared.

    Attributes:
        name: The stage.
        result: `ok`, `differs` or `not compared`.
        detail: The figures, or the reason, as text.
    """

    name: str
    result: Result
    detail: str


def compare(
    recorded: Mapping[str, Any],
    repeated: Mapping[str, Any],
    *,
    rows: Sequence[Mapping[str, Any]],
    rollouts: Sequence[Rollout],
    requested: str,
    exact: bool,
    difference: WeightDifference | None,
) -> list[Stage]:
    """Compare all stages of a step, in their order.

    Args:
        recorded: The step's line of `metrics.jsonl`.
        repeated: The line of the repeated step, after a round trip through JSON.
        rows: The step's rows of the Parquet file.
        rollouts: The rollouts of the repeated step, with triplets, in the same order.
        requested: How the tasks that the algorithm requested differ; '' if they do not.
        exact: Whether equal bits are expected: on a CPU, with the same versions and threads.
        difference: Between the new weights and those of the recorded checkpoint; None if the run has kept none.
    """
    was, now = recorded.get("digests", {}), repeated.get("digests", {})
    tasks = len({row["group"] for row in rows})
    return [
        Stage(name="tasks", result="differs", detail=requested)
        if requested
        else Stage(name="tasks", result="ok", detail=f"{tasks} tasks, {len(rows)} rollouts"),
        _digest("start", was, now, "weights and optimizer before the step"),
        _rewards(recorded, repeated),
        _triplets(recorded, repeated, rows, rollouts),
        _digest("advantages", was, now, "each rollout's advantage"),
        _digest("samples", was, now, "tokens and log-probabilities that are trained on"),
        _digest("batches", was, now, "what the model sees together, in its order"),
        _figures(recorded, repeated, exact=exact),
        _weights(was, now, exact=exact, difference=difference),
    ]


def _digest(name: str, was: Mapping[str, Any], now: Mapping[str, Any], what: str) -> Stage:
    if name not in was or name not in now:
        who = "the run has recorded no digest of it" if name not in was else "the repeated step has no digest of it"
        return Stage(name=name, result="not compared", detail=f"{what}: {who}")
    if was[name] == now[name]:
        return Stage(name=name, result="ok", detail=what)
    return Stage(name=name, result="differs", detail=f"{what}: digest {was[name]} recorded, {now[name]} now")


def _rewards(recorded: Mapping[str, Any], repeated: Mapping[str, Any]) -> Stage:
    found = _digest("rewards", recorded.get("digests", {}), repeated["digests"], "failures and rewards")
    off = _off(recorded, repeated, LINE)
    if off:
        return Stage(
            name="rewards", result="differs", detail=f"the step's line and its file of rollouts disagree: {off}"
        )
    if found.result == "not compared":
        return Stage(name="rewards", result="ok", detail="mean, deviation and failures (no digest was recorded)")
    return found


def _triplets(
    recorded: Mapping[str, Any],
    repeated: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    rollouts: Sequence[Rollout],
) -> Stage:
    off = []
    for row, rollout in zip(rows, rollouts, strict=True):
        counts = {
            "triplets": len(rollout.triplets),
            "prompt_tokens": sum(len(t.prompt_ids) for t in rollout.triplets),
            "response_tokens": sum(len(t.response_ids) for t in rollout.triplets),
        }
        wrong = [f"{row[name]} {name} recorded, {count} now" for name, count in counts.items() if row[name] != count]
        if wrong:
            off.append(f"rollout {rollout.id}: {', '.join(wrong)}")
    total = sum(len(r.triplets) for r in rollouts)
    if off:
        detail = f"{len(off)} of {len(rows)} rollouts; {off[0]}"
        return Stage(name="triplets", result="differs", detail=detail)
    found = _digest("triplets", recorded.get("digests", {}), repeated["digests"], f"{total} calls that are trained on")
    disagree = _off(recorded, repeated, CALLS)
    if found.result != "differs" and disagree:
        return Stage(name="triplets", result="differs", detail=disagree)
    if found.result == "not compared":
        return Stage(name="triplets", result="ok", detail=f"{total} calls, counts of tokens (no digest was recorded)")
    return found


def _off(recorded: Mapping[str, Any], repeated: Mapping[str, Any], names: Sequence[str]) -> str:
    there = [name for name in names if name in recorded and name in repeated]
    return ", ".join(f"{n} {recorded[n]} recorded, {repeated[n]} now" for n in there if recorded[n] != repeated[n])


def _figures(recorded: Mapping[str, Any], repeated: Mapping[str, Any], *, exact: bool) -> Stage:
    was, now = recorded["algorithm"], repeated["algorithm"]
    names = [n for n in was if n in now and not n.endswith(MEASURED) and isinstance(was[n], int | float)]
    if not names:
        return Stage(name="figures", result="not compared", detail="the algorithm reports no figures")
    off = [n for n in names if not _close(was[n], now[n], exact=exact)]
    if off:
        said = ", ".join(f"{n} {was[n]!r} recorded, {now[n]!r} now" for n in sorted(off, key=lambda n: n != "lr"))
        return Stage(name="figures", result="differs", detail=said)
    same = sum(_close(was[n], now[n], exact=True) for n in names)
    how = "the same bit for bit" if same == len(names) else f"{same} the same bit for bit, the others within the bound"
    shown = ", ".join(f"{n} {now[n]:.6g}" for n in ("loss", "grad_norm", "weight_change") if n in names)
    return Stage(name="figures", result="ok", detail=f"{len(names)} figures, {how}{': ' if shown else ''}{shown}")


def _close(was: float, now: float, *, exact: bool) -> bool:
    if was == now or (math.isnan(was) and math.isnan(now)):
        return True
    return not exact and math.isclose(was, now, rel_tol=FIGURE_BOUND, abs_tol=FIGURE_FLOOR)


def _weights(
    was: Mapping[str, Any], now: Mapping[str, Any], *, exact: bool, difference: WeightDifference | None
) -> Stage:
    recorded, repeated = was.get("weights"), now.get("weights")
    if difference is not None and recorded and difference.digests and difference.digests != recorded:
        difference = None  # the checkpoint has the best weights of the run instead of this step's
    by = ""
    if difference is not None:
        by = f"largest difference {difference.largest:.3g}, {difference.relative:.3g} of the step's change"
    if recorded and repeated:
        off = sorted(name for name in {*recorded, *repeated} if recorded.get(name) != repeated.get(name))
        groups = f"{len(recorded)} groups of tensors"
        if not off:
            return Stage(name="weights", result="ok", detail=f"{groups}, the same bit for bit")
        named = f"{len(off)} of {groups} differ: {', '.join(off[:4])}{' …' if len(off) > 4 else ''}"
        if exact:
            return Stage(name="weights", result="differs", detail=f"{named}{'; ' if by else ''}{by}")
        if difference is None:
            why = "no checkpoint has this step's weights, so the size of the difference is not known"
            return Stage(name="weights", result="not compared", detail=f"{named}, as expected here; {why}")
    elif difference is None:
        why = "the run has recorded neither digests nor a checkpoint of this step"
        return Stage(name="weights", result="not compared", detail=why)
    assert difference is not None
    bound = 0.0 if exact else WEIGHT_BOUND
    within = "" if exact else f" (bound {WEIGHT_BOUND:g})"
    fine = difference.relative <= bound and math.isfinite(difference.largest)
    if fine and difference.largest == 0:
        return Stage(name="weights", result="ok", detail="the same bit for bit as the checkpoint's")
    return Stage(name="weights", result="ok" if fine else "differs", detail=by + within)
