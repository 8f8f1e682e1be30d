"""A rollout made readable: its spans as a tree, and beside it what was said, what it scored, and what was trained."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from agentrig.figures import NOTHING
from agentrig.ledger import REASONS
from agentrig.report.reading import mapping, number
from agentrig.report.text import duration
from agentrig.text import cut
from agentrig.traces import LLM_CALL, SERVER, node_of, reply_of, tool_calls_of
from agentrig.watch.rollouts import verdict
from agentrig.watch.tokens import Token, tokens_of

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
        audits: What other rewards say, name and score.
    """

    row: Mapping[str, Any]
    verdict: str
    score: str
    input: Sequence[tuple[str, str]]
    tree: Sequence[Node]
    parts: Sequence[Call | Step]
    answer: str
    reasons: Sequence[tuple[str, str]]
    audits: Sequence[tuple[str, str]]

    def lines(self) -> list[str]:
        """Return what was said and answered as lines of text, for a comparison."""
        found: list[str] = []
        for part in self.parts:
            texts = [part.reply] if isinstance(part, Call) else [text for _, text in part.texts]
            found += [line for text in texts for line in text.splitlines()]
        return [*found, *self.answer.splitlines()]


def readable(
    row: Mapping[str, Any], calls: Mapping[str, Sequence[Mapping[str, Any]]], tokenizer: Tokenizer | None
) -> Readable:
    """Make a rollout readable.

    Args:
        row: Its row, with decoded JSON columns.
        calls: Where its calls went, by the id of their span.
        tokenizer: Of its model.
    """
    found = row.get("spans")
    spans = [s for s in found if isinstance(s, Mapping)] if isinstance(found, list) else []
    names = _nearest_nodes(spans)
    parts: list[Call | Step] = []
    asked: list[Any] = []
    around = {s.get("parent") for s in spans if node_of(mapping(s.get("attributes")))}
    for span in spans:
        attributes = mapping(span.get("attributes"))
        if span.get("name") == LLM_CALL:
            call, asked = _call(span, names.get(str(span.get("id")), ""), calls, tokenizer, asked)
            parts.append(call)
        elif span.get("id") not in around and (step := _step(span, attributes)):
            parts.append(step)
    value, failure = number(row.get("value")), row.get("failure")
    score = str(failure) if failure else "not scored" if value is None else f"{value:g}"
    reasons = [("message", str(row["message"]))] if row.get("message") else []
    for key, item in {**mapping(row.get("components")), **mapping(row.get("details"))}.items():
        if item not in (None, "", {}, []):
            reasons.append((str(key), text_of(item)))
    return Readable(
        row=row,
        verdict=verdict(row),
        score=score,
        input=[(str(key), text_of(item)) for key, item in mapping(row.get("input")).items()],
        tree=_tree(spans),
        parts=parts,
        answer=text_of(row.get("answer")) if row.get("answer") is not None else "",
        reasons=reasons,
        audits=[(str(name), _audit(mapping(item))) for name, item in mapping(row.get("audits")).items()],
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


def text_of(value: Any) -> str:
    """Return any JSON value as text to read."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=1)
    return cut(text, LONGEST_TEXT)


def _call(
    span: Mapping[str, Any],
    node: str,
    calls: Mapping[str, Sequence[Mapping[str, Any]]],
    tokenizer: Tokenizer | None,
    before: list[Any],
) -> tuple[Call, list[Any]]:
    attributes = mapping(span.get("attributes"))
    request = mapping(attributes.get("request"))
    given = request.get("messages")
    messages = given if isinstance(given, list) else []
    repeated = len(before) if before and messages[: len(before)] == before else 0
    entries = calls.get(str(span.get("id")), ())
    ids, prompt = attributes.get("response_token_ids"), attributes.get("prompt_token_ids")
    facts = [(key, text_of(request[key])) for key in ("model", "temperature", "max_tokens") if key in request]
    if SERVER in attributes:
        facts.append(("server", f"{attributes[SERVER]}: another one than the run's, never trained"))
    advantages = [number(e.get("advantage")) for e in entries]
    call = Call(
        id=str(span.get("id")),
        node=node or "(no node)",
        messages=[_message(m) for m in messages[repeated:]],
        repeated=repeated,
        reply=cut(reply_of(attributes), LONGEST_TEXT),
        tokens=tokens_of(attributes, tokenizer),
        sampled=len(ids) if isinstance(ids, list) else 0,
        prompt=len(prompt) if isinstance(prompt, list) else 0,
        end=str(attributes.get("finish_reason") or ""),
        fate="; ".join(_fate(e) for e in entries),
        trained=any(e.get("place") == "trained" for e in entries),
        advantage=next((f"{a:+.3f}" for a in advantages if a is not None), NOTHING),
        error=str(span.get("error") or ""),
        facts=facts,
    )
    return call, messages


def _fate(entry: Mapping[str, Any]) -> str:
    place, reason, tokens = str(entry.get("place")), str(entry.get("reason") or ""), int(entry.get("tokens") or 0)
    words = {"trained": "trained", "masked": "context without loss", "handed_over": "handed to the algorithm"}
    if place == "dropped":
        return f"left out, {reason}: {REASONS.get(reason, 'a reason of the algorithm or the adapter')}"
    return f"{words.get(place, place)} ({tokens} tokens)"


def _message(given: Any) -> Message:
    message = mapping(given)
    content = message.get("content")
    return Message(
        role=str(message.get("role") or "?"),
        text="" if content is None else text_of(content),
        calls=tool_calls_of(message),
    )


def _step(span: Mapping[str, Any], attributes: Mapping[str, Any]) -> Step | None:
    error = str(span.get("error") or "")
    tool, node = attributes.get("tool.name"), node_of(attributes)
    texts = []
    for key in ("input", "output") if tool else ("output",):
        value = attributes.get(key)
        if isinstance(value, Mapping):
            texts += [(str(k), text_of(v)) for k, v in value.items() if v not in (None, "", [], {})]
        elif value not in (None, ""):
            texts.append((key, text_of(value)))
    if not (tool or node) or not (texts or error):
        return None
    return Step(
        id=str(span.get("id")),
        kind="tool" if tool else "node",
        name=str(tool or node),
        texts=texts,
        error=error,
    )


def _tree(spans: Sequence[Mapping[str, Any]]) -> list[Node]:
    known = {str(s.get("id")) for s in spans}
    below: dict[str, list[Mapping[str, Any]]] = {}
    roots: list[Mapping[str, Any]] = []
    for span in spans:
        parent = str(span.get("parent"))
        (below.setdefault(parent, []) if parent in known and parent != str(span.get("id")) else roots).append(span)
    found: list[Node] = []
    waiting = [(span, 0) for span in reversed(roots)]
    while waiting:
        span, depth = waiting.pop()
        attributes = mapping(span.get("attributes"))
        tool, node = attributes.get("tool.name"), node_of(attributes)
        call = span.get("name") == LLM_CALL
        kind = "call" if call else "tool" if tool else "node" if node else "rollout" if depth == 0 else "span"
        seconds = (number(span.get("end")) or 0.0) - (number(span.get("start")) or 0.0)
        name = "LLM call" if call else str(tool or node or span.get("name") or "span")
        error = str(span.get("error") or "")
        found.append(
            Node(
                id=str(span.get("id")),
                name=name,
                kind=kind,
                depth=min(depth, 12),
                seconds=duration(seconds),
                error=cut(error, 200),
            )
        )
        waiting += [(child, depth + 1) for child in reversed(below.get(str(span.get("id")), []))]
    return found


def _nearest_nodes(spans: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the innermost graph node around each span."""
    by_id = {str(s.get("id")): s for s in spans}
    found = {}
    for id in by_id:
        seen: set[str] = set()
        above = str(by_id[id].get("parent"))
        while above in by_id and above not in seen:
            seen.add(above)
            if name := node_of(mapping(by_id[above].get("attributes"))):
                found[id] = name
                break
            above = str(by_id[above].get("parent"))
    return found


def _audit(score: Mapping[str, Any]) -> str:
    value = number(score.get("value"))
    return str(score.get("status")) if value is None else f"{value:g}"
