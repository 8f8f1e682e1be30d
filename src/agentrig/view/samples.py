"""A few rollouts, shown step by step: the same task before and after training, and where two rewards disagree."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from agentrig.view.reading import SECOND, RolloutFile, RunData, is_correct, mapping, number, rollout_rows
from agentrig.view.sample_traces import SAMPLE_COLUMNS, TEXT_LIMIT, SampleTrace, cut, question, sample_trace


@attrs.frozen(kw_only=True)
class Pair:
    """The same task before and after training."""

    title: str
    facts: Sequence[tuple[str, str]]
    outcome: str
    before: SampleTrace
    after: SampleTrace


@attrs.frozen(kw_only=True)
class Pairs:
    """Tasks before and after, and how all of them changed.

    Attributes:
        where: `held-out` or `validation`, and the two steps.
        shown: The few pairs that the page shows.
        better: Tasks that were wrong before and right after.
        worse: Tasks that were right before and wrong after.
        judged: Tasks that were scored both times.
    """

    where: str
    shown: Sequence[Pair]
    better: int
    worse: int
    judged: int


_KINDS = {
    (False, True): ("wrong before, right after", 3),
    (True, False): ("right before, wrong after", 1),
    (False, False): ("wrong both times", 1),
    (True, True): ("right both times", 1),
}


def before_after(run: RunData, missing: list[str]) -> Pairs | None:
    """Choose tasks that were measured before and after training, and return their rollouts.

    Uses the held-out rollouts if there are any from before and after, else the first and last validation. It
    chooses the first tasks of each kind by id, including tasks that got worse, so that the choice is
    reproducible and not biased.

    Args:
        run: The run.
        missing: What cannot be read is noted here.
    """
    ends = _ends(run)
    if ends is None:
        return None
    first, last = ends
    columns = ("id", "task_id", "failure", "value", "correct")
    before = {r["task_id"]: r for r in rollout_rows([first], columns, missing=missing)}
    after = {r["task_id"]: r for r in rollout_rows([last], columns, missing=missing)}
    groups: dict[tuple[bool, bool], list[str]] = {kind: [] for kind in _KINDS}
    for task in sorted(before.keys() & after.keys(), key=str):
        values = number(before[task]["value"]), number(after[task]["value"])
        if values[0] is not None and values[1] is not None:
            groups[is_correct(before[task]), is_correct(after[task])].append(task)
    chosen = [(task, name) for kind, (name, count) in _KINDS.items() for task in groups[kind][:count]]
    wanted = {str(rows[task]["id"]) for task, _ in chosen for rows in (before, after)}
    rows_by_id = {r["id"]: r for r in rollout_rows([first, last], SAMPLE_COLUMNS, ids=wanted, missing=missing)}
    shown = [
        _pair(rows_by_id[before[task]["id"]], rows_by_id[after[task]["id"]], name)
        for task, name in chosen
        if before[task]["id"] in rows_by_id and after[task]["id"] in rows_by_id
    ]
    split = "held-out" if first.mode == "report" else "validation"
    return Pairs(
        where=f"{split} split, step {first.step} and step {last.step}",
        shown=shown,
        better=len(groups[False, True]),
        worse=len(groups[True, False]),
        judged=sum(map(len, groups.values())),
    )


def _ends(run: RunData) -> tuple[RolloutFile, RolloutFile] | None:
    for mode in ("report", "validation"):
        files = run.of_mode(mode)
        if len(files) >= 2:
            return files[0], files[-1]
    return None


def _pair(before: Mapping[str, Any], after: Mapping[str, Any], outcome: str) -> Pair:
    title, facts = question(before)
    return Pair(title=title, facts=facts, outcome=outcome, before=sample_trace(before), after=sample_trace(after))


@attrs.frozen(kw_only=True)
class RewardDisagreement:
    """A rollout that two rewards scored differently; `row` is its row."""

    row: Mapping[str, Any] = attrs.field(repr=False)
    step: int
    title: str
    answer: str
    trained: str
    name: str
    second: str


def reward_disagreements(run: RunData, missing: list[str], *, limit: int = 6) -> list[RewardDisagreement]:
    """Return the latest rollouts whose value in a second reward differs from the one that was trained on."""
    found: list[RewardDisagreement] = []
    for file in reversed(run.of_mode("train")):
        ids = {
            str(row["id"])
            for row in rollout_rows([file], ("id", "value", SECOND), missing=missing)
            if _differing(row) is not None
        }
        for row in rollout_rows([file], SAMPLE_COLUMNS, ids=ids) if ids else ():
            found.append(_reward_disagreement(row))
            if len(found) == limit:
                return found
    return found


@attrs.frozen(kw_only=True)
class Group:
    """The rollouts of one task in one training step.

    Attributes:
        step: The step.
        title: The task's question.
        members: The figures of all rollouts.
        rows: The whole rows of a few: those with the highest and the lowest values.
    """

    step: int
    title: str
    members: Sequence[Mapping[str, Any]]
    rows: Sequence[Mapping[str, Any]]


def last_group(run: RunData, missing: list[str], *, limit: int = 4) -> Group | None:
    """Return the first group of the last training step whose rollouts differ in value, or else the first one.

    Args:
        run: The run.
        missing: What cannot be read is noted here.
        limit: The most whole rows.
    """
    files = run.of_mode("train")[-1:]
    groups: dict[tuple[Any, Any], list[dict[str, Any]]] = {}
    for row in rollout_rows(files, ("id", "task_id", "group", "failure", "value", "correct"), missing=missing):
        groups.setdefault((row["group"], row["task_id"]), []).append(row)
    if not groups:
        return None
    members = next((g for g in groups.values() if len({row["value"] for row in g}) > 1), next(iter(groups.values())))
    ranked = sorted(members, key=lambda row: number(row["value"]) or 0.0, reverse=True)
    chosen = ranked if len(ranked) <= limit else [*ranked[: limit // 2], *ranked[-(limit // 2) :]]
    ids = [str(row["id"]) for row in chosen]
    rows = sorted(rollout_rows(files, SAMPLE_COLUMNS, ids=ids, missing=missing), key=lambda row: ids.index(row["id"]))
    if not rows:
        return None
    return Group(step=files[0].step, title=question(rows[0])[0], members=members, rows=rows)


def _differing(row: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]] | None:
    """Return the name and the score of the first second reward with another value than the row's, or None."""
    for name, score in mapping(row.get(SECOND)).items():
        if mapping(score).get("value") != row["value"]:
            return str(name), mapping(score)
    return None


def _reward_disagreement(row: Mapping[str, Any]) -> RewardDisagreement:
    title, _ = question(row)
    name, score = _differing(row) or ("", {})
    answer = row["answer"] if isinstance(row["answer"], str) else json.dumps(row["answer"], ensure_ascii=False)
    return RewardDisagreement(
        row=row,
        step=row["step"],
        title=title,
        answer=cut(answer, TEXT_LIMIT),
        trained=f"{row['value']:g}" if number(row["value"]) is not None else "–",
        name=name,
        second=_verdict(score),
    )


def _verdict(score: Mapping[str, Any]) -> str:
    value = number(score.get("value"))
    reason = mapping(score.get("details")).get("reason")
    return ("invalid" if value is None else f"{value:g}") + (f" ({reason})" if reason else "")
