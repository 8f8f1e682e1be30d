"""The checks that stop a run that would learn nothing, or learn from failures; each reports what it observed."""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs

from agentrig.adapters import Adapter
from agentrig.correctness import as_much
from agentrig.demonstrations import gold_key
from agentrig.endpoints import LIMIT, SAMPLING_FIELDS
from agentrig.errors import RunStopped
from agentrig.figures import SIGNIFICANT, number, sign_test
from agentrig.plugins.specs import Spec
from agentrig.processes.servers import ServerError
from agentrig.rollouts import Mode, Rollout, mode_name
from agentrig.run.metrics import count_failures, failure_lines, failure_reasons
from agentrig.run.verdict import replies_of
from agentrig.servers import Server
from agentrig.text import amount, cut, differs_in_form_only, flat, gist, json_text, storable, with_kind
from agentrig.traces import ABORTED, ADDRESS, ASKED, IGNORED, LLM_CALL, MISSED, SERVER, Span, Trace, mapping

log = logging.getLogger(__name__)

DYING_S = 3.0
"""How long to look for the death of a server whose connections failed."""

SERVER_DEFAULTS = ("temperature", "top_p")
"""Fields for which a server may have its own default: they are compared only if the run sets them."""


CONSTRAINTS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "tool_choice",
)
"""The request fields that constrain sampling to a format."""


LIMIT_KEYS = ("max_tokens", "max_response_length")
"""What algorithms call the most tokens of a response."""

NO_SIGNAL = "zero-variance-groups"
"""The cause of a run that ends because the rewards of no group differ: what led to it, `agentrig why` finds out."""

OVERLONG = re.compile(
    "max(imum)? (context|input|model) len(gth)?|context.length|max_model_len|model's context is", re.IGNORECASE
)
"""Matches a server's error for a prompt that leaves no room for an answer."""

EARLY = 32
"""If the first rollouts of a batch, this many, all fail, the run stops and does not wait for the others."""


def check_failures(
    rollouts: Sequence[Rollout], limit: float, *, step: int, mode: str, expected: int | None = None
) -> None:
    """Stop when more than the allowed share of a step's rollouts failed, or all of a training step.

    Args:
        rollouts: The step's, or the first of them.
        expected: How many were asked for, if these are the first of them.
    """
    failures = count_failures(rollouts)
    total = sum(failures.values())
    nothing_left = mode == "train" and total == len(rollouts)
    if not rollouts or (total <= limit * len(rollouts) and not nothing_left):
        return
    failed = f"{total} of {len(rollouts)}"
    if expected is not None and expected > len(rollouts):
        failed = f"{'all' if total == len(rollouts) else total} of the first {len(rollouts)} of {expected}"
    lines = [
        f"step {step}: {failed} {mode_name(mode)} rollouts failed "
        f"(limit {limit:.0%}, run.failure_limit). Failed rollouts are not trained on."
    ]
    lines += [f"  {line}" for line in failure_lines(failure_reasons(rollouts))]
    if missed := missed_calls(rollouts):
        lines.append(f"  {missed}")
    raise RunStopped("\n".join(lines), cause="failures")


def missed_calls(rollouts: Sequence[Rollout]) -> str:
    """Name the libraries and routes by which agents called the model past the tracer; '' if they did not."""
    missed: Counter[str] = Counter()
    for rollout in rollouts:
        for span in rollout.trace.spans:
            missed.update(span.attributes.get(MISSED) or {})
    if not missed:
        return ""
    ways = ", ".join(f"{name} ({count})" for name, count in missed.most_common())
    return (
        f"calls to the model's server were made by {ways}: these are not recorded and not trained on. Set "
        "gateway.use=on, or call /chat/completions through httpx (the openai package, LangChain)."
    )


def unseen_calls(rollouts: Sequence[Rollout], *, unrecorded: int = 0) -> str:
    """Say why no call to the model counts: made past the tracer, all failed, or none made; '' if calls do.

    Args:
        unrecorded: How many calls the model's server answered that no tracer has seen.
    """
    if missed := missed_calls(rollouts):
        return missed
    roots = [span.attributes for rollout in rollouts for span in rollout.trace.spans if span.parent is None]
    where = next((root[ADDRESS] for root in roots if ADDRESS in root), "")
    if unrecorded:
        cure = "Set gateway.use=on, or call the model in the agent's own process."
        if where:
            cure = f"Let the agent call the address, with the key, in {where}."
        return (
            f"{amount(unrecorded, 'call')} to the model's server came from another process, or from a thread that does "
            f"not belong to a rollout: not recorded and not trained on. {cure}"
        )
    calls = [span for rollout in rollouts for span in rollout.trace.spans if span.name == LLM_CALL]
    failed = [span.error for span in calls if span.error is not None]
    if len(failed) < len(calls):
        return ""
    if failed:
        servers = sorted({str(span.attributes.get(SERVER, "")) for span in calls})
        given = where or "endpoint.base_url and endpoint.api_key"
        cure = f"\n  They went to {', '.join(servers)}, not to the run's model: give the agent's client {given}."
        said = f"All calls to the model failed ({len(failed)}), for example: {failed[0]}"
        return said + (cure if all(servers) else "")
    if rollouts and all(rollout.outcome.failure is not None for rollout in rollouts):
        return ""  # the agents ended before they asked
    if where:
        return f"No call to the model was recorded. Does the agent call the address, with the key, in {where}?"
    return (
        "No call to the model was recorded. Does the agent call endpoint.base_url?\n  Of an agent in Python the tracer "
        "sees calls to /chat/completions through httpx (the openai package, LangChain), in its own thread or one that "
        "copies its context; gateway.use=on sees every client's."
    )


def unanswered_calls(rollouts: Sequence[Rollout]) -> tuple[str, str]:
    """Say that at least half of the calls to the model have no answer and the agent went on; '' if fewer have none.

    Returns:
        The words, and their cause: `aborted-calls` if the agent itself ended most of them, `overlong-prompts` if most
        left no room for an answer, else `call-errors`.
    """
    calls = [span for rollout in rollouts for span in rollout.trace.spans if span.name == LLM_CALL]
    failed = [span for span in calls if span.error is not None]
    if not failed or 2 * len(failed) < len(calls):
        return "", ""
    aborted = [span for span in failed if span.attributes.get(ABORTED)]
    of = f"of {len(calls)} calls to the model"
    if 2 * len(aborted) > len(failed):
        return f"the agent ended {len(aborted)} {of} before their answers were complete, and went on", "aborted-calls"
    shown = next(str(span.error) for span in failed if span not in aborted)
    overlong = sum(bool(OVERLONG.search(str(span.error))) for span in failed)
    return (
        f"{len(failed)} {of} failed, and the agent went on without their answers. For example: {cut(shown, 300)}",
        "overlong-prompts" if 2 * overlong > len(failed) else "call-errors",
    )


def unanswered(rollouts: Sequence[Rollout]) -> str:
    """Say that most rollouts have no answer although they did not fail; '' if most have one."""
    ended = [r.outcome for r in rollouts if r.outcome.failure is None]
    silent = [outcome for outcome in ended if outcome.answer is None and outcome.own_reward is None]
    if 2 * len(silent) <= len(ended):
        return ""
    return (
        f"the agent returned None in {len(silent)} of {amount(len(ended), 'rollout')}: the reward has no answer to "
        "judge. Does the agent `return` its answer?"
    )


FORM_ONLY = (
    "the answer differs from the right one only in form (text or number, JSON around it, quotes, case, spaces, a final "
    "period)"
)

ONE_FORM = (
    "Let the agent return the answer in the form of the right one, or let the reward ignore what differs. Of text and "
    "number: compare str(...) of both, or name the column in tasks.text, which keeps a column of a CSV file as text."
)
"""What to do about `FORM_ONLY`."""


def wrong_in_form(rollouts: Sequence[Rollout]) -> str:
    """Say that an answer which is not correct differs from the task's gold in form only; '' if none does, or one is."""
    if any(r.correct for r in rollouts):
        return ""
    for r in (r for r in rollouts if r.value is not None):
        key, answer = gold_key(r.task.private), r.outcome.answer
        if key is not None and differs_in_form_only(answer, gold := r.task.private[key]):
            return (
                f"the reward does not count the answer to task {r.task.id} as correct. It is {with_kind(answer)}, and "
                f"private.{key} is {with_kind(gold)}: {FORM_ONLY}.\n  {ONE_FORM}"
            )
    return ""


def warn_of_form(rollouts: Sequence[Rollout], *, step: int) -> bool:
    """Warn of what `wrong_in_form` finds; return whether there was anything."""
    said = wrong_in_form(rollouts)
    if said:
        log.warning("step %d: %s", step, said)
    return bool(said)


def warn_of_late(rollouts: Sequence[Rollout], *, step: int) -> bool:
    """Warn of answers that the reward scored as `timeout`; return whether there were any."""
    scores = [r.score for r in rollouts if r.score is not None]
    late = [score for score in scores if score.status == "timeout"]
    if late:
        log.warning(
            "step %d: the reward scored %d of %d answers as `timeout`, for example: %s. They count as wrong, and are "
            "trained on with the value that it gives them",
            *(step, len(late), len(scores), gist(storable(str(late[0].details.get("reason") or "no reason")), 300)),
        )
    return bool(late)


def none_answered(rollouts: Sequence[Rollout]) -> bool:
    """Whether no rollout has an answer although some did not fail, and none is right: an agent may only act."""
    ended = [r for r in rollouts if r.failure is None]
    silent = all(r.outcome.answer is None and r.outcome.own_reward is None for r in ended)
    return bool(ended) and silent and not any(r.correct for r in ended)


def check_answers(rollouts: Sequence[Rollout]) -> None:
    """Stop when `EARLY` rollouts or more of a measurement before training ended without any answer, and none is right.

    An agent that forgets to `return` its answer is found here: training would only find it after its first step.
    """
    ended = [r for r in rollouts if r.failure is None]
    if len(ended) >= EARLY and none_answered(ended) and len({r.value for r in ended}) == 1:
        raise RunStopped(f"before step 1: {unanswered(rollouts)}", cause="no-answers")


def warn_of_unseen(rollouts: Sequence[Rollout], *, step: int | None = None, unrecorded: int = 0) -> bool:
    """Warn of what `unseen_calls` finds in rollouts, of a step if one is given; return whether there was anything."""
    unseen = unseen_calls(rollouts, unrecorded=unrecorded)
    if unseen:
        log.warning("%s%s", "" if step is None else f"step {step}: ", unseen)
    return bool(unseen)


def check_triplets(rollouts: Sequence[Rollout], *, step: int, adapter: Spec) -> None:
    """Stop when a training step has nothing to train on: no calls, no token ids, or no match."""
    valid = [r for r in rollouts if r.failure is None]
    why, cause = untrained_calls(valid, adapter=adapter)
    if why:
        where = f"step {step}: {amount(len(valid), 'rollout')} gave no transitions, so nothing can be learned."
        raise RunStopped(f"{where}\n  {why}", cause=cause)


def with_token_ids(rollouts: Sequence[Rollout], adapter: Adapter) -> list[Rollout]:
    """Return rollouts with the triplets that they would have if their endpoint returned token ids with each call."""
    found = []
    for rollout in rollouts:
        spans = [
            attrs.evolve(span, attributes={**span.attributes, "prompt_token_ids": (0,), "response_token_ids": (0,)})
            if span.name == LLM_CALL and not (SERVER in span.attributes or span.attributes.get("response_token_ids"))
            else span
            for span in rollout.trace.spans
        ]
        trace = attrs.evolve(rollout.trace, spans=spans)
        found.append(attrs.evolve(rollout, trace=trace, triplets=adapter(trace)))
    return found


def untrained_calls(rollouts: Sequence[Rollout], *, adapter: Spec) -> tuple[str, str]:
    """Say why no call of some rollouts would be trained on, and the cause's name; '' and '' if some would.

    Args:
        rollouts: Those that did not fail.
    """
    if not rollouts or any(r.triplets for r in rollouts):
        return "", ""
    calls = [(r.trace, call) for r in rollouts for call in r.trace.llm_calls()]
    if not calls:
        failed = "" if missed_calls(rollouts) else unanswered_calls(rollouts)[1]
        return unseen_calls(rollouts), failed or "calls-not-recorded"
    with_ids = [call for _, call in calls if call.attributes.get("response_token_ids")]
    names = Counter(name for trace, call in calls for name in (trace.nodes(call) or ["(no node)"]))
    seen = ", ".join(f"{name} ({count})" for name, count in names.most_common())
    likely = next((name for name, _ in names.most_common() if name != "(no node)"), "")
    change = f"for example adapter.match={likely}, or " if likely else "to "
    elsewhere = Counter(call.attributes[SERVER] for _, call in calls if SERVER in call.attributes)
    if elsewhere.total() == len(calls):
        servers = ", ".join(f"{server} ({count})" for server, count in elsewhere.most_common())
        return (
            f"All calls ({len(calls)}) went to other servers than the run's: {servers}. Their models are not "
            "trained; the agent must call exactly endpoint.base_url."
        ), "other-server"
    if not with_ids:
        return (
            f"The calls were recorded ({len(calls)}), but the endpoint returned no token ids with them. Use an "
            "endpoint that takes `return_token_ids` (vLLM >= 0.10.2, or agentrig's own server)."
        ), "no-token-ids"
    if not any(call.attributes.get("prompt_token_ids") for call in with_ids):
        return (
            f"The endpoint returned the token ids of replies (`choices[].token_ids`, {amount(len(with_ids), 'call')}), "
            "but not those of prompts (`prompt_token_ids`): without both, a call cannot be trained. Use an endpoint "
            "that returns both for `return_token_ids` (vLLM >= 0.10.2, or agentrig's own server)."
        ), "no-token-ids"
    cure = f"Change what it matches (adapter.match, adapter.model), {change}adapter.match= (empty) to train every call."
    if "match" not in attrs.fields_dict(adapter.config):
        cure = (
            f"Your adapter {adapter.name} returned no triplet for any call: mend it, or choose another (adapter.use)."
        )
    return (
        f"The adapter {adapter.name} kept none of {amount(len(calls), 'call')}. They were made under these nodes: "
        f"{seen}.\n  They named these models: {_models(calls)}.\n  {cure}"
    ), "unmatched-calls"


def _models(calls: Sequence[tuple[Trace, Span]]) -> str:
    """Return the names of models that calls sent, with their number; which of them are not the run's is said."""
    sent: Counter[str] = Counter()
    for _, call in calls:
        name = str(mapping(call.attributes.get("request")).get("model") or "(no name)")
        sent[f"{name}, not the run's" if SERVER in call.attributes else name] += 1
    return ", ".join(f"{name} ({count})" for name, count in sent.most_common())


def _requests(rollouts: Sequence[Rollout], *, trained_only: bool) -> Iterator[Mapping[str, Any]]:
    """Yield the requests to the run's model."""
    for rollout in rollouts:
        trained = {t.span_id for t in rollout.triplets}
        for call in rollout.trace.llm_calls():
            if call.id in trained or not (trained_only or SERVER in call.attributes):
                yield mapping(call.attributes.get("request"))


def _sampling_mismatches(requests: Sequence[Mapping[str, Any]], sampling: Mapping[str, Any]) -> str:
    """Describe the calls that were sampled from another distribution than the run's; '' if there are none."""
    others: Counter[tuple[str, str]] = Counter()
    for request in requests:
        for name in SAMPLING_FIELDS:
            asked, wanted = _asked(request, name), _asked(sampling, name)
            if asked != wanted and (name in sampling or name not in SERVER_DEFAULTS):
                others[(name, str(asked))] += 1
    return "; ".join(
        f"{count} of {len(requests)} calls were sampled with {name} {asked}, the run's is {_asked(sampling, name)}"
        for (name, asked), count in others.most_common()
    )


def _asked(request: Mapping[str, Any], name: str) -> Any:
    """Return a field of `SAMPLING_FIELDS`; values that mean the default are replaced by the default."""
    value = request.get(name)
    neutral = value is None or (name == "top_k" and value == 0) or (name == "logit_bias" and not value)
    return SAMPLING_FIELDS[name] if neutral else value


GREEDY = ". Training samples, so its temperature can't be 0; measurements are greedy anyway"
"""What is said of an agent that sets temperature 0, in place of `SAME_AS_RUN`."""

SAME_AS_RUN = ", or give the run the same (algorithm.temperature)"


def check_sampling(rollouts: Sequence[Rollout], sampling: Mapping[str, Any], *, step: int) -> None:
    """Stop when trained calls were sampled from another distribution than the one that training assumes.

    Also stop when they ask for several choices: only the first choice is trained on, whichever the agent used.
    """
    requests = list(_requests(rollouts, trained_only=True))
    several = sum((number(request.get("n")) or 1) > 1 for request in requests)
    if several:
        raise RunStopped(
            f"step {step}: {several} of {len(requests)} calls that are trained on asked for more than one choice (n): "
            "another tracer than the run's recorded only the first choice.\n  Make one call for each choice.",
            cause="several-choices",
        )
    if refused := other_sampling(requests, sampling) or _shared_seeds(rollouts, sampling):
        raise RunStopped(f"step {step}: {refused}", cause="other-sampling")


SEEDED = (
    "the agent sends a seed of its own, so all rollouts of a task are the same.\n  Leave it out of the calls that are "
    "trained, or exclude their node from training (adapter.match)."
)


def _shared_seeds(rollouts: Sequence[Rollout], sampling: Mapping[str, Any]) -> str:
    """Say that rollouts of a group have the same seed, and it is not the run's; '' if none have."""
    seeds = Counter[tuple[str, Any]]()
    for rollout in rollouts:
        requests = list(_requests([rollout], trained_only=True))
        seeds.update((rollout.group, seed) for seed in _seeds(requests, sampling))
    (_, seed), most = next(iter(seeds.most_common(1)), (("", None), 0))
    return f"{most} rollouts of one group were sampled with seed {seed}: {SEEDED}" if most > 1 else ""


def _seeds(requests: Sequence[Mapping[str, Any]], sampling: Mapping[str, Any]) -> set[str]:
    """Return the seeds in requests that are not the run's."""
    found = {request.get("seed") for request in requests} - {None, sampling.get("seed")}
    return set(map(str, found))


def other_sampling(requests: Sequence[Mapping[str, Any]], sampling: Mapping[str, Any]) -> str:
    """Return why a run refuses to train on calls that were sampled from another distribution; '' if it does not."""
    others = _sampling_mismatches(requests, sampling)
    if not others:
        return ""
    greedy = any(_asked(request, "temperature") == 0 for request in requests)
    return (
        f"{others}: the importance ratios would be wrong.\n  The agent's own values hold in training: "
        f"leave them out of the calls that are trained{GREEDY if greedy else SAME_AS_RUN}. To use "
        "another temperature for a single node, exclude that node from training (adapter.match)."
    )


def refused_sampling(rollouts: Sequence[Rollout], sampling: Mapping[str, Any], measured: Mapping[str, Any]) -> str:
    """Return that `train` would end in its first step, because the calls have a sampling of their own, or ''.

    Args:
        rollouts: Those of `agentrig dev`.
        sampling: What training sets in calls that leave it out.
        measured: What the endpoint of these rollouts set in them; a call that has the same may have it from there.
    """
    certain, perhaps = list[dict[str, Any]](), list[dict[str, Any]]()
    for rollout in rollouts:
        trained = {t.span_id for t in rollout.triplets}
        for call in (call for call in rollout.trace.llm_calls() if call.id in trained):
            asked = call.attributes.get(ASKED) or {}
            stated = {**mapping(call.attributes.get("request")), **asked}
            own = {name: value for name, value in stated.items() if value != measured.get(name)}
            certain.append({**sampling, **own})
            perhaps.append({**sampling, **own, **asked})
    ends = "`agentrig train` would end in its first step"
    if refused := other_sampling(certain, sampling):
        return f"{ends}: {refused}"
    if refused := other_sampling(perhaps, sampling):
        return f"{ends}, unless the agent takes these values from endpoint.sampling: {refused}"
    return f"{ends}, unless each rollout has another seed: {SEEDED}" if _seeds(certain, sampling) else ""


def warn_of_sampling(rollouts: Sequence[Rollout], sampling: Mapping[str, Any], *, mode: Mode) -> bool:
    """Warn when calls of a measurement were sampled with other settings than the run's; return whether any were."""
    others = _sampling_mismatches(list(_requests(rollouts, trained_only=False)), sampling)
    if others:
        told = "%s: %s: the agent sends values of its own (docs/how-to/existing-agent.md)"
        log.warning(told, mode_name(mode), others)
    return bool(others)


def warn_of_constraints(rollouts: Sequence[Rollout], *, step: int) -> bool:
    """Warn when trained calls constrain sampling to a format; return whether any do."""
    found: Counter[str] = Counter()
    for request in (requests := list(_requests(rollouts, trained_only=True))):
        found.update(name for name in CONSTRAINTS if request.get(name) not in (None, "auto", "none", {"type": "text"}))
    for name, count in found.most_common():
        log.warning(
            "step %d: %d of %d trained calls set %s: training computes the tokens' probabilities without that "
            "constraint (docs/agents.md)",
            *(step, count, len(requests), name),
        )
    return bool(found)


def warn_of_fields(rollouts: Sequence[Rollout], settings: Mapping[str, Any]) -> bool:
    """Warn when calls have fields without an effect, or a limit above the run's; return whether any do.

    Args:
        settings: The section `algorithm` of the run's configuration.
    """
    ignored: Counter[str] = Counter()
    limits: list[tuple[int, int]] = []
    for call in (call for rollout in rollouts for call in rollout.trace.llm_calls()):
        ignored.update(call.attributes.get(IGNORED) or ())  # which the gateway has dropped
        ignored["store"] += bool(mapping(call.attributes.get("request")).get("store")) and SERVER not in call.attributes
        asked = call.attributes.get(ASKED) or {}
        limits += [(asked[name], call.attributes["request"][name]) for name in LIMIT if name in asked]
    for name, count in (+ignored).most_common():
        log.warning(
            "%s set %s, which has no effect on the run's model (docs/how-to/existing-agent.md)",
            *(amount(count, "call"), name),
        )
    if limits:
        longest, limit = max(limits)
        keys = [f"algorithm.{key}" for key, _ in flat(settings) if key.rpartition(".")[2] in LIMIT_KEYS]
        log.warning(
            "%s asked for up to %d tokens; the run's limit of %d holds%s",
            *(amount(len(limits), "call"), longest, limit, f" ({keys[0]})" if keys else ""),
        )
    return bool(+ignored or limits)


def warn_of_overpaid(rollouts: Sequence[Rollout], *, step: int, reward: str) -> bool:
    """Warn when answers that are not correct get as much as the best correct one; return whether any do."""
    scored = [r for r in rollouts if r.failure is None and r.value is not None]
    full = max((r.value for r in scored if r.correct and r.value is not None), default=None)
    if full is None:
        return False
    found = [r for r in scored if not r.correct and as_much(r.value or 0.0, full)]
    if found:
        example = found[0]
        log.warning(
            "step %d: the reward %s gave %d of %d answers the full reward, %g, although it says correct=False, for "
            "example %s to task %s: the model will learn to answer so (agentrig validate tries such answers)",
            *(step, reward, len(found), len(scored), full, cut(json_text(example.outcome.answer), 200)),
            example.task.id,
        )
    return bool(found)


def warn_of_loss(first: Sequence[Rollout], last: Sequence[Rollout], *, step: int, run: str) -> bool:
    """Warn when significantly fewer validation tasks are right than in the first validation; return whether they are.

    Where only the reward changed its word about the same answer of the same replies, it says so.

    Args:
        first: The rollouts of the first validation; of a resumed run, that of its checkpoint.
    """
    before, after = ({r.task.id: r for r in rollouts if r.value is not None} for rollouts in (first, last))
    both = [(before[task], after[task]) for task in before.keys() & after.keys()]
    moved = [(a, b) for a, b in both if bool(a.correct) != bool(b.correct)]
    learned = [(a, b) for a, b in moved if _given(a) != _given(b) or _given(a)[0] == "null"]

    def split(pairs: Sequence[tuple[Rollout, Rollout]]) -> tuple[int, int]:
        better = sum(bool(b.correct) for _, b in pairs)
        return better, len(pairs) - better

    def fell(better: int, worse: int) -> bool:
        return worse > better and sign_test(better, worse) <= SIGNIFICANT

    if fell(*split(learned)):
        log.warning(
            "step %d: validation accuracy fell significantly: %d of %d tasks went from wrong to right and %d from "
            "right to wrong. Lower the learning rate (algorithm.lr); Ctrl-C keeps the run. More: agentrig why %s",
            *(step, split(learned)[0], len(both), split(learned)[1], run),
        )
    elif fell(*split(moved)):
        log.warning(
            "step %d: validation accuracy fell by the reward, not the model: %d of the %d tasks that changed have the "
            "same answer, of the same replies, as at first. A reward must depend on the task and the answer alone "
            "(reward.use). More: agentrig why %s",
            *(step, len(moved) - len(learned), len(moved), run),
        )
    return fell(*split(moved))


def _given(rollout: Rollout) -> tuple[str, ...]:
    """Return what the reward had to judge: the replies, the answer, and the agent's own reward."""
    outcome = rollout.outcome
    return replies_of(rollout), json_text(outcome.answer), json_text(outcome.own_reward)


def check_rewards(rollouts: Sequence[Rollout], *, step: int, running: int = 1) -> None:
    """Stop when all rollouts of a training step got the same reward: every advantage would be zero.

    Args:
        running: How many steps in a row have taught nothing, this one included.
    """
    scored = [r for r in rollouts if r.value is not None]
    if len(scored) < 2 or len({r.value for r in scored}) > 1:
        return
    unlike = list({json_text(r.outcome.answer): r for r in reversed(scored)}.values())[::-1]
    first = {r.task.id: r for r in reversed(unlike)}  # one answer of each task is shown before a second one of any
    samples = sorted(unlike, key=lambda r: r is not first[r.task.id])[:3]
    lines = [f"step {step}: all {len(scored)} rollouts got the reward {scored[0].value:g}, so every advantage is zero."]
    refused, cause = unanswered_calls(scored)
    if refused:
        raise RunStopped("\n".join([*lines, f"  {refused}"]), cause=cause)
    if running > 1:
        lines.append(f"  In none of the last {running} steps did the rewards of a group differ.")
    lines += [
        f"  for example, the answer to task {r.task.id} was {cut(json_text(r.outcome.answer), 200)}"
        + (f" -> {dict(r.score.details)}" if r.score and r.score.details else "")
        for r in samples
        if r.outcome.own_reward is None  # such an agent has no answer to show
    ]
    if said := wrong_in_form(scored):
        lines.append(f"  {said}")
    raise RunStopped("\n".join(lines), cause=NO_SIGNAL)


@contextmanager
def dead_server_first(server: Server, advice: Callable[[], str] = lambda: "") -> Iterator[None]:
    """Raise the server's error when a run or a measurement stops because its server died.

    Args:
        advice: Says what a run has lost and how it goes on; '' if there is nothing to say.
    """
    try:
        yield
    except (RunStopped, ServerError) as stopped:
        # a process that is killed closes its connections some time before its parent can see that it is dead
        end = time.monotonic() + (DYING_S if stopped.__cause__ is not None else 0.0)
        while True:
            try:
                server.check()
            except ServerError as dead:
                if not (how := advice()):
                    raise
                raise type(dead)(f"{dead}\n  The unfinished step is lost; {how}") from stopped
            if time.monotonic() > end:
                break
            time.sleep(0.05)
        raise
