"""Calls to the model that were not trained on: not recorded, without token ids, not matched, lost."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping

from agentrig.figures import count, number
from agentrig.ledger import (
    ABORTED_CALL,
    CALL_ERROR,
    LEFT_OUT_BY_ADAPTER,
    NO_TOKEN_IDS,
    OTHER_SERVER,
    UNMATCHED_NODE,
    WORTHLESS,
)
from agentrig.run.guards import OVERLONG
from agentrig.text import alike, amount, cut
from agentrig.traces import LLM_CALL
from agentrig.view.beside import rollouts_of_reason, worths_of
from agentrig.view.causes.evidence import Evidence
from agentrig.view.causes.finding import Finding, problem
from agentrig.view.causes.rollouts import PART_LIMIT, SHORTER, TOO_LONG
from agentrig.view.causes.trend import at_least, gained
from agentrig.view.figures import books, totals
from agentrig.view.reading import RolloutFile, RunData, dig, rollout_rows, spans_of

MOST = 0.6
"""If an adapter leaves out more than this share of the calls and the run does not get better, it is named."""

HALF = 0.5
"""If a credit gives no call of more of the groups with unlike rewards a worth, it is named: these are what teaches."""

REFUSED = re.compile(r"^HTTP 4(?!08|29)\d\d\b")
"""How the error of a call begins that the server refused for what it asked, not for its load."""

WRONG_REQUEST = (
    "Send what the server takes, above all endpoint.model as the model, and let the agent raise other errors."
)

SURE_OF_SIGN = 5
"""In so many groups, and all of a run, the worth must fall with the reward until the credit is said to be reversed."""

REASONS: Mapping[str, tuple[str, str, tuple[str, ...], str]] = {
    UNMATCHED_NODE: (
        "unmatched-calls",
        "the adapter trains other graph nodes than those that made the calls",
        ("adapter.match",),
        "Set the adapter to one of the nodes that the report lists under agent names, or leave it empty to train every "
        "call.",
    ),
    LEFT_OUT_BY_ADAPTER: (
        "unmatched-calls",
        "the adapter left the calls out",
        ("adapter.use",),
        "Look at the adapter.",
    ),
    NO_TOKEN_IDS: (
        "no-token-ids",
        "the server returned no token ids",
        ("server.use",),
        "Use vLLM 0.10.2 or later, or agentrig's own server.",
    ),
    OTHER_SERVER: (
        "other-server",
        "another server than the run's answered",
        ("agent.use",),
        "The agent must call exactly endpoint.base_url.",
    ),
    CALL_ERROR: (
        "call-errors",
        "calls failed, or their streams broke off",
        ("server.use", "runners.threads"),
        "Look at the errors of the calls (agentrig watch) and at server.log; fewer rollouts at once ask less of the "
        "server.",
    ),
    ABORTED_CALL: (
        "aborted-calls",
        "the agent ended them before their answers were complete",
        ("agent.use",),
        "The agent ends or cancels calls that are under way, or its client waits too short a time for an answer.",
    ),
}
"""Reason of the ledger to the cause, its words, settings and advice."""


def ledger(evidence: Evidence) -> Iterator[Finding]:
    """The ledger's line; calls in no place are a problem."""
    yield from line(evidence.run)
    sums = books(evidence.run, "calls")
    if sums.get("unaccounted"):
        steps = [int(s["step"]) for s in evidence.run.steps if number(dig(s, "calls", "unaccounted"))]
        yield problem(
            "lost-calls",
            f"{count(sums['unaccounted'])} of {count(sums['recorded'])} calls are neither trained, masked nor dropped",
            seen=(sums["unaccounted"], sums["recorded"], "calls"),
            since=min(steps, default=None),
            settings=("algorithm.use", "adapter.use"),
            advice="This is a fault of the algorithm or the adapter, not of your settings: docs/proofs.md lists what "
            "the ledger finds.",
        )


def line(run: RunData) -> list[Finding]:
    """Return the ledger's line: `20 114 calls: 19 968 trained, 146 left out on purpose: 146 failed-rollout`."""
    found = books(run, "calls")
    if not found.get("recorded"):
        return []
    parts = [f"{count(found.get('trained'))} trained"] if found.get("trained") or not found.get("handed_over") else []
    if found.get("masked"):
        parts.append(f"{count(found['masked'])} masked")
    if found.get("handed_over"):
        algorithm = dig(run.manifest, "components", "algorithm", "name") or "(unknown)"
        parts.append(
            f"{count(found['handed_over'])} handed over to the algorithm {algorithm}, which does not say what it did "
            "with them"
        )
    if found.get("unaccounted"):
        parts.append(f"{count(found['unaccounted'])} not accounted for")
    if found.get("dropped"):
        reasons = {k.removeprefix("dropped: "): n for k, n in found.items() if k.startswith("dropped: ") and n}
        listed = ", ".join(f"{count(n)} {reason}" for reason, n in sorted(reasons.items(), key=lambda r: -r[1]))
        parts.append(f"{count(found['dropped'])} left out on purpose: {listed}")
    text = f"{amount(count(found['recorded']), 'call')}: {', '.join(parts)}"
    return [Finding("warn" if found.get("unaccounted") else "fact", text)]


def trained(evidence: Evidence) -> Iterator[Finding]:
    """Whether every step had calls to train on, and every scored rollout one."""
    run = evidence.run
    kept = totals(run, "nodes", "trained")
    if run.summary.get("trains") == "prompts":
        return
    whole = all(isinstance(line.get("nodes"), Mapping) for line in run.steps)  # else a line is damaged
    if run.steps and not sum(kept.values()):
        # A run whose algorithm learns from calls ends before its first line: this one learns in another way.
        yield from [Finding("warn", "nothing was trained: no step has a transition")] if whole else ()
        return
    empty = [int(each["step"]) for each in run.steps if number(each.get("transitions_per_rollout")) == 0]
    if empty:
        yield Finding("warn", f"{amount(len(empty), 'step')} had nothing to train on, the first is step {empty[0]}")
    elif run.steps and whole:
        names = f" ({', '.join(sorted(kept))})" if set(kept) != {"(no node)"} else ""
        yield Finding("ok", f"the adapter kept calls in every step, {count(sum(kept.values()))} in all{names}")
    yield from _silent(evidence)
    yield from _unused(evidence)
    yield from _reversed(evidence)


def _silent(evidence: Evidence) -> Iterator[Finding]:
    scored, silent = evidence.total("scored"), evidence.total("silent")
    failed = books(evidence.run, "calls").get(f"dropped: {CALL_ERROR}", 0)
    if at_least(silent, scored) <= PART_LIMIT or failed >= silent:  # only answered calls count: these failed
        return
    yield problem(
        "calls-not-recorded",
        f"{count(silent)} of {count(scored)} scored rollouts have no recorded call to the model",
        seen=(silent, scored, "rollouts"),
        since=evidence.since("silent"),
        settings=("agent.use",),
        advice="Call the model at endpoint.base_url through httpx, the openai or anthropic package, or LangChain; or "
        "the agent answered without asking the model.",
        explains=("unmatched-calls", "zero-variance-groups", "constant-reward", "weights-unchanged"),
    )


def _unused(evidence: Evidence) -> Iterator[Finding]:
    """Scored rollouts whose calls were all left out, and calls that broke."""
    scored, unused = evidence.total("scored"), evidence.total("untrained")
    sums = books(evidence.run, "calls")
    reasons = {reason: sums.get(f"dropped: {reason}", 0) for reason in REASONS}
    ended = str(evidence.run.error.get("cause") or "")
    if at_least(unused, scored) > PART_LIMIT:
        named = next((reason for reason, about in REASONS.items() if about[0] == ended), None)
        # the ledger's reasons are of steps that ended; other calls of the agent may be left out on purpose
        reason = named or max(reasons, key=lambda r: (reasons[r], r == UNMATCHED_NODE))
        cause, why, settings, advice = _about(evidence, reason)
        yield problem(
            cause,
            f"{count(unused)} of {count(scored)} scored rollouts had no call that was trained: {why}",
            seen=(unused, scored, "rollouts"),
            since=evidence.since("untrained"),
            settings=settings,
            advice=advice,
            explains=("weights-unchanged",),
        )
        return
    recorded = sums.get("recorded", 0)
    for reason in (UNMATCHED_NODE, LEFT_OUT_BY_ADAPTER):
        if at_least(reasons[reason], recorded) > MOST and not gained(evidence):
            yield _left_out(evidence, reason, reasons[reason], recorded)
    yield from _worthless(evidence, sums)
    for reason in (CALL_ERROR, ABORTED_CALL, NO_TOKEN_IDS):
        if at_least(reasons[reason], recorded) > PART_LIMIT:
            yield _dropped(evidence, reason, reasons[reason], recorded)


def _about(evidence: Evidence, reason: str) -> tuple[str, str, tuple[str, ...], str]:
    """Return what `REASONS` has; of calls that failed, with the commonest error and what to do about it."""
    if reason == UNMATCHED_NODE and evidence.value("adapter.match") is None:  # an adapter without that key
        reason = LEFT_OUT_BY_ADAPTER
    cause, why, settings, advice = REASONS[reason]
    if reason != CALL_ERROR:
        return cause, why, settings, advice
    since = _first(evidence, reason)
    files = [file for file in evidence.run.of_mode("train") if since in (None, file.step)][:1]
    spans = (span for row in rollout_rows(files, ("spans",)) for span in spans_of(row["spans"]))
    errors = [span.error for span in spans if span.name == LLM_CALL and span.error]
    if 2 * sum(bool(OVERLONG.search(error)) for error in errors) > len(errors):
        return cause, "most of their prompts left no room in the model's context", evidence.setting(*TOO_LONG), SHORTER
    for kind, n in Counter(map(alike, errors)).most_common(1):
        example = cut(next(error for error in errors if alike(error) == kind), 200)
        why = f"{why}, most often ({count(n)} of {count(len(errors))}) with {example}"
    if 2 * sum(bool(REFUSED.search(error)) for error in errors) > len(errors):
        return cause, why, ("agent.use",), WRONG_REQUEST
    return cause, why, settings, advice


def _dropped(evidence: Evidence, reason: str, n: int, recorded: int) -> Finding:
    """Name calls that were dropped for a reason; those of few tasks are a warning, for the run learned from others."""
    cause, why, settings, advice = _about(evidence, reason)
    tasks, every = _tasks_with(evidence, reason)
    text = f"{count(n)} of {count(recorded)} calls were not trained on: {why}"
    if tasks:
        such = "such as " if len(tasks) > 2 else ""
        made = f"{count(len(tasks))} of {amount(count(every), 'training task')} made them"
        text += f"; {made}: {such}{' and '.join(tasks[:2])}"
    if tasks and at_least(len(tasks), every) <= PART_LIMIT:
        return Finding("warn", f"{text}. {advice}")
    return problem(
        cause,
        text,
        seen=(n, recorded, "calls"),
        since=_first(evidence, reason),
        settings=settings,
        advice=advice,
    )


def _tasks_with(evidence: Evidence, reason: str) -> tuple[list[str], int]:
    """Return the training tasks with calls dropped for a reason, and the number of all; none if not all are known."""
    run = evidence.run
    steps = {int(s["step"]) for s in run.steps if dig(s, "calls", "dropped", reason)}
    found, every = dict[str, None](), set[str]()
    for file in run.of_mode("train"):
        rows = list(rollout_rows([file], ("id", "task_id"), decode=False))
        every.update(str(row["task_id"]) for row in rows)
        if file.step not in steps:
            continue
        rollouts = rollouts_of_reason(run.directory, file.step, reason)
        if rollouts is None:
            return [], 0
        found.update(dict.fromkeys(str(row["task_id"]) for row in rows if row["id"] in rollouts))
    return list(found), len(every)


def _left_out(evidence: Evidence, reason: str, left: int, recorded: int) -> Finding:
    """Name an adapter that leaves out most calls of a run that did not get better: these may decide the answer."""
    cause, _, settings, _ = _about(evidence, reason)
    kept = totals(evidence.run, "nodes", "trained")
    others = sorted(totals(evidence.run, "nodes", "seen").keys() - kept.keys())
    text = (
        f"the adapter trains {', '.join(sorted(kept)) or 'some calls'}, and left out {left / recorded:.0%} of the calls"
    )
    return problem(
        cause,
        f"{text}{': ' + ', '.join(others) if others else ''}",
        seen=(left, recorded, "calls"),
        since=_first(evidence, reason),
        settings=settings,
        advice="If these calls decide the answer, training the others cannot change the reward. Train these too.",
        explains=("learning-rate-too-large", "learning-rate-too-small", "zero-variance-groups", "low-entropy"),
    )


def _worthless(evidence: Evidence, sums: Mapping[str, int]) -> Iterator[Finding]:
    """Name a credit that learns nothing from most groups whose rewards differ, in a run that did not get better."""
    unlike, trained = evidence.total("groups") - evidence.total("same"), sums.get("trained", 0)
    left = sum(sums.get(f"dropped: {reason}", 0) for reason in WORTHLESS)
    if not left or at_least(max(0, unlike - trained), unlike) <= HALF or gained(evidence):
        return
    yield problem(
        "credit-leaves-out",
        f"the credit gave {count(trained)} of {count(left + trained)} calls a worth, so it learned from at most "
        f"{count(trained)} of the {count(unlike)} groups whose rewards differ",
        seen=(left, left + trained, "calls"),
        since=_first(evidence, *WORTHLESS),
        settings=("credit.use",),
        advice="Look at the credit: agentrig watch says of each call whether it was trained.",
        explains=("learning-rate-too-small", "weights-unchanged"),
    )


def _reversed(evidence: Evidence) -> Iterator[Finding]:
    """Name a credit with the wrong sign: in every group, the best rollouts are worth less than the worst."""
    run = evidence.run
    files = [] if evidence.demonstrated else run.of_mode("train")
    groups = [worths for file in files for worths in run.seen.of(file, _best_and_worst)]
    if len(groups) < SURE_OF_SIGN or any(best >= worst for best, worst in groups):
        return
    yield problem(
        "credit-reversed",
        f"in all {count(len(groups))} groups whose rewards differ, the credit gave the rollouts of the highest reward "
        "a lower worth than those of the lowest: training makes the better answers less likely",
        seen=(len(groups), len(groups), "groups"),
        since=next(file.step for file in files if run.seen.of(file, _best_and_worst)),
        settings=("credit.use",),
        advice="Turn the sign of the credit round: a worth above 0 makes a call more likely.",
        lost=1.0,
        explains=(
            *("learning-rate-too-large", "learning-rate-too-small", "tasks-too-hard", "entropy-collapse"),
            *("zero-variance-groups", "low-entropy", "memorised"),
        ),
    )


def _best_and_worst(file: RolloutFile) -> list[tuple[float, float]]:
    """Return the mean worths of the best and of the worst rollouts of each group of a step whose rewards differ."""
    groups: dict[str, list[tuple[float, float]]] = {}
    worths = worths_of(file.path.parent.parent, file.step)
    for row in rollout_rows([file], ("id", "group", "task_id", "value"), decode=False) if worths else ():
        if number(row["value"]) is not None and str(row["id"]) in worths:
            of = row["group"] if row["group"] is not None else row["task_id"]
            groups.setdefault(str(of), []).append((float(row["value"]), worths[str(row["id"])]))
    found = []
    for pairs in groups.values():
        ends = [end([value for value, _ in pairs]) for end in (max, min)]
        best, worst = ([worth for value, worth in pairs if value == end] for end in ends)
        if ends[0] > ends[1]:
            found.append((math.fsum(best) / len(best), math.fsum(worst) / len(worst)))
    return found


def _first(evidence: Evidence, *reasons: str) -> int | None:
    of = ((int(s["step"]), dig(s, "calls", "dropped", reason)) for s in evidence.run.steps for reason in reasons)
    return next((step for step, dropped in of if dropped), None)
