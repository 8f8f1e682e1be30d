"""One rollout as a list of steps, from its spans."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from agentrig.traces import LLM_CALL, node_of, reply_of
from agentrig.view.reading import SECOND, mapping, number, verdict

SAMPLE_COLUMNS = (
    "id", "task_id", "group", "failure", "message", "status", "value", "correct", "components", "details", SECOND,
    "input", "answer", "duration_s", "version", "prompt_tokens", "response_tokens", "spans",
)  # fmt: skip
"""The columns that `sample_trace` and `agentrig.view.readable.readable` need."""

TEXT_LIMIT = 1200
"""Longest text of one field on the page, in characters."""


@attrs.frozen(kw_only=True)
class Step:
    """One node that the agent went through, or one call to the model outside any node.

    Attributes:
        name: The node's name.
        seconds: Its wall time.
        texts: Name and text of its text outputs (SQL, a result, a remark).
        facts: Its short outputs (a verdict, a turn).
        error: The exception's type and message, or None.
    """

    name: str
    seconds: float
    texts: Sequence[tuple[str, str]] = ()
    facts: Sequence[tuple[str, str]] = ()
    error: str | None = None


@attrs.frozen(kw_only=True)
class SampleTrace:
    """One rollout, as the page shows it.

    Attributes:
        row: The rollout's row.
        verdict: `right`, `wrong`, `part` (not correct, but a value above 0) or `failed`.
        answer: The agent's answer; empty if a step's output is the same.
        score: The score as text.
        reasons: The score's components and details, or the failure's message.
    """

    row: Mapping[str, Any] = attrs.field(repr=False)
    steps: Sequence[Step]
    answer: str
    verdict: str
    score: str
    reasons: Sequence[tuple[str, str]]


def question(row: Mapping[str, Any]) -> tuple[str, list[tuple[str, str]]]:
    """Return the task's question, and the short values of its input; absolute paths are left out."""
    given = mapping(row.get("input"))
    title = next((given[k] for k in ("question", "prompt", "instruction", "text") if isinstance(given.get(k), str)), "")
    facts = [("task", str(row.get("task_id")))]
    for key, value in given.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if text and text != title and not text.startswith("/") and len(text) <= 80:
            facts.append((key, text))
    return title or str(row.get("task_id")), facts


def sample_trace(row: Mapping[str, Any]) -> SampleTrace:
    """Return one rollout as steps, verdict and score."""
    value, failure = number(row.get("value")), row.get("failure")
    if failure:
        score = f"{failure}: not scored"
    elif value is None:
        score = "not scored"
    else:
        score = f"{value:g}" + ("" if row.get("status") in ("ok", None) else f" ({row['status']})")
    reasons = [("message", str(row["message"]))] if row.get("message") else []
    for key, item in {**mapping(row.get("components")), **mapping(row.get("details"))}.items():
        if item not in (None, "", {}, []):
            reasons.append(
                (str(key), cut(item if isinstance(item, str) else json.dumps(item, ensure_ascii=False), 300))
            )
    answer = row.get("answer")
    text = answer if isinstance(answer, str) else "" if answer is None else json.dumps(answer, ensure_ascii=False)
    steps = steps_of(row.get("spans"))
    outputs = {text for step in steps for _, text in step.texts}
    answer_text = cut(text, TEXT_LIMIT)
    return SampleTrace(
        row=row,
        steps=steps,
        answer="" if answer_text in outputs else answer_text,
        verdict=verdict(row),
        score=score,
        reasons=reasons,
    )


def steps_of(spans: Any) -> list[Step]:
    """Return the nodes of a trace that have an output, in order; or its calls if there are no nodes.

    The graph itself (a node around nodes) and routing functions, whose output is the next node's
    name, are left out: they add no information.
    """
    found = [s for s in spans if isinstance(s, Mapping)] if isinstance(spans, list) else []
    nodes = [s for s in found if node_of(_attributes(s))]
    around = {s.get("parent") for s in nodes if isinstance(_attributes(s).get("output"), Mapping)}
    leaves = [s for s in nodes if s.get("id") not in around and (s.get("error") or _has_output(s))]
    steps = [_step(s, str(node_of(_attributes(s))), _attributes(s).get("output")) for s in leaves]
    if steps:
        return steps
    calls = [(s, _attributes(s)) for s in found if s.get("name") == LLM_CALL]
    return [_step(s, "call", {"tool results": results_of(a), "reply": reply_of(a)}) for s, a in calls]


def results_of(attributes: Mapping[str, Any]) -> str:
    """Return the results of tools that a call was given: those after the model's last message, a line each."""
    found: list[str] = []
    messages = mapping(attributes.get("request")).get("messages")
    for message in messages if isinstance(messages, list) else ():
        role, content = mapping(message).get("role"), mapping(message).get("content")
        if role == "assistant":
            found.clear()
        elif role == "tool":
            found.append(content if isinstance(content, str) else json.dumps(content, ensure_ascii=False))
    return "\n".join(found)


def _attributes(span: Mapping[str, Any]) -> Mapping[str, Any]:
    return mapping(span.get("attributes"))


def _has_output(span: Mapping[str, Any]) -> bool:
    return bool(mapping(_attributes(span).get("output")))


def _step(span: Mapping[str, Any], name: str, output: Any) -> Step:
    texts, facts = [], []
    for key, value in mapping(output).items():
        if isinstance(value, str) and value:
            texts.append((str(key), cut(value, TEXT_LIMIT)))
        elif isinstance(value, bool):
            facts.append((str(key), "yes" if value else "no"))
        elif isinstance(value, (int, float)):
            facts.append((str(key), f"{value:g}"))
        elif value:
            texts.append((str(key), cut(json.dumps(value, ensure_ascii=False), TEXT_LIMIT)))
    seconds = (number(span.get("end")) or 0.0) - (number(span.get("start")) or 0.0)
    error = span.get("error")
    return Step(name=name, seconds=seconds, texts=texts, facts=facts, error=str(error) if error else None)


def cut(text: str, limit: int) -> str:
    """Return the text, or its beginning and its length if it is longer than the limit."""
    return text if len(text) <= limit else f"{text[:limit]} … (cut from {len(text)} characters)"
