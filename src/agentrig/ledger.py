"""The ledger of a run: every LLM call of a training step is trained, masked, or dropped for a reason.

It is double-entry. One side is what the traces recorded. The other side is what the adapter kept and what the
algorithm reports at the end of a step. If the two sides differ, the run ends with a message that names the calls and
which side is wrong.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import attrs

from agentrig.adapters import Adapter, Triplet
from agentrig.errors import RunStopped
from agentrig.rollouts import Rollout
from agentrig.text import amount
from agentrig.traces import ABORTED, LLM_CALL, SERVER, Span

Place = Literal["trained", "masked", "dropped"]
PLACES = ("trained", "masked", "dropped")

CALL_ERROR = "call-error"
ABORTED_CALL = "aborted-call"
OTHER_SERVER = "other-server"
NO_TOKEN_IDS = "no-token-ids"
FAILED_ROLLOUT = "failed-rollout"
UNMATCHED_NODE = "unmatched-node"
UNMATCHED_MODEL = "unmatched-model"
DUPLICATE = "duplicate"
LEFT_OUT_BY_ADAPTER = "left-out-by-adapter"
ZERO_VARIANCE = "zero-variance-group"
ALONE = "alone-in-group"
ZERO_ADVANTAGE = "zero-advantage"
NEGATIVE_SCALE = "negative-scale-zero"
LEFT_OUT_BY_CREDIT = "left-out-by-credit"
NOT_ADMITTED = "not-admitted"
NOT_FINITE = "gradient-not-finite"
CRITIC_WARMUP = "critic-warmup"

REASONS: Mapping[str, str] = {
    CALL_ERROR: "the call failed, or its stream broke off",
    ABORTED_CALL: "the agent ended the call before its answer was complete",
    OTHER_SERVER: "another server than the run's answered: its tokens are from another model",
    NO_TOKEN_IDS: "the server returned no token ids",
    FAILED_ROLLOUT: "the rollout failed: there is no reward to learn from",
    UNMATCHED_NODE: "the adapter trains other graph nodes",
    UNMATCHED_MODEL: "the adapter trains calls that name other models",
    DUPLICATE: "the call was recorded twice; the other record counts",
    LEFT_OUT_BY_ADAPTER: "the adapter left it out and does not say why (it has no method `left_out`)",
    ZERO_VARIANCE: "all rollouts of its group got the same reward at their end, and its advantage is 0",
    ALONE: "its group has no other rollout to compare with: the advantage is 0",
    ZERO_ADVANTAGE: (
        "its advantage is 0 though the rollouts of its group got different rewards: its rollout's reward, or under the "
        "credit turn the call's own, equals the baseline"
    ),
    NEGATIVE_SCALE: "its rollout's reward is below the baseline of its group, and `negative_scale` is 0",
    LEFT_OUT_BY_CREDIT: "the credit leaves it out: it gives it no worth",
    NOT_ADMITTED: "the credit does not admit its group, and other tasks were sampled in its place",
    NOT_FINITE: "the gradient was NaN or infinite, and the update was skipped",
    CRITIC_WARMUP: "only the critic was trained in this step",
}
"""Why a call was dropped, by reason. An algorithm or adapter of your own may add reasons: lower case, with hyphens."""

BY_REWARDS = (ZERO_ADVANTAGE, ZERO_VARIANCE, ALONE, NEGATIVE_SCALE)
"""Of these reasons, the ledger finds the one that the rewards of the group show, and stops the run if there is none."""

WORTHLESS = (LEFT_OUT_BY_CREDIT, ZERO_ADVANTAGE)
"""The reasons of a call that the credit learns nothing from, whatever the other rewards of its group are."""

SHOWN = 3
"""How many calls a message names for each kind of fault."""


class Call(NamedTuple):
    """Which LLM call: a rollout's id, and the id of the call's span in its trace."""

    rollout: str
    span: str


@attrs.frozen
class Entry:
    """What an algorithm did with response tokens of a call.

    A call may have several entries, for example one for its trained and one for its masked tokens. Together they
    must have exactly the tokens that were sampled. A call that is trained in several epochs has one entry.

    Attributes:
        place: `trained`: the tokens are in a loss that changed the weights. `masked`: they were in a sequence as
            context, without loss. `dropped`: they were left out.
        reason: Why it was dropped (see `REASONS`, `BY_REWARDS`); empty for the other places.
        advantage: The advantage that the call was trained with, or each of its response tokens; None if it is not
            known. It is recorded, and changes nothing here.
    """

    call: Call
    place: Place
    tokens: int
    reason: str = ""
    advantage: float | Sequence[float] | None = None


@attrs.define(kw_only=True)
class Recorded:
    """A call in a trace: its task's id, its innermost graph node, the response tokens, its rollout's group and reward.

    `reason` is why it did not go to the algorithm; empty if it did.
    """

    call: Call
    task: str
    node: str
    tokens: int
    group: str
    value: float | None
    reason: str = ""

    def __str__(self) -> str:
        return f"rollout {self.call.rollout}, task {self.task}, node {self.node or '(no node)'}, call {self.call.span}"

    def row(
        self, place: str, tokens: int, reason: str = "", advantage: float | Sequence[float] | None = None
    ) -> dict[str, Any]:
        """Return where some of its tokens went, for `StepTotals.rows`."""
        where = {"rollout": self.call.rollout, "span": self.call.span, "node": self.node}
        of_tokens = None
        if isinstance(advantage, Sequence):
            of_tokens, advantage = json.dumps(list(advantage)), math.fsum(advantage) / max(len(advantage), 1)
        went = {"place": place, "reason": reason, "tokens": tokens, "advantage": advantage}
        return {**where, **went, "token_advantages": of_tokens}


@attrs.frozen
class StepTotals:
    """What became of the calls of a step.

    Attributes:
        rows: Each recorded call and where it went: `rollout`, `span`, `node`, `place`, `reason`, `tokens`,
            `advantage` and, where each token has its own, `token_advantages` (JSON; `advantage` is their mean). A call
            that is in two places has two rows.
        calls: Number of calls `recorded`, `trained`, `masked`, `handed_over` (to an algorithm that does not report
            what it did with them) and, by reason, `dropped`. `unaccounted` only if the books do not close.
        tokens: The same for response tokens.
        wrong: What is wrong, as the message of an error; empty if the books close.
    """

    rows: Sequence[Mapping[str, Any]]
    calls: Mapping[str, Any]
    tokens: Mapping[str, Any]
    wrong: str = ""


class Ledger:
    """Counts the calls of a training step, and checks at its end that none is missing.

    Args:
        adapter: The run's adapter, which may say why it leaves a call out.
        relative: See `CreditSpec.relative`; without it, no rewards contradict an advantage of 0.
    """

    def __init__(
        self,
        adapter: Adapter,
        *,
        adapter_name: str,
        algorithm_name: str,
        negative_scale: float = 1.0,
        relative: bool = True,
    ) -> None:
        self._left_out = getattr(adapter, "left_out", None)
        self._adapter, self._algorithm, self._negative_scale = adapter_name, algorithm_name, negative_scale
        self._relative = relative
        self._open()

    def _open(self) -> None:
        self._rollouts: set[str] = set()
        self._recorded: dict[Call, Recorded] = {}
        self._values: dict[str, list[tuple[float, bool]]] = defaultdict(list)

    def record(self, rollouts: Sequence[Rollout], *, step: int, expected: int | None = None) -> None:
        """Count the calls of rollouts, and check the adapter's triplets.

        Raises:
            RunStopped: A rollout is missing or was returned twice, or the adapter's triplets are not what was sampled.
        """
        ids = Counter(r.id for r in rollouts)
        again = [i for i, n in ids.items() if n > 1 or i in self._rollouts]
        asked = len(rollouts) if expected is None else expected
        if again or len(rollouts) != asked:
            twice = f"; returned more than once: {', '.join(again[:SHOWN])}" if again else ""
            raise RunStopped(
                f"step {step}: {asked} rollouts were asked for, {len(rollouts)} came back{twice}. The runners or the "
                "engine lost or doubled rollouts: resume the run, and report this if it happens again.",
                cause="lost-calls",
            )
        self._rollouts.update(ids)
        faults: dict[str, list[str]] = defaultdict(list)  # what is wrong, and with which calls
        for rollout in rollouts:
            if rollout.value is not None:
                self._values[rollout.group].append((rollout.value, bool(rollout.triplets)))
            kept: dict[str, list[Triplet]] = defaultdict(list)
            for triplet in rollout.triplets:
                kept[triplet.span_id].append(triplet)
            calls = [span for span in rollout.trace.spans if span.name == LLM_CALL]
            for call in calls:
                entry = Recorded(
                    call=Call(rollout.id, call.id),
                    task=rollout.task.id,
                    node=next(iter(rollout.trace.nodes(call)), ""),
                    tokens=len(call.attributes.get("response_token_ids") or ()),
                    group=rollout.group,
                    value=rollout.value,
                )
                self._recorded[entry.call] = entry
                triplets, unusable = kept.pop(call.id, []), _unusable(call)
                if len(triplets) > 1:
                    faults["a call gave more than one triplet"].append(f"{entry} ({len(triplets)} triplets)")
                elif triplets and unusable:
                    faults["a call gave a triplet that cannot be trained"].append(f"{entry} ({unusable})")
                elif triplets and (difference := _difference(call, triplets[0])):
                    faults["a triplet does not have its call's tokens"].append(f"{entry} ({difference})")
                elif not triplets:
                    ended = unusable in ("", ABORTED_CALL) and rollout.failure  # its end took its open calls with it
                    entry.reason = FAILED_ROLLOUT if ended else unusable
                    entry.reason = entry.reason or self._reason(rollout, call, calls)
                    if not entry.reason:
                        faults["a call that it did not report as left out has no triplet"].append(str(entry))
            for triplet in (triplet for triplets in kept.values() for triplet in triplets):
                which = f"rollout {rollout.id}, task {rollout.task.id}, span {triplet.span_id or '(none)'}"
                what = f"{which} ({len(triplet.response_ids)} tokens)"
                faults["a triplet belongs to no recorded call of its rollout"].append(what)
        if faults:
            start = f"the ledger of calls does not close: the adapter {self._adapter} does not train what was sampled."
            end = (
                "An adapter returns at most one triplet for each recorded call, with the call's span_id and its exact "
                "token ids (docs/adapters.md)."
            )
            raise RunStopped(_message(f"step {step}: {start}", faults, end), cause="lost-calls")

    def _reason(self, rollout: Rollout, call: Span, calls: Sequence[Span]) -> str:
        """Return why the adapter left a usable call out; empty if it reports that it kept the call."""
        if self._left_out is not None:
            return self._left_out(rollout.trace, call) or ""
        same = "gen_ai.response.id", "response_token_ids", "prompt_token_ids"
        own = [call.attributes.get(key) for key in same]
        others = [[other.attributes.get(key) for key in same] for other in calls if other is not call]
        return DUPLICATE if own[0] and own in others else LEFT_OUT_BY_ADAPTER

    def _explain(self, value: float | None, group: Sequence[tuple[float, bool]]) -> tuple[str, str]:
        """Return why a call has the advantage 0, and how the rewards of its group contradict that; '' if they don't."""
        everyone, callers = [v for v, _ in group], [v for v, has_calls in group if has_calls]
        for values in (everyone, callers):  # a baseline over calls uses the callers only
            if len(values) < 2:
                return ALONE, ""
            if min(values) == max(values):
                return ZERO_VARIANCE, ""
        if value is not None and value < sum(everyone) / len(everyone) and not self._negative_scale:
            return NEGATIVE_SCALE, ""
        if value is None or min(everyone) < value < max(everyone):
            return ZERO_ADVANTAGE, ""
        others = ", ".join(f"{v:g}" for v in everyone)
        return ZERO_ADVANTAGE, f"its reward is {value:g}, those of its group are {others}"

    def close(self, entries: Iterable[Entry] | None, *, step: int) -> StepTotals:
        """Close a step's books.

        Args:
            entries: What the algorithm reports; None if it reports nothing.
        """
        recorded, values = self._recorded, self._values
        self._open()
        rows, faults = list[dict[str, Any]](), defaultdict[str, list[str]](list)
        told: dict[Call, list[Entry]] = defaultdict(list)
        for entry in entries or ():
            found = recorded.get(entry.call)
            if found is not None and not found.reason:
                told[entry.call].append(entry)
            elif entry.place == "trained" and found is not None:
                faults["a call was trained that the adapter did not keep"].append(f"{found} ({found.reason})")
            elif entry.place == "trained":
                which = f"rollout {entry.call.rollout}, call {entry.call.span or '(none)'} ({entry.tokens} tokens)"
                faults["a call was trained that no trace of this step has"].append(which)
        for call, r in recorded.items():
            tokens = sum(entry.tokens for entry in told[call])
            if r.reason or entries is None:
                rows.append(r.row("dropped" if r.reason else "handed_over", r.tokens, r.reason))
            elif not told[call] or tokens != r.tokens:
                rows.append(r.row("unaccounted", r.tokens))
                if not told[call]:
                    faults["a call got lost: neither trained, masked nor dropped"].append(f"{r} ({r.tokens} tokens)")
                elif tokens > r.tokens:
                    more = f"{r} ({tokens} tokens, {r.tokens} were sampled)"
                    faults["a call was trained or counted more than once"].append(more)
                else:
                    faults["a part of a call's response got lost"].append(f"{r} ({tokens} of {r.tokens} tokens)")
            for entry in sorted(told[call], key=lambda e: PLACES.index(e.place)) if tokens == r.tokens else ():
                reason, wrong = entry.reason, ""
                whole = all(each.place == "dropped" for each in told[call])  # not some tokens of a trained call
                if whole and reason in BY_REWARDS:
                    reason, wrong = self._explain(r.value, values[r.group])
                    wrong = wrong if self._relative else ""
                rows.append(r.row(entry.place, entry.tokens, reason, entry.advantage))
                if wrong:
                    what = f"a call was dropped for a reason that its group's rewards contradict, {reason}"
                    faults[what].append(f"{r} ({wrong})")
                if entry.place == "dropped" and not reason:
                    faults["a call was dropped without a reason"].append(str(r))
        handed = [r for r in recorded.values() if not r.reason]
        given = f"{amount(len(handed), 'call')} ({amount(sum(r.tokens for r in handed), 'response token')})"
        start = (
            f"step {step}: the ledger of calls does not close: what the algorithm {self._algorithm} did with its "
            f"{given} is not what it was given."
        )
        end = (
            "The adapter's side is right: look for the fault in the algorithm, between its samples and its loss "
            "(docs/proofs.md). The weights of this step are not saved."
        )
        return StepTotals(
            rows=rows,
            calls=_book(rows, len(recorded), calls=True),
            tokens=_book(rows, sum(r.tokens for r in recorded.values()), calls=False),
            wrong=_message(start, faults, end) if faults else "",
        )


def _message(start: str, faults: Mapping[str, Sequence[str]], end: str) -> str:
    """Return a message with a line for each kind of fault, with its first calls."""
    lines = [
        f"  {len(calls)} x {what}: {'; '.join(calls[:SHOWN])}{'; …' if len(calls) > SHOWN else ''}"
        for what, calls in faults.items()
    ]
    return "\n".join([start, *lines, f"  {end}"])


def _book(rows: Iterable[Mapping[str, Any]], recorded: int, *, calls: bool) -> dict[str, Any]:
    """Return the sums of rows by place and reason: of calls, each counted in its first row, or of tokens."""
    book: dict[str, Any] = {"recorded": recorded, "trained": 0, "masked": 0, "handed_over": 0}
    dropped: Counter[str] = Counter()
    seen = set()
    for row in rows:
        call = row["rollout"], row["span"]
        n = int(call not in seen) if calls else row["tokens"]
        seen.add(call)
        if row["place"] == "dropped":
            dropped[row["reason"]] += n
        else:
            book[row["place"]] = book.get(row["place"], 0) + n
    return {**book, "dropped": dict(sorted(dropped.items()))}


def _unusable(call: Span) -> str:
    """Return why a call cannot be trained with any adapter; '' if it can."""
    if call.error is not None:
        return ABORTED_CALL if call.attributes.get(ABORTED) else CALL_ERROR
    if SERVER in call.attributes:
        return OTHER_SERVER
    if not call.attributes.get("response_token_ids") or not call.attributes.get("prompt_token_ids"):
        return NO_TOKEN_IDS
    return ""


def _difference(call: Span, triplet: Triplet) -> str:
    """Return how a triplet's tokens or log-probabilities differ from its call's; '' if they do not."""
    recorded = call.attributes
    logprobs = recorded.get("response_logprobs") if triplet.logprobs else ()
    for part, theirs, ours in (
        ("response", recorded.get("response_token_ids") or (), triplet.response_ids),
        ("prompt", recorded.get("prompt_token_ids") or (), triplet.prompt_ids),
        ("log-probabilities", logprobs or (), (triplet.logprobs or ()) if logprobs else ()),
    ):
        if len(theirs) != len(ours):
            return f"{len(ours)} {part} tokens, {len(theirs)} were recorded"
        place = next((i for i, (a, b) in enumerate(zip(theirs, ours, strict=True)) if a != b), None)
        if place is not None:
            return f"its {part} differ{'' if part.endswith('s') else 's'} from token {place} on"
    return ""


def totals(lines: Iterable[Mapping[str, Any]], key: str) -> dict[str, Any]:
    """Return the sums of `calls` or `call_tokens` over lines of `metrics.jsonl`."""
    sums: Counter[str] = Counter(recorded=0, trained=0, masked=0, handed_over=0)
    dropped: Counter[str] = Counter()
    for line in lines:
        book = dict(line.get(key) or {})
        dropped.update(book.pop("dropped", {}))
        sums.update(book)
    return {**sums, "dropped": dict(dropped)}


__all__ = ["REASONS", "Call", "Entry", "Place"]
