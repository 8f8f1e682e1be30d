"""A rollout made readable: its spans as a tree, and beside it what was said, what it scored, and what was trained."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from agentrig.figures import NOTHING
from agentrig.ledger import REASONS
from agentrig.text import cut
from agentrig.traces import LLM_CALL, SERVER, Span, Trace, reply_of, tool_calls_of
from agentrig.view.reading import SECOND, mapping, number, spans_of, verdict
from agentrig.view.sample_traces import SAMPLE_COLUMNS
from agentrig.view.text import duration
from agentrig.view.tokens import MOST_TOKENS, Token, tokens_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LONGEST_TEXT = 40_000
"""Characters of a message or an output that a page shows."""


@attrs.frozen(kw_only=True)
class Node:
    """A span in the tree.

    Attributes:
        id: The span's.
        name: The graph node, the tool, or what the span is.
        kind: `rollout`, `node`, `call`, `tool` or `span`.
        depth: 0 for the root.
        seconds: How long it took, as text.
        error: Its error, or ''.
    """

    id: str
    name: str
    kind: str
    depth: int
    seconds: str
    error: str


@attrs.frozen(kw_only=True)
class Message:
    """A message of a conversation: who says it, the text, and the tool calls in it."""

    role: str
    text: str
    calls: Sequence[str] = ()


@attrs.frozen(kw_only=True)
class Call:
    """An LLM call.

    Attributes:
        id: Its span.
        node: The graph node that made it.
        messages: What it was asked, without what the call before it in this trace was asked already.
        repeated: How many messages are left out because the call before had them.
        reply: What the model said.
        tokens: Its sampled tokens.
        decoded: Whether they are text, and not ids.
        sampled: How many there are.
        prompt: How many tokens the prompt has.
        end: Why it ended.
        fate: What became of its tokens in training, as text; '' if nothing says so.
        trained: Whether they were trained.
        advantage: The advantage that they were trained with, as text.
        error: Its error, or ''.
        facts: More, name and value.
    """

    id: str
    node: str
    messages: Sequence[Message]
    repeated: int
    reply: str
    tokens: Sequence[Token]
    decoded: bool
    sampled: int
    prompt: int
    end: str
    fate: str
    trained: bool
    advantage: str
    error: str
    facts: Sequence[tuple[str, str]] = ()


@attrs.frozen(kw_only=True)
class Step:
    """What else happened between the calls: a node's or a tool's input and output."""

    id: str
    kind: str
    name: str
    texts: Sequence[tuple[str, str]]
    error: str


@attrs.frozen(kw_only=True)
class Readable:
    """A rollout as a page shows it.

    Attributes:
        row: Its row of the rollout file.
        verdict: `right`, `wrong`, `part` or `failed`.
        score: Its value, or its failure.
        input: The task's input, key and text.
        tree: All spans, parents first.
        parts: Calls and steps in the order in which they ended.
        answer: What the agent answered.
        reasons: What the reward says about its score.
        second_rewards: What other rewards say, name and score.
    """

    row: Mapping[str, Any]
    verdict: str
    score: str
    input: Sequence[tuple[str, str]]
    tree: Sequence[Node]
    parts: Sequence[Call | Step]
    answer: str
    reasons: Sequence[tuple[str, str]]
    second_rewards: Sequence[tuple[str, str]]

    @property
    def places(self) -> dict[str, int]:
        """The number of each span's part, from 1."""
        return {part.id: place for place, part in enumerate(self.parts, 1)}

    def lines(self) -> list[str]:
        """Return what was said and answered as lines of text, for a comparison."""
        found: list[str] = []
        for part in self.parts:
            texts = [part.reply] if isinstance(part, Call) else [text for _, text in part.texts]
            found += [line for text in texts for line in text.splitlines()]
        return [*found, *self.answer.splitlines()]


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
        tokenizer: Of its model.
        longest: Characters of a text; the end of a longer one is left out.
        most_tokens: Sampled tokens of a call.
    """
    row = {**dict.fromkeys(SAMPLE_COLUMNS), **row}
    trace = Trace(rollout_id=str(row["id"]), spans=spans_of(row["spans"]))
    parts: list[Call | Step] = []
    asked: list[Any] = []
    around = {span.parent for span in trace.spans if span.node}
    for span in trace.spans:
        if span.name == LLM_CALL:
            node = next(iter(trace.nodes(span)), "")
            shown = tokens_of(span.attributes, tokenizer, most_tokens)
            call, asked = _call(
                span, node, calls.get(span.id, ()), shown, asked, longest, decoded=tokenizer is not None
            )
            parts.append(call)
        elif span.id not in around and (step := _step(span, longest)):
            parts.append(step)
    value, failure = number(row.get("value")), row.get("failure")
    score = str(failure) if failure else "not scored" if value is None else f"{value:g}"
    reasons = [("message", str(row["message"]))] if row.get("message") else []
    for key, item in {**mapping(row.get("components")), **mapping(row.get("details"))}.items():
        if item not in (None, "", {}, []):
            reasons.append((str(key), text_of(item, longest)))
    return Readable(
        row=row,
        verdict=verdict(row),
        score=score,
        input=[(str(key), text_of(item, longest)) for key, item in mapping(row.get("input")).items()],
        tree=_tree(trace.spans),
        parts=parts,
        answer=text_of(row["answer"], longest) if row["answer"] is not None else "",
        reasons=reasons,
        second_rewards=[(str(name), _value(mapping(item))) for name, item in mapping(row.get(SECOND)).items()],
    )


def differences(left: Readable, right: Readable) -> list[tuple[str, str, str]]:
    """Compare what was said and answered in two rollouts, line by line.

    Returns:
        Rows of a table of two columns: `same`, `changed`, `left` or `right` (only there), and both lines.
    """
    ours, theirs = left.lines(), right.lines()
    rows: list[tuple[str, str, str]] = []
    for tag, a0, a1, b0, b1 in difflib.SequenceMatcher(a=ours, b=theirs, autojunk=False).get_opcodes():
        one, other = ours[a0:a1], theirs[b0:b1]
        for i in range(max(len(one), len(other))):
            a, b = one[i] if i < len(one) else "", other[i] if i < len(other) else ""
            kind = "same" if tag == "equal" else "left" if i >= len(other) else "right" if i >= len(one) else "changed"
            rows.append((kind, a, b))
    return rows


def text_of(value: Any, longest: int = LONGEST_TEXT) -> str:
    """Return any JSON value as text to read, at most so many characters of it."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=1)
    return cut(text, longest)


def _call(
    span: Span,
    node: str,
    entries: Sequence[Mapping[str, Any]],
    tokens: Sequence[Token],
    before: list[Any],
    longest: int,
    *,
    decoded: bool,
) -> tuple[Call, list[Any]]:
    attributes = span.attributes
    request = mapping(attributes.get("request"))
    given = request.get("messages")
    messages = given if isinstance(given, list) else []
    repeated = len(before) if before and messages[: len(before)] == before else 0
    ids, prompt = attributes.get("response_token_ids"), attributes.get("prompt_token_ids")
    facts = [(key, text_of(request[key])) for key in ("model", "temperature", "max_tokens") if key in request]
    if SERVER in attributes:
        facts.append(("server", f"{attributes[SERVER]}: another one than the run's, never trained"))
    advantages = [number(e.get("advantage")) for e in entries]
    call = Call(
        id=span.id,
        node=node or "(no node)",
        messages=[_message(m, longest) for m in messages[repeated:]],
        repeated=repeated,
        reply=cut(reply_of(attributes), longest),
        tokens=tokens,
        decoded=decoded,
        sampled=len(ids) if isinstance(ids, list) else 0,
        prompt=len(prompt) if isinstance(prompt, list) else 0,
        end=str(attributes.get("finish_reason") or ""),
        fate="; ".join(_fate(e) for e in entries),
        trained=any(e.get("place") == "trained" for e in entries),
        advantage=next((f"{a:+.3f}" for a in advantages if a is not None), NOTHING),
        error=cut(span.error or "", longest),
        facts=facts,
    )
    return call, messages


def _fate(entry: Mapping[str, Any]) -> str:
    place, reason, tokens = str(entry.get("place")), str(entry.get("reason") or ""), int(entry.get("tokens") or 0)
    words = {"trained": "trained", "masked": "context without loss", "handed_over": "handed to the algorithm"}
    if place == "dropped":
        return f"left out, {reason}: {REASONS.get(reason, 'a reason of the algorithm or the adapter')}"
    return f"{words.get(place, place)} ({tokens} tokens)"


def _message(given: Any, longest: int) -> Message:
    message = mapping(given)
    content = message.get("content")
    return Message(
        role=str(message.get("role") or "?"),
        text="" if content is None else text_of(content, longest),
        calls=tool_calls_of(message),
    )


def _step(span: Span, longest: int) -> Step | None:
    tool = span.attributes.get("tool.name")
    texts = []
    for key in ("input", "output") if tool else ("output",):
        value = span.attributes.get(key)
        if isinstance(value, Mapping):
            texts += [(str(k), text_of(v, longest)) for k, v in value.items() if v not in (None, "", [], {})]
        elif value not in (None, ""):
            texts.append((key, text_of(value, longest)))
    if not (tool or span.node) or not (texts or span.error):
        return None
    return Step(
        id=span.id,
        kind="tool" if tool else "node",
        name=str(tool or span.node),
        texts=texts,
        error=cut(span.error or "", longest),
    )


def _tree(spans: Sequence[Span]) -> list[Node]:
    known = {span.id for span in spans}
    below: dict[str, list[Span]] = {}
    roots: list[Span] = []
    for span in spans:
        inside = span.parent is not None and span.parent in known and span.parent != span.id
        (below.setdefault(str(span.parent), []) if inside else roots).append(span)
    found: list[Node] = []
    waiting = [(span, 0) for span in reversed(roots)]
    while waiting:
        span, depth = waiting.pop()
        tool, call = span.attributes.get("tool.name"), span.name == LLM_CALL
        kind = "call" if call else "tool" if tool else "node" if span.node else "rollout" if depth == 0 else "span"
        found.append(
            Node(
                id=span.id,
                name="LLM call" if call else str(tool or span.node or span.name),
                kind=kind,
                depth=min(depth, 12),
                seconds=duration(span.end - span.start),
                error=cut(span.error or "", 200),
            )
        )
        waiting += [(child, depth + 1) for child in reversed(below.pop(span.id, []))]
    return found


def _value(score: Mapping[str, Any]) -> str:
    value = number(score.get("value"))
    return str(score.get("status")) if value is None else f"{value:g}"
