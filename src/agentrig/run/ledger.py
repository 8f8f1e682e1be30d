"""The ledger of a run: every LLM call of a training step is trained, masked, or dropped for a reason.

It is double-entry. One side is what the traces recorded. The other side is what the adapter kept and what the
algorithm reports. If the two sides of a step differ, the run ends with a message that names the calls and which side
is wrong.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from agentrig.adapters import Adapter, Triplet
from agentrig.errors import RunStopped
from agentrig.ledger import (
    ALONE,
    CALL_ERROR,
    DUPLICATE,
    FAILED_ROLLOUT,
    LEFT_OUT_BY_ADAPTER,
    NEGATIVE_SCALE,
    NO_TOKEN_IDS,
    OTHER_SERVER,
    ZERO_ADVANTAGE,
    ZERO_VARIANCE,
    Call,
    Entry,
)
from agentrig.rollouts import Rollout
from agentrig.traces import LLM_CALL, SERVER, Span

SHOWN = 3
"""How many calls a message names for each kind of fault."""


@attrs.frozen
class Recorded:
    """A call in a trace.

    Attributes:
        call: Which call.
        task: The task's id.
        node: The innermost graph node that made it.
        tokens: Number of response tokens.
        group: The batch and the group of its rollout.
        value: Its rollout's reward.
        reason: Why it did not go to the algorithm; empty if it did.
    """

    call: Call
    task: str
    node: str
    tokens: int
    group: tuple[int, str]
    value: float | None
    reason: str = ""

    def __str__(self) -> str:
        node = self.node or "(no node)"
        return f"rollout {self.call.rollout}, task {self.task}, node {node}, call {self.call.span}"


class Faults:
    """Calls that are not where they should be, by what is wrong with them."""

    def __init__(self) -> None:
        self.found: dict[str, list[str]] = defaultdict(list)

    def add(self, what: str, which: Any, more: str = "") -> None:
        """Add a call; `what` describes the fault."""
        self.found[what].append(f"{which}{f' ({more})' if more else ''}")

    def lines(self) -> list[str]:
        """Return one line for each kind of fault, with the first calls."""
        return [
            f"  {len(calls)} x {what}: {'; '.join(calls[:SHOWN])}{'; …' if len(calls) > SHOWN else ''}"
            for what, calls in self.found.items()
        ]


@attrs.frozen
class Books:
    """The counts of a step.

    Attributes:
        calls: Number of calls `recorded`, `trained`, `masked`, `handed_over` (to an algorithm that does not report
            what it did with them) and, by reason, `dropped`. `unaccounted` only if the books do not close.
        tokens: The same for response tokens.
        wrong: What is wrong, as the message of an error; empty if the books close.
        rows: Each recorded call and where it went: `rollout`, `span`, `node`, `place`, `reason`, `tokens` and
            `advantage`. A call that is in two places has two rows.
    """

    calls: Mapping[str, Any]
    tokens: Mapping[str, Any]
    wrong: str = ""
    rows: Sequence[Mapping[str, Any]] = ()


class Ledger:
    """Counts the calls of a training step, and closes its books.

    Args:
        adapter: The run's adapter, which may say why it leaves a call out.
        adapter_name: Its name, for messages.
        algorithm_name: The algorithm's name, for messages.
    """

    def __init__(self, adapter: Adapter, *, adapter_name: str, algorithm_name: str) -> None:
        self._left_out = getattr(adapter, "left_out", None)
        self._adapter, self._algorithm = adapter_name, algorithm_name
        self._open()

    def _open(self) -> None:
        self._rollouts: set[str] = set()
        self._recorded: dict[Call, Recorded] = {}
        self._values: dict[tuple[int, str], list[tuple[float, bool]]] = defaultdict(list)
        self._batches = 0

    def record(self, rollouts: Sequence[Rollout], *, step: int, expected: int | None = None) -> None:
        """Count the calls of rollouts, and check the adapter's triplets.

        Args:
            rollouts: A batch of training rollouts.
            step: The training step.
            expected: How many rollouts were requested.

        Raises:
            RunStopped: A rollout is missing or was returned twice, or the adapter's triplets are not what was sampled.
        """
        ids = Counter(r.id for r in rollouts)
        again = [i for i, n in ids.items() if n > 1 or i in self._rollouts]
        if again or (expected is not None and len(rollouts) != expected):
            asked = len(rollouts) if expected is None else expected
            twice = f"; returned more than once: {', '.join(again[:SHOWN])}" if again else ""
            raise RunStopped(
                f"step {step}: {asked} rollouts were asked for, {len(rollouts)} came back{twice}. The runners or the "
                "engine lost or doubled rollouts: resume the run, and report this if it happens again.",
                cause="lost-calls",
            )
        self._rollouts.update(ids)
        self._batches += 1
        faults = Faults()
        for rollout in rollouts:
            self._record(rollout, faults)
        if faults.found:
            raise RunStopped(
                "\n".join(
                    [
                        f"step {step}: the ledger of calls does not close: the adapter {self._adapter} does not train "
                        "what was sampled.",
                        *faults.lines(),
                        "  An adapter returns at most one triplet for each recorded call, with the call's span_id and "
                        "its exact token ids (docs/adapters.md).",
                    ]
                ),
                cause="lost-calls",
            )

    def _record(self, rollout: Rollout, faults: Faults) -> None:
        calls = [span for span in rollout.trace.spans if span.name == LLM_CALL]
        kept: dict[str, list[Triplet]] = defaultdict(list)
        for triplet in rollout.triplets:
            kept[triplet.span_id].append(triplet)
        group = (self._batches, rollout.group)
        if rollout.value is not None:
            self._values[group].append((rollout.value, bool(rollout.triplets)))
        for call in calls:
            nodes = rollout.trace.nodes(call)
            entry = Recorded(
                call=Call(rollout.id, call.id),
                task=rollout.task.id,
                node=nodes[0] if nodes else "",
                tokens=len(call.attributes.get("response_token_ids") or ()),
                group=group,
                value=rollout.value,
            )
            triplets = kept.pop(call.id, ())
            unusable = unusable_for(call)
            if triplets:
                _check_kept(entry, call, triplets, unusable, faults)
            else:
                reason = unusable or (FAILED_ROLLOUT if rollout.failure else self._reason(rollout, call, calls))
                if not reason:
                    faults.add("a call that it did not report as left out has no triplet", entry)
                entry = attrs.evolve(entry, reason=reason or LEFT_OUT_BY_ADAPTER)
            self._recorded[entry.call] = entry
        for span, triplets in kept.items():
            which = f"rollout {rollout.id}, task {rollout.task.id}, span {span or '(none)'}"
            for triplet in triplets:
                tokens = f"{len(triplet.response_ids)} tokens"
                faults.add("a triplet belongs to no recorded call of its rollout", which, tokens)

    def _reason(self, rollout: Rollout, call: Span, calls: Sequence[Span]) -> str:
        """Return why the adapter left a usable call out; empty if it reports that it kept the call."""
        if self._left_out is not None:
            return self._left_out(rollout.trace, call) or ""
        return DUPLICATE if any(_same(call, other) for other in calls) else LEFT_OUT_BY_ADAPTER

    def close(self, entries: Iterable[Entry] | None, *, step: int) -> Books:
        """Close a step's books.

        Args:
            entries: What the algorithm reports; None if it reports nothing.
            step: The training step.
        """
        books = self._books(entries, step=step)
        self._open()
        return books

    def _books(self, entries: Iterable[Entry] | None, *, step: int) -> Books:
        counted = _Columns()
        for recorded in self._recorded.values():
            if recorded.reason:
                counted.add(recorded.reason, calls=1, tokens=recorded.tokens, dropped=True)
                counted.note(recorded, "dropped", recorded.reason, recorded.tokens)
        handed = {call: r for call, r in self._recorded.items() if not r.reason}
        if entries is None:
            for recorded in handed.values():
                counted.add("handed_over", calls=1, tokens=recorded.tokens)
                counted.note(recorded, "handed_over", "", recorded.tokens)
            return self._closed(counted)
        faults = Faults()
        said: dict[Call, list[Entry]] = defaultdict(list)
        for entry in entries:
            if entry.call in handed:
                said[entry.call].append(entry)
            elif entry.place == "trained":
                found = self._recorded.get(entry.call)
                if found is None:
                    which = f"rollout {entry.call.rollout}, call {entry.call.span or '(none)'}"
                    faults.add("a call was trained that no trace of this step has", which, f"{entry.tokens} tokens")
                else:
                    faults.add("a call was trained that the adapter did not keep", found, found.reason)
        for call, recorded in handed.items():
            self._place(recorded, said.get(call, ()), counted, faults)
        if not faults.found:
            return self._closed(counted)
        tokens = sum(r.tokens for r in handed.values())
        wrong = [
            f"step {step}: the ledger of calls does not close: what the algorithm {self._algorithm} did with its "
            f"{len(handed)} calls ({tokens} response tokens) is not what it was given.",
            *faults.lines(),
            "  The adapter's side is right: look for the fault in the algorithm, between its samples and its loss "
            "(docs/proofs.md). The weights of this step are not saved.",
        ]
        return self._closed(counted, "\n".join(wrong))

    def _place(self, recorded: Recorded, entries: Sequence[Entry], counted: _Columns, faults: Faults) -> None:
        """Count a call that went to the algorithm, or add a fault."""
        tokens = sum(e.tokens for e in entries)
        if not entries:
            faults.add("a call got lost: neither trained, masked nor dropped", recorded, f"{recorded.tokens} tokens")
        elif tokens > recorded.tokens:
            more = f"{tokens} tokens, {recorded.tokens} were sampled"
            faults.add("a call was trained or counted more than once", recorded, more)
        elif tokens < recorded.tokens:
            faults.add("a part of a call's response got lost", recorded, f"{tokens} of {recorded.tokens} tokens")
        else:
            for entry in entries:
                if entry.place == "dropped" and (wrong := self._false(recorded, entry.reason)):
                    what = f"a call was dropped for a reason that its group's rewards contradict, {entry.reason}"
                    faults.add(what if entry.reason else "a call was dropped without a reason", recorded, wrong)
            first = min(entries, key=lambda e: ("trained", "masked", "dropped").index(e.place))
            for entry in entries:
                dropped = entry.place == "dropped"
                column = entry.reason if dropped else entry.place
                counted.add(column, calls=int(entry is first), tokens=entry.tokens, dropped=dropped)
                counted.note(recorded, entry.place, entry.reason, entry.tokens, entry.advantage)
            return
        counted.add("unaccounted", calls=1, tokens=recorded.tokens)

    def _false(self, recorded: Recorded, reason: str) -> str:
        """Return why the rewards contradict the reason for which a call was dropped; '' if they do not."""
        group, value = self._values[recorded.group], recorded.value
        everyone = [v for v, _ in group]
        callers = [v for v, has_calls in group if has_calls]  # a baseline over calls uses only these
        if value is None or not reason:
            return "" if reason else "each dropped call needs one"
        wrong = {
            ZERO_VARIANCE: len(set(everyone)) > 1 and len(set(callers)) > 1,
            ALONE: len(everyone) > 1 and len(callers) > 1,
            ZERO_ADVANTAGE: not min(everyone) < value < max(everyone),
            NEGATIVE_SCALE: value == max(everyone),
        }
        if not wrong.get(reason):
            return ""
        return f"its reward is {value:g}, those of its group are {', '.join(f'{v:g}' for v in everyone)}"

    def _closed(self, counted: _Columns, wrong: str = "") -> Books:
        recorded = self._recorded.values()
        calls, tokens = counted.books(len(recorded), sum(r.tokens for r in recorded))
        return Books(calls, tokens, wrong, counted.rows)


class _Columns:
    """Counts of calls and tokens, by place or by reason."""

    def __init__(self) -> None:
        self._sums: dict[tuple[bool, str], list[int]] = defaultdict(lambda: [0, 0])
        self.rows: list[dict[str, Any]] = []

    def note(self, recorded: Recorded, place: str, reason: str, tokens: int, advantage: float | None = None) -> None:
        """Note where tokens of a call went."""
        rollout, span = recorded.call
        row = {"rollout": rollout, "span": span, "node": recorded.node, "place": place, "reason": reason}
        self.rows.append({**row, "tokens": tokens, "advantage": advantage})

    def add(self, column: str, *, calls: int, tokens: int, dropped: bool = False) -> None:
        sums = self._sums[(dropped, column)]
        sums[0] += calls
        sums[1] += tokens

    def books(self, *recorded: int) -> list[dict[str, Any]]:
        """Return the counts of calls and those of tokens."""
        books = []
        for kind, total in enumerate(recorded):
            book: dict[str, Any] = {"recorded": total, "trained": 0, "masked": 0, "handed_over": 0}
            book |= {column: sums[kind] for (dropped, column), sums in self._sums.items() if not dropped}
            book["dropped"] = {column: sums[kind] for (dropped, column), sums in sorted(self._sums.items()) if dropped}
            books.append(book)
        return books


def unusable_for(call: Span) -> str:
    """Return why a call cannot be trained with any adapter; '' if it can."""
    if call.error is not None:
        return CALL_ERROR
    if SERVER in call.attributes:
        return OTHER_SERVER
    if not call.attributes.get("response_token_ids") or not call.attributes.get("prompt_token_ids"):
        return NO_TOKEN_IDS
    return ""


def totals(lines: Iterable[Mapping[str, Any]], key: str) -> dict[str, Any]:
    """Return the sums of `calls` or `call_tokens` over lines of `metrics.jsonl`.

    Lines of earlier versions don't have them and are left out.
    """
    sums: Counter[str] = Counter(recorded=0, trained=0, masked=0, handed_over=0)
    dropped: Counter[str] = Counter()
    for line in lines:
        book = dict(line.get(key) or {})
        dropped.update(book.pop("dropped", {}))
        sums.update(book)
    return {**sums, "dropped": dict(dropped)}


def _check_kept(entry: Recorded, call: Span, triplets: Sequence[Triplet], unusable: str, faults: Faults) -> None:
    if len(triplets) > 1:
        faults.add("a call gave more than one triplet", entry, f"{len(triplets)} triplets")
    elif unusable:
        faults.add("a call gave a triplet that cannot be trained", entry, unusable)
    elif difference := _difference(call, triplets[0]):
        faults.add("a triplet does not have its call's tokens", entry, difference)


def _difference(call: Span, triplet: Triplet) -> str:
    """Return how a triplet's tokens differ from its call's; '' if they do not."""
    for part, ids in (("response", triplet.response_ids), ("prompt", triplet.prompt_ids)):
        recorded = call.attributes.get(f"{part}_token_ids") or ()
        if len(recorded) != len(ids):
            return f"{len(ids)} {part} tokens, {len(recorded)} were recorded"
        if tuple(recorded) != tuple(ids):
            place = next(i for i, (a, b) in enumerate(zip(recorded, ids, strict=True)) if a != b)
            return f"its {part} differs from token {place} on"
    return ""


def _same(call: Span, other: Span) -> bool:
    """Whether two spans record one call: the same response id and tokens."""
    own, others = call.attributes, other.attributes
    if other is call or not own.get("gen_ai.response.id"):
        return False
    return all(own.get(k) == others.get(k) for k in ("gen_ai.response.id", "response_token_ids", "prompt_token_ids"))
