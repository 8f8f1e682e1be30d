"""A rollout made readable, once for the terminal, the report and the live page.

Its spans are a tree; beside it is what was said, what nodes and tools returned, what it scored, and what was trained.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import attrs

from agentrig import traces
from agentrig.correctness import TURN
from agentrig.figures import NOTHING, count, figure, number
from agentrig.ledger import REASONS
from agentrig.rewards import given_to_calls
from agentrig.rollouts import Rollout
from agentrig.run.rows import row_of
from agentrig.text import amount, cut
from agentrig.traces import LLM_CALL, MODEL, NODE, SERVER, Span, Trace, items, message_of, reply_of, tool_calls_of
from agentrig.view.beside import MOST_TOKENS, PrivatePart, Token, tokens_of
from agentrig.view.reading import SECOND, decoded, dig, judged, mapping, spans_of, verdict
from agentrig.view.tables import WRONG

if TYPE_CHECKING:
    from tokenizers import Tokenizer

COLUMNS = (
    "id", "task_id", "group", "failure", "message", "status", "value", "correct", "components", "details",
    "call_values", SECOND, "input", "answer", "duration_s", "reward_s", "version", "calls", "triplets",
    "prompt_tokens", "response_tokens", "spans",
)  # fmt: skip
"""The columns that `readable` needs."""

LONGEST_TEXT = 40_000
"""Characters of a message or an output that a page shows."""

HEADINGS = frozenset({NODE, MODEL, "agent.name", "tool.name", traces.ADDRESS, traces.GIVEN, traces.RETURNED})
"""Attributes that name a span, are for messages, or are digests for the auditor: no texts to read."""

TASK_KEYS = ("question", "prompt", "instruction", "text")
"""Keys of a task's input that may have its question, the likeliest first."""

WHO = "▸ "
"""Begins a line that says who speaks."""

AROUND = 6
"""Lines that are shown at both ends of many that are the same."""

FOLDER = "…/"
"""Stands for the folder of a file that a task's input names: it differs between machines."""

QUESTION = 300
"""Characters of a question that is made of other keys."""


@attrs.frozen(kw_only=True)
class Message:
    """A message of a conversation: who says it, the text, and the tool calls in it."""

    role: str
    text: str
    calls: Sequence[str] = ()

    @property
    def heading(self) -> str:
        """Who says it: a tool answers the call before."""
        return "the tool's answer" if self.role == "tool" else self.role


@attrs.frozen(kw_only=True)
class Call:
    """What was said in an LLM call.

    Attributes:
        node: The graph node that made it.
        messages: What it was asked, without what the call before it in this trace was asked already.
        repeated: How many messages are left out because the call before had them, its reply included.
        decoded: Whether they are text, and not ids.
        sampled: How many there are.
        length: The tokens of prompt and reply, and why it ended if not by itself, as text.
        fate: What became of its tokens in training, as text; '' if nothing says so.
        trained: Whether they were trained.
        advantage: The advantage that they were trained with, as text.
    """

    node: str
    messages: Sequence[Message]
    repeated: int
    reply: str
    tokens: Sequence[Token]
    decoded: bool
    sampled: int
    length: str
    fate: str
    trained: bool
    advantage: str


@attrs.frozen(kw_only=True)
class Node:
    """A span: its place in the tree, and what was said in it or what it returned.

    Attributes:
        name: The graph node, the tool, or what the span is.
        kind: `rollout`, `node`, `call`, `tool` or `span`.
        depth: 0 for a root.
        at: Seconds since the first span began.
        tokens: Of the calls in it: prompt tokens and sampled tokens.
        call: Of an LLM call, what was said.
        texts: Of another span, its texts, by key: the output of a node, input and output of a tool, what a program
            wrote.
        facts: Its numbers and truth values, or those of a call's request, by key.
    """

    id: str
    name: str
    kind: str
    depth: int
    at: float
    seconds: float
    error: str
    tokens: tuple[int, int]
    call: Call | None
    texts: Sequence[tuple[str, str]]
    facts: Sequence[tuple[str, str]]

    @property
    def speaks(self) -> bool:
        """Whether there is more to show of it than its place in the tree."""
        return bool(self.call or self.texts or self.facts or (self.error and self.kind in ("node", "tool")))


@attrs.frozen(kw_only=True)
class Readable:
    """A rollout as it is shown.

    Attributes:
        title: The task's question, as `question` has it.
        verdict: `right`, `wrong`, `part` or `failed`.
        score: Its value, or its failure.
        input: The task's input, key and text; of a path only the file's name, after `FOLDER`.
        tree: All spans, parents first.
        reasons: What the reward says about its score.
        second_rewards: What other rewards say, name and score.
    """

    row: Mapping[str, Any]
    title: str
    verdict: str
    score: str
    input: Sequence[tuple[str, str]]
    tree: Sequence[Node]
    answer: str
    reasons: Sequence[tuple[str, str]]
    second_rewards: Sequence[tuple[str, str]]

    @property
    def judged(self) -> str:
        """The verdict in words."""
        return judged(self.row)

    @property
    def reason(self) -> str:
        """Why it has its score: the failure's message, else what the reward gives as `reason`; empty without one."""
        told = dict(self.reasons)
        return told.get("message") or told.get("reason", "")

    def remarks(self, longest: int = LONGEST_TEXT) -> str:
        """Return all that the reward says, each text cut: its reason, then `executes: 1`, `what is wrong: …`."""
        told = [f"{key}: {cut(text, longest)}" for key, text in self.scored]
        return "; ".join(filter(None, [cut(self.reason, longest), *told]))

    @property
    def scored(self) -> list[tuple[str, str]]:
        """What the reward says beside the reason; execution match's word for what is wrong is spelled out."""
        told = [(key, text) for key, text in self.reasons if text != self.reason]
        words = {("wrong", word): ("what is wrong", text) for word, text in WRONG.items()}
        return [words.get(pair, pair) for pair in told]

    @property
    def parts(self) -> list[Node]:
        """The spans that say more than their place in the tree, in order of time: what is in a span comes before it."""
        found, begun = list[Node](), list[Node]()
        for node in self.tree:
            while begun and begun[-1].depth >= node.depth:
                found.append(begun.pop())
            begun.append(node)
        return [node for node in (*found, *reversed(begun)) if node.speaks]

    @property
    def calls(self) -> list[Call]:
        """The LLM calls."""
        return [node.call for node in self.tree if node.call]

    @property
    def has_probabilities(self) -> bool:
        """Whether the probability of a sampled token is known."""
        return any(token.probability is not None for call in self.calls for token in call.tokens)

    @property
    def seconds(self) -> float:
        """From the beginning of the first span to the end of the last."""
        return max((node.at + node.seconds for node in self.tree), default=0.0)

    @property
    def places(self) -> dict[str, int]:
        """The number of each span's part, from 1."""
        return {part.id: place for place, part in enumerate(self.parts, 1)}

    @property
    def nodes(self) -> list[Node]:
        """The parts of graph nodes, without routing functions, whose output is only the next node's name."""
        steps = [part for part in self.parts if part.kind == "node"]
        return [step for step in steps if step.error or step.facts or [key for key, _ in step.texts] != ["output"]]

    @property
    def conversation(self) -> list[tuple[str, str]]:
        """Who said what, in order: messages and replies, what nodes and tools returned beside them, and the answer."""
        steps, said, found = {node.id for node in self.nodes}, self.said, list[tuple[str, str]]()
        for part in self.parts:
            if part.call:
                for message in part.call.messages:
                    lines = [message.text, *(f"→ {call}" for call in message.calls)]
                    found.append((f"{part.call.node} · {message.heading}", "\n".join(filter(None, lines))))
                found.append((f"{part.call.node} · model", part.call.reply))
            elif part.kind != "node" or part.id in steps:
                outputs = [(key, text) for key, text in part.texts if not is_said(text, said)]
                said |= {text.strip() for _, text in outputs}
                found += [(f"{part.name} · {key}", text) for key, text in outputs]
        return [*found, ("answer", self.answer)]

    @property
    def said(self) -> set[str]:
        """The messages and replies of its calls."""
        return {text.strip() for call in self.calls for text in (call.reply, *(m.text for m in call.messages))}


def readable(
    row: Mapping[str, Any],
    calls: Mapping[str, Sequence[Mapping[str, Any]]],
    tokenizer: Tokenizer | None,
    longest: int = LONGEST_TEXT,
    most_tokens: int = MOST_TOKENS,
) -> Readable:
    """Make a rollout readable.

    Args:
        row: Its row, with decoded JSON columns; those that it lacks count as empty.
        calls: Where its calls went, by the id of their span.
        longest: Characters of a text; the end of a longer one is left out.
    """
    row = {**dict.fromkeys(COLUMNS), **row}
    trace = Trace(rollout_id=str(row["id"]), spans=spans_of(row["spans"]))
    reasons = [("message", str(row["message"]))] if row["message"] else []
    for key, item in (*mapping(row["components"]).items(), *mapping(row["details"]).items()):
        if isinstance(item, float) and math.isfinite(item):
            reasons.append((str(key), figure(item)))
        elif item not in (None, "", {}, []) and not (key == "turn" and TURN.fullmatch(str(item))):  # its calls show it
            reasons.append((str(key), text_of(item, longest)))
    given = mapping(row["input"]).items()
    return Readable(
        row=row,
        title=question(row),
        verdict=verdict(row),
        score=str(row["failure"]) if row["failure"] else score_of(row),
        input=[(str(key), _without_folder(text_of(item, longest, None))) for key, item in given],
        tree=_tree(trace, calls, _rewards(trace, row["call_values"]), tokenizer, longest, most_tokens),
        answer=text_of(row["answer"], longest) if row["answer"] is not None else "",
        reasons=reasons,
        second_rewards=[(str(name), score_of(mapping(item))) for name, item in mapping(row[SECOND]).items()],
    )


def readable_rollout(rollout: Rollout) -> Readable:
    """Make a rollout that has just ended readable, with all of its texts."""
    trained = {t.span_id: [{"place": "trained", "tokens": len(t.response_ids)}] for t in rollout.triplets}
    return readable(decoded(row_of(rollout)), trained, None, longest=1 << 60, most_tokens=0)


def question(row: Mapping[str, Any]) -> str:
    """Return the task's question; without one all that its input holds, and without an input its id."""
    given = mapping(row.get("input"))
    if asked := next((given[key] for key in TASK_KEYS if isinstance(given.get(key), str)), ""):
        return asked
    whole = " · ".join(text_of(value) for value in given.values() if value not in (None, "", [], {}))
    return cut(whole, QUESTION) or str(row.get("task_id"))


def score_of(score: Mapping[str, Any]) -> str:
    """Return a score as text: its value, and its status if that is not `ok`."""
    value, status = number(score.get("value")), score.get("status")
    if value is None:
        return str(status or "not scored")
    return f"{value:g}" if status in ("ok", None) else f"{value:g} ({status})"


def chip(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a rollout's score as a page shows it: short, with words for those who cannot see its colour."""
    kind, value = verdict(row), number(row.get("value"))
    text = "×" if kind == "failed" else f"{value:.2g}" if value is not None else NOTHING
    said = str(row.get("failure") or "not scored") if kind == "failed" else f"{judged(row)}, score {value:g}"
    return {"id": row["id"], "verdict": kind, "text": text, "said": said}


def is_said(text: str, said: Collection[str]) -> bool:
    """Whether a node's output is only what calls show: a reply or a prompt, or messages of them."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    texts = [dig(each, "content") for each in found] if isinstance(found, list) and found else [text]
    return all(isinstance(each, str) and each.strip() in said for each in texts)


def differences(a: Readable, b: Readable) -> list[tuple[str, str, str]]:
    """Compare who said what in two rollouts, line by line.

    Returns:
        Rows of a table of two columns: `same`, `changed`, `a` or `b` (only there), and both lines. A line before each
        text says who speaks; the middle of many lines that are the same is one row with their number.
    """
    ours, theirs = ([line for said in r.conversation for line in _lines(*said)] for r in (a, b))
    rows: list[tuple[str, str, str]] = []
    for tag, a0, a1, b0, b1 in difflib.SequenceMatcher(a=ours, b=theirs, autojunk=False).get_opcodes():
        one, other = ([line for _, line, _ in lines] for lines in (ours[a0:a1], theirs[b0:b1]))
        if tag == "equal" and len(one) > 4 * AROUND:
            fold = [f"… {len(one) - 2 * AROUND} lines that are the same …"]
            one = other = [*one[:AROUND], *fold, *one[-AROUND:]]
        for i in range(max(len(one), len(other))):
            kind = "a" if i >= len(other) else "b" if i >= len(one) else "same" if one[i] == other[i] else "changed"
            rows.append((kind, one[i] if i < len(one) else "", other[i] if i < len(other) else ""))
    return rows


def _lines(who: str, text: str) -> list[tuple[str, str, str]]:
    """Return the lines of what somebody said, each with what it must be equal in: the first one in the whole text."""
    return [(who, f"{WHO}{who}", text), *((who, line, "") for line in text.splitlines())]


def _without_folder(text: str) -> str:
    """Return the name of a file instead of its absolute path, and any other text as it is."""
    return FOLDER + PurePath(text).name if re.fullmatch(r"/[^\s/]+(/[^\s/]+)+", text) else text


def text_of(value: Any, longest: int = LONGEST_TEXT, indent: int | None = 1) -> str:
    """Return any JSON value as text to read, at most so many characters of it; without `indent`, in one line."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=indent)
    return cut(text, longest)


def readable_private(private: PrivatePart, longest: int = LONGEST_TEXT) -> PrivatePart:
    """Return the private part of a task with its parts as texts to read."""
    return attrs.evolve(private, parts={key: text_of(value, longest) for key, value in private.parts.items()})


def _rewards(trace: Trace, scored: Any) -> dict[str, str]:
    """Return the reward of each call that has one, as text, by the call's id: those that the credit `turn` counts."""
    values = items(scored) or given_to_calls(trace)
    source = "Score.calls" if items(scored) else "agentrig.reward"
    told = ((call.id, number(value)) for call, value in zip(trace.llm_calls(), values, strict=False))
    return {call: f"{value:g} ({source})" for call, value in told if value is not None}


def _call(
    span: Span,
    node: str,
    entries: Sequence[Mapping[str, Any]],
    tokens: Sequence[Token],
    before: Span | None,
    longest: int,
    *,
    decoded: bool,
) -> Call:
    """Return what was said in a call, without what the call before it had."""
    attributes = span.attributes
    repeated = 0 if before is None else _repeated(span, before)
    sampled = attributes.get("response_token_ids")
    advantages = [number(e.get("advantage")) for e in entries]
    return Call(
        node=node or "(no node)",
        messages=[_message(m, longest) for m in _messages(span)[repeated:]],
        repeated=repeated,
        reply=cut(reply_of(attributes), longest),
        tokens=tokens,
        decoded=decoded,
        sampled=len(sampled) if isinstance(sampled, list) else 0,
        length=_length(attributes),
        fate="; ".join(_fate(e) for e in entries),
        trained=any(e.get("place") == "trained" for e in entries),
        advantage=next((f"{a:+.3f}" for a in advantages if a is not None), NOTHING),
    )


def _messages(call: Span) -> list[Any]:
    """Return the messages that a call was asked."""
    given = mapping(call.attributes.get("request")).get("messages") or []
    return given if isinstance(given, list) else [given]


def _repeated(call: Span, before: Span) -> int:
    """Return how many of a call's first messages the call before it had: what it was asked, then its reply."""
    messages, asked = _messages(call), _messages(before)
    n = len(asked)
    if not asked or messages[:n] != asked:
        return 0
    following = mapping(messages[n]) if len(messages) > n else {}
    replied = following.get("role") == "assistant" and _spoken(following) == _spoken(message_of(before.attributes))
    return n + replied


def _spoken(message: Mapping[str, Any]) -> str:
    """Return the text and the tool calls of a message without spaces, which clients write in other places."""
    said = _message(message, longest=1 << 60)
    return "".join("".join([said.text, *said.calls]).split())


def _facts_of_call(span: Span) -> Iterator[tuple[str, str]]:
    """Yield what a call's request asks for beside its messages, and what of it has not the form of a call."""
    attributes = span.attributes
    request = mapping(attributes.get("request"))
    yield from ((key, text_of(request[key])) for key in ("model", "temperature", "max_tokens") if key in request)
    if tools := request.get("tools"):
        names = [str(mapping(mapping(t).get("function")).get("name") or text_of(t)) for t in items(tools) or [tools]]
        yield "tools", ", ".join(names)
    if attributes.get("request") and not request:
        yield "request", text_of(attributes["request"])
    if attributes.get("response") and not span.error and not message_of(attributes):
        yield "response", text_of(attributes["response"])
    if SERVER in attributes:
        yield "server", f"{attributes[SERVER]}: another one than the run's, never trained"


def _counts(attributes: Mapping[str, Any]) -> tuple[int, int, bool] | None:
    """Return a call's tokens of prompt and reply, and whether their ids are known; None if nothing counts them."""
    ids = [attributes.get(f"{part}_token_ids") for part in ("prompt", "response")]
    if all(isinstance(found, list) and found for found in ids):
        return len(ids[0] or ()), len(ids[1] or ()), True
    usage = mapping(dig(attributes, "response", "usage"))
    told = [number(usage.get(key)) for key in ("prompt_tokens", "completion_tokens")]
    return None if told[0] is None or told[1] is None else (int(told[0]), int(told[1]), False)


def _length(attributes: Mapping[str, Any]) -> str:
    """Return a call's token counts: from its token ids, else from the server's `usage`."""
    counts = _counts(attributes)
    text = "no token ids"
    if counts is not None:
        text = f"{count(counts[0])} + {count(counts[1])} tokens" + ("" if counts[2] else ", no ids")
    end = attributes.get("finish_reason")
    return text if end in (None, "stop", "tool_calls") else f"{text}, ended by {end}"


def _fate(entry: Mapping[str, Any]) -> str:
    place, reason, tokens = (
        str(entry.get("place")),
        str(entry.get("reason") or ""),
        int(number(entry.get("tokens")) or 0),
    )
    words = {"trained": "trained", "masked": "context without loss", "handed_over": "handed to the algorithm"}
    if place == "dropped":
        return f"left out, {reason}: {REASONS.get(reason, 'a reason of the algorithm or the adapter')}"
    return f"{words.get(place, place)} ({amount(tokens, 'token')})"


def _message(given: Any, longest: int) -> Message:
    message = mapping(given)
    content, role = (message.get("content") if isinstance(given, Mapping) else given), str(message.get("role") or "?")
    return Message(
        role=role,
        text="" if content is None else text_of(content, longest),
        calls=tool_calls_of(message),
    )


def _content(span: Span, kind: str, longest: int) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return the texts of a span that is no call, and its numbers and truth values, by key."""
    texts, facts = [], []
    for key, value in span.attributes.items():
        if key in HEADINGS or (key == "input" and kind == "node"):
            continue
        for name, item in value.items() if isinstance(value, Mapping) else [(key, value)]:
            if isinstance(item, bool):
                facts.append((str(name), "yes" if item else "no"))
            elif isinstance(item, int | float):
                value = number(item)  # None for what no float holds
                facts.append((str(name), str(item) if value is None else f"{value:g}"))
            elif item not in (None, "", [], {}):
                texts.append((str(name), text_of(item, longest)))
    return texts, facts


def _tree(
    trace: Trace,
    fates: Mapping[str, Sequence[Mapping[str, Any]]],
    rewards: Mapping[str, str],
    tokenizer: Tokenizer | None,
    longest: int,
    most_tokens: int,
) -> list[Node]:
    """Return the spans of a trace, parents first; `rewards` are those of its calls, the others those of `readable`."""
    spans = trace.spans
    known = {span.id for span in spans}
    below: dict[str, list[Span]] = {}
    waiting: list[tuple[Span, int]] = []
    for span in reversed(spans):
        inside = span.parent is not None and span.parent in known and span.parent != span.id
        below.setdefault(str(span.parent), []).append(span) if inside else waiting.append((span, 0))
    begin = min((span.start for span in spans), default=0.0)
    around = {span.parent for span in spans if span.node and isinstance(span.attributes.get("output"), Mapping)}
    found: list[Node] = []
    before: Span | None = None
    while waiting:
        span, depth = waiting.pop()
        waiting += [(child, depth + 1) for child in below.pop(span.id, [])]
        tool, call = span.attributes.get("tool.name"), None
        kind = "tool" if tool else "node" if span.node else "rollout" if depth == 0 else "span"
        texts, facts = ([], []) if span.id in around else _content(span, kind, longest)
        if span.name == LLM_CALL:
            node, tokens = next(iter(trace.nodes(span)), ""), tokens_of(span.attributes, tokenizer, most_tokens)
            decoded = tokenizer is not None
            call = _call(span, node, fates.get(span.id, ()), tokens, before, longest, decoded=decoded)
            before = span
            kind, texts, facts = "call", [], list(_facts_of_call(span))
            facts += [("reward", rewards[span.id])] if span.id in rewards else []
        found.append(
            Node(
                id=span.id,
                name="LLM call" if call else str(tool or span.node or span.name),
                kind=kind,
                depth=depth,
                at=span.start - begin,
                seconds=span.end - span.start,
                error=cut(span.error or "", longest),
                tokens=(_counts(span.attributes) or (0, 0))[:2] if call else (0, 0),
                call=call,
                texts=texts,
                facts=facts,
            )
        )
    sums: Counter[tuple[int, int]] = Counter()  # tokens of the children so far, by their depth and part
    for place, each in reversed(list(enumerate(found))):
        prompt, sampled = (own + sums.pop((each.depth + 1, part), 0) for part, own in enumerate(each.tokens))
        found[place] = attrs.evolve(each, tokens=(prompt, sampled))
        sums.update({(each.depth, 0): prompt, (each.depth, 1): sampled})
    return found
