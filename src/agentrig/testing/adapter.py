"""The checks of an adapter."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import attrs

from agentrig.adapters import Adapter, Triplet, identified, same_tokens, triplet_of
from agentrig.testing.elsewhere import elsewhere
from agentrig.testing.kit import basic
from agentrig.testing.recorded import recorded_traces
from agentrig.testing.subject import CheckFailed, Subject, difference
from agentrig.traces import Span, Trace


@attrs.define(kw_only=True, eq=False, slots=False)
class AdapterSubject(Subject):
    """An adapter.

    Attributes:
        traces: Name to trace; the recorded ones of five frameworks by default.
    """

    traces: Mapping[str, Trace] = attrs.field(factory=recorded_traces)

    def adapted(self, adapter: Adapter | None = None) -> dict[str, list[Triplet]]:
        """Return the triplets of each trace; the adapter gets copies."""
        made: Adapter = self.made if adapter is None else adapter
        return {name: list(made(copy.deepcopy(trace))) for name, trace in self.traces.items()}

    @cached_property
    def there(self) -> dict[str, list[Triplet]]:
        """The triplets in another process."""
        return elsewhere(AdapterSubject.adapted, attrs.evolve(self.sendable(), traces=self.traces))

    @cached_property
    def matched(self) -> dict[str, list[tuple[Triplet, Span | None]]]:
        """The triplets of each trace with their calls, failed ones too; None where no call has the tokens."""
        found = {}
        for name, triplets in self.adapted().items():
            spans = [attrs.evolve(span, error=None) for span in self.traces[name].spans]
            calls = {call.id: call for call in _calls(self.traces[name])}
            of_spans = identified(triplets, Trace(rollout_id=name, spans=spans))
            found[name] = [(triplet, calls.get(triplet.span_id)) for triplet in of_spans]
        return found


@basic
def check_triplets(subject: AdapterSubject) -> None:
    """It returns a list of triplets for every trace, an empty one without calls, and does not end its process.

    Why: Each such rollout fails with `adapter-error`, and nothing of it is trained.
    Cure: Return a list of `agentrig.Triplet`, empty for a trace without calls; `agentrig.adapters.triplet_of(call)`
        makes one.
    """
    _ = subject.there  # first where it can end nothing else
    root = Span(id="root", parent=None, name="rollout", start=0.0, end=1.0)
    empty = {"without spans": Trace(rollout_id="empty"), "without calls": Trace(rollout_id="root", spans=(root,))}
    for name, trace in {**empty, **subject.traces}.items():
        found = subject.made(copy.deepcopy(trace))
        if not isinstance(found, Sequence) or not all(isinstance(t, Triplet) for t in found):
            raise CheckFailed(f"trace {name}: it returned {found!r:.80}")
        if name in empty and found:
            raise CheckFailed(f"a trace {name} gave {len(found)} triplets")


def check_keeps_some(subject: AdapterSubject) -> None:
    """It keeps a call of at least one trace.

    Why: Nothing is trained: the run stops in its first step.
    Cure: Compare the names that it matches with those of the trace; `agentrig dev` shows them.
    """
    if not any(subject.matched.values()):
        nodes = {node for trace in subject.traces.values() for call in _calls(trace) for node in trace.nodes(call)}
        raise CheckFailed(f"no triplet of any trace; their nodes: {', '.join(sorted(nodes))}")


def check_exact_tokens(subject: AdapterSubject) -> None:
    """Every triplet has exactly the tokens and log-probabilities of one recorded call: none lost, none invented.

    Why: What is trained is not what was sampled: the importance ratios are wrong.
    Cure: Copy `prompt_token_ids`, `response_token_ids` and `response_logprobs` whole, one log-probability for each
        response token; tokenize no text again.
    """
    for name, triplet, call in _each(subject):
        if call is None or not same_tokens(call, triplet):
            near = call or next(iter(_calls(subject.traces[name])), None)
            sizes = [str(len(near.attributes[f"{part}_token_ids"])) for part in ("prompt", "response")] if near else []
            raise CheckFailed(
                f"trace {name}: a triplet of {len(triplet.prompt_ids)} + {len(triplet.response_ids)} tokens equals no "
                f"call; the nearest has {' + '.join(sizes) or 'none'}"
            )
        known = call.attributes.get("response_logprobs")
        found = None if triplet.logprobs is None else list(triplet.logprobs)
        if known is not None and found != list(known):
            what = "none" if found is None else f"{len(found)}, of which the first is {found[:1]}"
            raise CheckFailed(
                f"trace {name}: {len(known)} log-probabilities are recorded, the first {known[:1]}; the triplet has "
                f"{what}"
            )


def check_once(subject: AdapterSubject) -> None:
    """No call has two triplets.

    Why: A call that is trained twice has twice the weight of the others.
    Cure: Return one triplet for each call, with its `span_id`.
    """
    for name, found in subject.matched.items():
        calls, ids = _calls(subject.traces[name]), [triplet.span_id for triplet, _ in found]
        known = {tuple(call.attributes["response_token_ids"]) for call in calls}
        twice = any(ids.count(i) > 1 for i in ids if i)
        extra = not all(ids) and all(triplet.response_ids in known for triplet, _ in found)
        if twice or extra:
            raise CheckFailed(f"trace {name}: {len(found)} triplets of {len(calls)} calls")


def check_failed_calls(subject: AdapterSubject) -> None:
    """No call that failed, broke off or went to another server is kept.

    Why: The tokens of a broken stream, or of another model, would be trained as if the policy had sampled them.
    Cure: Take the calls of `trace.llm_calls()` and `triplet_of(call)`: they leave failed and foreign calls out.
    """
    for name, _, call in _each(subject):
        if call is not None and triplet_of(call) is None:
            raise CheckFailed(f"trace {name}: it keeps a call that failed: {call.error}")


def check_accounts(subject: AdapterSubject) -> None:
    """Every call that could be trained has a triplet or a reason, and not both.

    Why: Calls vanish from training, and nobody learns why.
    Cure: Add a method `left_out(trace, call)` that returns the reason for a call that it leaves out, else None.
    """
    left_out = getattr(subject.made, "left_out", None)
    for name, found in subject.matched.items():
        trace, kept = subject.traces[name], {triplet.span_id for triplet, _ in found}
        for number, call in enumerate(c for c in trace.llm_calls() if triplet_of(c) is not None):
            reason = left_out(trace, call) if left_out is not None else None
            if not reason and call.id not in kept:
                raise CheckFailed(f"trace {name}: call {number} has no triplet and no reason")
            if reason and call.id in kept:
                raise CheckFailed(f"trace {name}: call {number} has a triplet, and left_out returns {reason!r}")


def check_same_twice(subject: AdapterSubject) -> None:
    """The same traces give the same triplets: again, from an adapter that is built again, and in another process.

    Why: The audit of a step, a resumed run or another machine sees other data than the step was trained on.
    Cure: Keep no state between traces; use no random numbers, no `hash()` of a text and no order of a set.
    """
    first = _plain(subject.adapted())
    others = {"again": subject.adapted(), "built again": subject.adapted(subject.build())}
    for how, second in {**others, "in another process": subject.there}.items():
        if different := difference(first, _plain(second)):
            raise CheckFailed(f"{how}: {different}")


def check_leaves_trace(subject: AdapterSubject) -> None:
    """It does not change the trace.

    Why: The report, the ledger and the guards read the same trace after the adapter.
    Cure: Copy what you change: `dict(span.attributes)`, `list(ids)`.
    """
    for name, trace in subject.traces.items():
        given = copy.deepcopy(trace)
        subject.made(given)
        for before, after in zip(trace.spans, given.spans, strict=True):
            if different := difference(attrs.asdict(before), attrs.asdict(after)):
                raise CheckFailed(f"trace {name}, span {before.name}: {different}")


def _calls(trace: Trace) -> list[Span]:
    """Return the calls with token ids, failed ones too."""
    return [s for s in trace.spans if s.attributes.get("response_token_ids")]


def _each(subject: AdapterSubject) -> list[tuple[str, Triplet, Span | None]]:
    """Return every triplet with its trace's name and its call."""
    return [(name, *pair) for name, found in subject.matched.items() for pair in found]


def _plain(found: Mapping[str, Sequence[Triplet]]) -> dict[str, Any]:
    return {name: [attrs.asdict(triplet) for triplet in triplets] for name, triplets in found.items()}
