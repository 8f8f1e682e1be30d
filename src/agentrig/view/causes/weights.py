"""Weights that did not change, diverged, or did not arrive at the model's server."""

from __future__ import annotations

from collections.abc import Iterator

from agentrig.audit.verdicts import NO_WEIGHTS, TWO_SCORES
from agentrig.figures import GRAD_NORM, count, figure, number
from agentrig.text import amount
from agentrig.view import figures
from agentrig.view.causes.evidence import Evidence
from agentrig.view.causes.finding import Finding, audited_at, problem
from agentrig.view.reading import RunData, dig, mapping

LR = ("algorithm.lr", "algorithm.verl.actor_rollout_ref.actor.optim.lr")


def changed(evidence: Evidence) -> Iterator[Finding]:
    """Whether every step changed the weights."""
    run = evidence.run
    lines = [(int(line["step"]), mapping(line.get("algorithm"))) for line in run.steps]
    changes = [(step, number(found.get("weight_change"))) for step, found in lines]
    logged = [(step, change) for step, change in changes if change is not None]
    broken = []
    for step, found in lines:
        values = [found.get(name, 0) for name in ("weight_change", "loss", GRAD_NORM)]
        if any(v is None or (isinstance(v, float | int) and number(v) is None) for v in values):  # NaN is null there
            broken.append(step)
    if broken:
        yield problem(
            "diverged",
            f"loss, gradient or weight change were NaN or infinite in {len(broken)} of {amount(len(lines), 'step')}: "
            "training diverged",
            seen=(len(broken), len(lines), "steps"),
            since=broken[0],
            settings=(*evidence.setting(*LR), "algorithm.max_grad_norm", "algorithm.warmup_steps"),
            advice="Lower the learning rate or the gradient norm, and look at ratio_max in metrics.jsonl: large values "
            "mean that the server's log-probabilities are not the learner's.",
            lost=1.0,
            explains=("weights-unchanged", "learning-rate-too-large", "entropy-collapse"),
        )
        return
    # a step in which all rollouts of each group got the same reward has nothing to learn from
    idle = {int(line["step"]) for line in run.steps if number(line.get("zero_variance_groups")) == 1}
    values = [(step, value) for step, value in logged if value or step not in idle]
    if not values:
        return
    still = [step for step, value in values if value == 0]
    if not still:
        sizes = [value for _, value in values]
        ends = f"{figure(min(sizes))} to {figure(max(sizes))}"
        every = "every step with an update" if len(values) < len(logged) else "every step"
        yield Finding("ok", f"the weights changed in {every} (L2 norm {ends})")
        return
    yield problem(
        "weights-unchanged",
        f"the weights did not change in {len(still)} of {amount(len(values), 'step')}, the first is step {still[0]}",
        seen=(len(still), len(values), "steps"),
        since=still[0],
        settings=(*evidence.setting(*LR), "algorithm.lora_targets"),
        advice="Is the learning rate 0, every group's reward the same, or nothing trainable?",
    )


def links_audited(run: RunData) -> str:
    """Return which links the auditor has looked at, in which steps, and why not at others; '' if it has not."""
    seen = mapping(run.summary.get("audited"))
    steps, last = seen.get("steps"), audited_at(run.error or {})
    if not isinstance(steps, list) or not steps:
        return ""
    steps = [*steps, *([last] if last is not None and last not in steps else [])]  # of a summary before a resume
    shown = ", ".join(map(str, steps if len(steps) < 8 else [*steps[:4], "…", *steps[-2:]]))
    of_steps = f"step{'s' if len(steps) > 1 else ''} {shown}"
    text = f"the auditor recomputed {seen.get('links')} of {seen.get('of')} parts of {of_steps}"
    faults, looked = seen.get("faults"), number(seen.get("links"))
    wrong = {str(told).partition(":")[0]: "" for told in faults} if isinstance(faults, list) else {}
    if wrong and looked is not None:
        text += f", and {looked - len(wrong):.0f} of {looked:.0f} parts agree: not {', '.join(wrong)}"
    left, read = mapping(seen.get("not_looked_at")), mapping(seen.get("calls"))
    otherwise = number(seen.get("sampled_otherwise"))
    parts = [
        f"{link} of {one[0]} of {one[1]} calls ({_left_out(link, one[1] - one[0], otherwise)})"
        for link, one in read.items()
        if one[0] < one[1]
    ]
    unseen = [f"not {link}: {why}" for link, why in left.items() if why != NO_WEIGHTS]
    return "; ".join([text, *parts, *unseen, *([NO_WEIGHTS] if NO_WEIGHTS in left.values() else [])])


def _left_out(link: str, n: int, otherwise: float | None) -> str:
    """Say why the auditor left out n calls; `otherwise` of the link "distribution" were not sampled as set."""
    own = "sampled with settings of the agent's own, or by other weights"
    if link != "distribution":
        return f"{n} left out to save time"
    counted = {"left out to save time": n - int(otherwise or 0), own: int(otherwise or 0)}
    return ", ".join(f"{of} {why}" for why, of in counted.items() if of > 0)


def audited(evidence: Evidence) -> Iterator[Finding]:
    """What the auditor has looked at, the fault that it found, and what else it noted."""
    seen = mapping(evidence.run.summary.get("audited"))
    faults, notes = seen.get("faults"), seen.get("notes")
    if isinstance(notes, list) and notes:
        yield Finding("warn", f"the auditor noted: {notes[0]}")
    for link, why in mapping(seen.get("not_looked_at")).items():
        if str(why).startswith(TWO_SCORES):
            yield Finding("warn", f"the auditor could check {link} in no step: {why}")
    if isinstance(faults, list) and faults:
        yield Finding("warn", f"the auditor found a fault: {faults[0]}")
    elif text := links_audited(evidence.run):
        yield Finding("ok", text)
    elif evidence.run.setting("run", "audit") is False and evidence.run.done:
        yield Finding("warn", "no step was computed again by the auditor: run.audit is false")


def delivery(evidence: Evidence) -> Iterator[Finding]:
    """How often the server was shown to answer with the trained weights."""
    run = evidence.run
    if run.summary.get("trains") == "prompts":
        yield Finding("fact", "the run trained prompts, no weights: nothing had to arrive at the model's server")
        return
    if "delivery" not in run.summary:  # a run of an earlier version, or one that goes on
        return
    seen = mapping(run.summary["delivery"])
    algorithm = dig(run.manifest, "components", "algorithm", "name") or "this algorithm"
    proofs, arrived = int(number(seen.get("proofs")) or 0), int(number(seen.get("arrived")) or 0)
    if seen.get("on") is False:
        yield Finding("warn", "nothing shows that the trained weights arrived: run.delivery is false")
        return
    if not proofs:
        yield Finding(
            "warn",
            f"nothing shows that the trained weights arrived at the model's server: {algorithm} has no learner that "
            "could be asked",
        )
        return
    gap, bound = number(seen.get("difference")), number(seen.get("bound"))
    error = run.error
    reached = not error or error.get("cause") in ("weights-not-arriving", "sampled-differently", "server-failed")
    ended = not reached and arrived == proofs - 1  # the run ended before that check
    proofs -= ended
    text = f"the model's server answered with the new weights {count(arrived)} of {count(proofs)} times"
    if gap is not None:
        text += f": log-probabilities differ by at most {figure(gap)} (bound {figure(bound)})"
    tensors = int(number(seen.get("tensors")) or 0)
    if tensors:
        text += f", {amount(count(tensors), 'tensor')} equal bit by bit"
    calls = number(seen.get("calls_difference"))
    if calls is not None:
        text += f"; recorded calls agree with the learner within {figure(calls)}"
    if ended:
        text += "; the run ended before the next check"
    yield Finding("ok" if arrived == proofs else "warn", text)
    notes = seen.get("notes")
    yield from (Finding("warn", str(note)) for note in (notes if isinstance(notes, list) else ()))


def tokens(evidence: Evidence) -> Iterator[Finding]:
    """How many tokens of the updates were computed, where the algorithm computes shared ones once."""
    run = evidence.run
    traced, computed = (sum(figures.series(run, "algorithm", name)[1]) for name in ("traced_tokens", "computed_tokens"))
    if not traced:
        return
    text = f"the updates traced {count(int(traced))} tokens and computed {count(int(computed))}"
    if computed < traced:
        text += f": {1 - computed / traced:.0%} were saved, because calls share them or have no advantage"
    yield Finding("fact", text)
    again = sum(figures.series(run, "algorithm", "repeated_tokens")[1])
    if again:
        yield Finding(
            "warn",
            f"{count(int(again))} of the computed tokens ({again / computed:.0%}) were computed again, because some "
            "groups don't fit into one pass: a larger algorithm.tokens_per_batch saves them",
        )
