"""The diagnosis of a run: everything that the rules of `causes/` find, what held learning back first.

- It is the one judge. `why`, the report, and what `train` says at its end or when a run ends itself come from here, so
  they can't name different causes. The guards of `run/` say what they saw; where many causes lead to that, only the
  rules say which one it was.
- A cause comes before what it explains (`Finding.explains`). What is explained keeps its figures and has no advice of
  its own: it goes when its cause goes.
- "Train for more steps" is said only where no trend speaks against it: see `agentrig.view.causes.groups.fading`.
- A figure says what it is: a mean says of which steps, and "since step N" means in most steps from N on.
- Of what else to know, the auditor's words come first, then trends, then facts.

It reads only the run directory, also while the run goes on. If you ask repeatedly, read the run with the `Seen` of the
last time: then only new files of rollouts are read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import attrs

from agentrig.audit.verdicts import NO_WEIGHTS
from agentrig.figures import amount, count, figure, number
from agentrig.run.guards import NO_SIGNAL
from agentrig.view import figures
from agentrig.view.causes import calls, groups, outcome, policy, rewards, rollouts, weights
from agentrig.view.causes.evidence import Evidence
from agentrig.view.causes.finding import Finding
from agentrig.view.causes.trend import better_reward, fewer_right, gained, more_right, reward_rise, worse_reward
from agentrig.view.reading import GO_ON, RunData, dig, mapping, read_run
from agentrig.view.related import compare_command, to_compare

Rule = Callable[[Evidence], Iterable[Finding]]
"""Looks at a run's evidence; returns what it finds."""

RULES: Sequence[Rule] = (
    weights.audited,
    rewards.two_scores,  # before all that rests on the reward's word
    outcome.told,
    outcome.other_settings,
    outcome.reflections,
    rollouts.overlong_prompts,
    rollouts.failures,
    rollouts.unanswered,
    rollouts.one_answer,
    rollouts.unlike_answers,
    rollouts.late,
    calls.trained,
    rollouts.truncated_answers,
    weights.delivery,
    weights.changed,
    policy.collapsed,
    policy.stale,
    policy.penalized,
    policy.unexploring,
    groups.zero_variance,
    groups.classes,
    groups.unsolved,
    rewards.exploited,
    rewards.second_rewards,
    rewards.one_reason,
    policy.clipped,
    policy.barely_moved,
    weights.tokens,
    outcome.memorised,
    outcome.changes,
    outcome.mean_reward,
    outcome.reward_parts,
    outcome.classes,
    outcome.other_requests,
    outcome.observers,
    calls.ledger,
)
"""In the order of the data: of two causes that take away as much, the one further upstream comes first."""

OF_SAMPLES = {
    policy.collapsed, policy.unexploring, groups.zero_variance, groups.classes, groups.unsolved, rewards.exploited,
    outcome.memorised, rollouts.one_answer,
}  # fmt: skip
"""Those that read the rewards of training as the model's: where demonstrations are learned, they are not."""

TOLD_FIRST = (weights.audited, policy.collapsed, groups.classes, groups.zero_variance, groups.unsolved)
"""Those whose warnings come before others: what the auditor found, and trends."""

NOTHING_WRONG = "No fault was found, and the run got better."
"""What is said about a run without problems that got better for certain."""

NOT_YET = "The run goes on, and has not ended step 1: it still starts, measures before training, or is in that step."
"""What is said about a run that goes on and has no step."""

GOES_ON = "No fault so far; the run goes on, and the gain is measured at its end."
"""What is said about a run without problems that goes on."""

NO_GAIN = "No fault was found, but there is no significant gain either: what the run {} may be chance."
"""What is said about another run without problems: it gained or lost."""

FADED = "The last steps had little to learn from; no other fault"
"""What is said instead of "No fault" where most groups taught nothing at the end, or the answers became alike."""

UNMEASURED = "No fault was found. The gain is not known: no tasks were measured both before and after training."
"""What is said about a run without problems that measured too little."""

LOSS = "No fault was found, but accuracy fell significantly."
"""What is said about a run without problems that got worse for certain …"""

LOWER_REWARD = "No fault was found, but the mean reward of the tasks that were measured fell significantly."
"""… or whose rewards did, where the accuracy did not change significantly."""

UNPROVEN = "; how many of them are right did not change significantly"
"""What is said where only their mean reward rose significantly."""

REWARD_ONLY = "No fault was found. Only the mean reward rose: no answer became right."
"""What is said about a run without problems in which only the rewards of answers rose that are still wrong, or right.
"""

UNREADABLE = "No fault was found. The gain is not known: the rollouts of the measurement cannot be read."
"""What is said about one whose files of them are damaged or lost."""

UNCHANGED = "No fault was found, but accuracy is the same before and after training"
"""What is said about a run without problems in which as many tasks became right as wrong."""

ONE_GAIN = "One run's gain does not say which of two settings is better:"
"""What is said about a run that got better, before the command that compares it with another one."""

NO_ROLLOUT = (
    "No rollout was run, so nothing could be learned: the algorithm ended its steps without one. Let it enqueue "
    "rollouts, and give it tasks."
)
"""What is said about a run whose steps had no rollout."""


@attrs.frozen(kw_only=True, str=False)
class Diagnosis:
    """What is known about a run's learning.

    Attributes:
        steps: How many steps have figures: a line in `metrics.jsonl`.
        without_line: How many have ended and lost theirs.
        gained: Whether it got better for certain, or solved its tasks; not if only the reward of training rose.
        gain: How many tasks that were measured at both ends got right, if significantly more are; or how far their mean
            reward rose, if that did significantly; else empty.
        lost: Whether it got worse on the tasks that were measured at both ends, significantly or not.
        no_gain: What to say of a gain that is not known, or none at all, or one of the reward only; else empty.
        faded: Whether little was left to learn from at the end, though not all is learned: a warning says why.
        reward_rise: By how much the mean reward of training rose, if the accuracy did not rise significantly with it.
        validated: Then, what the mean reward of validation did, if it did not rise; else empty.
        no_rule: The run's warning that nothing says which rewards are correct, so that its accuracy says little.
        problems: What held learning back, the first cause first; what follows from another cause comes after it.
        warnings: What to know before you trust the run.
        audited: Which links of which steps the auditor has looked at; empty if it has not.
        unseen: The links that it looked at in no step, each with the reason.
        next_step: What to do next in a run without problems, and what of the run says so; empty if nothing does.
        descent: The runs that its starting model comes from, the nearest first; empty if it is no run's.
        compare: The command that compares it with another run on the same held-out tasks; empty if its folder has none.
    """

    run: str
    status: str
    steps: int
    without_line: int = 0
    gained: bool
    gain: str = ""
    lost: bool = False
    no_gain: str = ""
    faded: bool = False
    reward_rise: float | None = None
    validated: str = ""
    no_rule: str = ""
    problems: Sequence[Finding]
    warnings: Sequence[Finding]
    checks: Sequence[Finding]
    missing: Sequence[str]
    audited: str = ""
    unseen: Sequence[str] = ()
    next_step: str = ""
    descent: str = ""
    compare: str = ""

    def __str__(self) -> str:
        return words(self)


def diagnose(run: RunData | Path) -> Diagnosis:
    """Find what held a run's learning back.

    Raises:
        AgentrigError: It is no run directory.
    """
    data = run if isinstance(run, RunData) else read_run(Path(run))
    evidence = Evidence.of(data)
    rules = [rule for rule in RULES if rule not in OF_SAMPLES or not evidence.demonstrated]
    by_rule = {rule: list(rule(evidence)) for rule in rules}
    found = [finding for findings in by_rule.values() for finding in findings]
    # comes before what held learning back
    worse = [f for rule in (outcome.changes, outcome.mean_reward) for f in by_rule[rule] if f.level == "problem"]
    others = [f for f in found if f.level == "problem" and f not in worse]
    problems = ranked([*worse, *others], list(outcome.ended(evidence)))
    if any(f.cause == "tasks-too-hard" for f in problems):  # answers that are all wrong: more varied ones do not help
        problems = [f for f in problems if f.cause != "low-entropy"]
    if any(f.cause == "learning-rate-too-large" for f in problems):  # a destroyed policy is right on no task
        by_rule.pop(groups.unsolved, None)
    if no_rule := evidence.no_rule:  # what is easy or hard is not known
        doubted = ("tasks-too-easy", "tasks-too-hard")
        keys = ("run.correct_at", "reward.use")
        problems = [attrs.evolve(f, advice=no_rule, settings=keys) if f.cause in doubted else f for f in problems]
    solved = bool(data.summary.get("solved"))
    # a higher reward of training is no verdict about held-out tasks that a stopped run did not measure
    stopped = "" if solved or more_right(evidence) else outcome.unfinished(evidence)
    better = solved or (gained(evidence) and not stopped)
    rise = None if solved or stopped else reward_rise(evidence)
    _, measured = figures.validation(data, "reward")
    validated = ""
    if rise is not None and len(measured) > 1 and measured[-1] <= measured[0]:
        validated = f", and that of validation went from {figure(measured[0])} to {figure(measured[-1])}"
    advice = outcome.next_step if better and rise is None else outcome.more
    ends = [f for f in outcome.ended(evidence) if f.level == "warn"]
    if stopped and not problems:  # the next step has the command: what is left says which steps were lost
        texts = [f.text.partition("; resume with: ")[0] for f in ends]
        ends = [attrs.evolve(f, text=text) for f, text in zip(ends, texts, strict=True) if "; " in text]
    advice = outcome.go_on if stopped else advice
    change = next((f.text for f in by_rule[outcome.changes] if more_right(evidence)), "")
    if not change and better and better_reward(evidence):
        change = next(f.text for f in by_rule[outcome.mean_reward])
    doubt = next((f.text for f in by_rule[outcome.other_requests]), "") if change else ""
    only = bool(change) and not (solved or more_right(evidence) or evidence.changed[0])
    gain = f"{change[:1].upper()}{change[1:]}{'' if only or more_right(evidence) else UNPROVEN}." if change else ""
    gain += f" But {doubt}." if doubt else ""
    no_gain = (REWARD_ONLY if only else "") if better else stopped or (_no_gain(evidence) if data.steps else "")
    if data.steps and not data.files and not any(number(line.get("rollouts")) for line in data.steps):
        no_gain = NO_ROLLOUT
    silent = (
        problems
        or data.running
        or no_gain in (LOSS, LOWER_REWARD, UNREADABLE, NO_ROLLOUT)
        or not (data.steps or stopped)
    )
    fallen = "" if stopped or solved else outcome.fallen(evidence)
    go_on = "" if silent or (no_rule and not stopped) else fallen or advice(evidence)
    refused = outcome.against_resume(evidence) if stopped and not go_on else ""
    against = [Finding("warn", refused)] if refused else []
    # a run that was killed: the next step has the command, or says why a resume would be refused
    missing = [text.partition(GO_ON)[0] if (stopped and go_on) or refused else text for text in data.missing]
    never = evidence.classes_never_right
    if never and any(never in f.advice and not f.follows for f in problems):
        by_rule.pop(groups.classes, None)
    moved = [] if data.running else [f for f in by_rule[outcome.mean_reward] if f.level in ("ok", "fact")]
    moved = [f for f in moved if problems or f.text != change]
    warned = sorted(by_rule, key=lambda rule: TOLD_FIRST.index(rule) if rule in TOLD_FIRST else len(TOLD_FIRST))
    return Diagnosis(
        run=data.name,
        status=figures.status(data),
        steps=len(data.steps),
        without_line=data.done - len(data.steps),
        gained=better and rise is None,
        gain=gain,
        lost=evidence.changed[1] > evidence.changed[0],
        no_gain=no_gain,
        faded=any(f.level == "warn" for f in by_rule.get(groups.zero_variance, ()))
        and not outcome.nothing_left(evidence),
        reward_rise=rise,
        validated=validated,
        no_rule=no_rule,
        problems=problems,
        next_step=go_on,
        warnings=[
            *against,
            *ends,
            *(
                f
                for rule in warned
                for f in by_rule[rule]
                if f.level == "warn" and f.text not in go_on and f.text != doubt and (problems or f.text != no_rule)
            ),
            *moved,
        ],
        checks=[f for f in found if f.level in ("ok", "fact") and f not in moved],
        missing=list(dict.fromkeys([*missing, *data.damage])),
        audited=weights.links_audited(data),
        descent=figures.descent(data),
        compare=compare_command(other, data.directory) if (other := to_compare(data)) else "",
        unseen=[
            f"{link} ({why})"
            for link, why in mapping(dig(data.summary, "audited", "not_looked_at")).items()
            if why != NO_WEIGHTS
        ],
    )


def _no_gain(evidence: Evidence) -> str:
    better, worse, _, judged = evidence.changed
    if fewer_right(evidence):
        return LOSS
    if worse_reward(evidence):
        return LOWER_REWARD
    if judged:
        moved = f": {amount(better, 'task')} got better and {worse} worse" if better else ""
        return f"{UNCHANGED}{moved}." if better == worse else ""
    accuracy = figures.held_out(evidence.run)["accuracy"]
    known = accuracy["before"] is not None and accuracy["after"] is not None
    return UNREADABLE if evidence.unread or (known and evidence.ends is None) else UNMEASURED


def ranked(found: Sequence[Finding], ended: Sequence[Finding]) -> list[Finding]:
    """Order problems: what ended the run, then what takes away most; a cause always before what follows from it.

    That rewards did not differ any more is no problem of its own if a rule found what led to it: that one then says so.
    """
    stop = next((f for f in ended if f.level == "problem"), None)
    same = next((f for f in found if stop is not None and f.cause == stop.cause), None)
    if stop is not None and same is not None:
        # the run's message, with the counts of the whole run
        stop = attrs.evolve(
            same, text=stop.text, advice=stop.advice or same.advice, lost=1.0, ended=True,
            explains=(*same.explains, *stop.explains),
        )  # fmt: skip
    found = [*filter(None, [stop]), *(f for f in found if f is not same)]
    left, placed = sorted(found, key=lambda f: (not f.ended, f.lost < 0.5)), list[Finding]()
    while left:
        first = next((f for f in left if not _above(f, left)), left[0])
        placed.append(attrs.evolve(first, follows=next(iter(_above(first, placed)), "")))
        left.remove(first)
    last = next((f for f in placed if f.ended and f.follows and f.cause == NO_SIGNAL), None)
    if last is None or same is not None:
        return placed
    found = [f for f in placed if f is not last]
    cause = next(f for f in found if f.cause == last.follows)
    lines = [f"{IT_ENDED}{last.text}", *cause.advice.splitlines(), *last.advice.splitlines()]
    found[found.index(cause)] = attrs.evolve(cause, advice="\n".join(dict.fromkeys(lines)), ended=True)
    return found


def _above(finding: Finding, others: Sequence[Finding]) -> list[str]:
    """Return the causes that this finding follows from."""
    return [f.cause for f in others if f is not finding and finding.cause in f.explains]


def verdict(diagnosis: Diagnosis) -> str:
    """Return the sentence about a run without problems; what its accuracy rests on comes first."""
    said = _verdict(diagnosis)
    return f"{diagnosis.no_rule[0].upper()}{diagnosis.no_rule[1:]}. {said}" if diagnosis.no_rule else said


def _verdict(diagnosis: Diagnosis) -> str:
    if not diagnosis.steps:
        if diagnosis.no_gain:
            return f"{diagnosis.no_gain} {diagnosis.next_step}"
        nothing = "metrics.jsonl has no figures of a step of this run, so nothing is known of its training."
        return NOT_YET if diagnosis.status == "running" else nothing
    unseen = f" Not checked by the auditor in any step: {', '.join(diagnosis.unseen)}." if diagnosis.unseen else ""
    faded = FADED if diagnosis.faded else "No fault"
    if diagnosis.status == "running":
        return GOES_ON.replace("No fault", faded) + unseen
    if diagnosis.reward_rise is not None:
        said = (
            "No fault was found. There is no significant gain in accuracy; the mean reward of training rose by "
            f"{diagnosis.reward_rise:.2g}{diagnosis.validated}."
        )
    else:
        chance = NO_GAIN.format("lost" if diagnosis.lost else "gained")
        said = diagnosis.no_gain or (NOTHING_WRONG if diagnosis.gained else chance)
    gain = f" {diagnosis.gain}" if said in (NOTHING_WRONG, REWARD_ONLY) and diagnosis.gain else ""
    return f"{said.replace('No fault', faded)}{gain}{unseen} {diagnosis.next_step}".strip()


def ending(diagnosis: Diagnosis) -> list[str]:
    """Return what `train` says at its end: the first problem with what to change, or the sentence without one."""
    first = next(iter(diagnosis.problems), None)
    return [verdict(diagnosis)] if first is None else [f"{first.cause}: {first.text}", *details(first)]


IT_ENDED = "It ended the run in "
"""What is said of a cause that ended a run, before what the run said."""

DAMAGED = ("damaged", "cannot be read", "changed since the run wrote", "is not this run's", "a folder of another run")
"""What is said of a file that holds something else than the run wrote."""


def words(diagnosis: Diagnosis) -> str:
    """Return the diagnosis as text for a terminal."""
    head = f"{diagnosis.run}: {diagnosis.status}, {amount(diagnosis.steps + diagnosis.without_line, 'step')}"
    head += f", {diagnosis.without_line} of them without a line in metrics.jsonl" if diagnosis.without_line else ""
    start = f"starts from {diagnosis.descent}" if diagnosis.descent else ""
    lines = [*filter(None, [head, start]), ""]
    damaged = [text for text in diagnosis.missing if any(word in text for word in DAMAGED)]
    if damaged:  # first: what is said below is of the files that can be read
        lines += ["Damaged files:", *(f"- {text}" for text in damaged), ""]
    if not diagnosis.problems:
        lines.append(verdict(diagnosis))
    for i, found in enumerate(diagnosis.problems, 1):
        lines += [f"{i}. {found.cause}: {found.text}", *(f"   {line}" for line in details(found))]
    others = [*(f.text for f in diagnosis.warnings), *(text for text in diagnosis.missing if text not in damaged)]
    if others:
        lines += ["", "Also know:", *(f"- {text}" for text in others)]
    lines += ["", f"{ONE_GAIN} {diagnosis.compare}"] if diagnosis.gained and diagnosis.compare else []
    lines += ["", diagnosis.audited] if diagnosis.audited else []
    return "\n".join(lines)


def details(found: Finding) -> list[str]:
    """Return the lines below a problem: how often and when it was first seen, what to do, which settings.

    What the problem's own text tells already is left out.
    """
    facts = []
    ended = found.ended and found.count == 1
    text, times = found.text.replace("\N{NARROW NO-BREAK SPACE}", ""), f"{found.count} of {found.of}"
    told = re.search(rf"\b{times}\b", text) or (found.count == found.of and f"none of {found.of} " in text)
    if found.count is not None and not ended and not told:
        facts.append(f"seen in {count(found.count)} of {count(found.of)} {found.unit}")
    if found.since and not re.search(rf"\bstep {found.since}\b", found.text):
        when = "it ended the run after" if found.cause == "error" else "it ended the run in"  # that names no step
        facts.append(f"{when if ended else 'first seen in'} step {found.since}")
    lines = [", ".join(facts)] if facts and found.since != 0 else []  # before step 1, the text says it all
    if found.follows:
        return [*lines, f"This follows from {found.follows}: mend that first."]
    lines += [line for line in found.advice.splitlines() if line]
    if found.settings:
        lines.append(f"settings: {', '.join(found.settings)}")
    return lines
