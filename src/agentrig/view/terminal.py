"""The span tree of a rollout: every node, prompt, reply, token count and time, as `agentrig dev` shows it."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from agentrig.rollouts import Rollout
from agentrig.text import json_text, storable
from agentrig.traces import LLM_CALL, Span, tool_calls_of

_HIDDEN = frozenset({"langchain.chain.type", "agent.name", "tool.name"})  # shown in the heading


def span_tree(rollout: Rollout) -> Tree:
    """Return the whole span tree of a rollout, for rich to print.

    Text from a rollout is never parsed as rich markup, so brackets in a prompt are printed unchanged.
    """
    tree = Tree(_heading(rollout), guide_style="dim")
    _fields(tree, rollout.task.input.items(), skip=())
    trained = {t.span_id for t in rollout.triplets}
    children: dict[str | None, list[Span]] = {}
    known = {s.id for s in rollout.trace.spans}
    for span in rollout.trace.spans:
        parent = span.parent if span.parent in known and span.parent != span.id else None
        children.setdefault(parent, []).append(span)
    origin = min((s.start for s in rollout.trace.spans), default=rollout.start)
    if not rollout.trace.spans:
        tree.add(Text("no spans were recorded", style="yellow"))

    def add_children(branch: Tree, parent: str | None) -> None:
        for span in children.get(parent, ()):
            node = branch.add(_span(span, origin, trained=span.id in trained))
            if span.name == LLM_CALL:
                _call(node, span)
            else:
                _fields(node, span.attributes.items(), skip=_HIDDEN)
            if span.error is not None:
                node.add(Text(span.error, style="red"))
            add_children(node, span.id)

    add_children(tree, None)
    tree.add(_verdict(rollout))
    return tree


def span_text(rollout: Rollout, *, width: int = 120) -> str:
    """Return the span tree as plain text, without control codes.

    Args:
        rollout: What to show.
        width: Maximum line length in characters.
    """
    buffer = io.StringIO()
    Console(file=buffer, width=width, color_system=None, force_terminal=False, highlight=False).print(
        span_tree(rollout)
    )
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines())


def _heading(rollout: Rollout) -> Text:
    text = Text(f"rollout {rollout.id}", style="bold")
    text.append(f"  task {rollout.task.id}", style="not bold")
    calls = len(rollout.trace.llm_calls())
    text.append(f"  {rollout.duration_s:.2f} s, {calls} calls, {len(rollout.triplets)} trained", style="not bold dim")
    return text


def _span(span: Span, origin: float, *, trained: bool) -> Text:
    name = span.node or span.attributes.get("tool.name") or ("call" if span.name == LLM_CALL else span.name)
    text = Text(str(name), style="bold cyan" if span.name != LLM_CALL else "bold magenta")
    text.append(f"  {span.end - span.start:.3f} s", style="not bold dim")
    text.append(f" at {span.start - origin:+.3f}", style="not bold dim")
    if span.name == LLM_CALL:
        text.append(f"  {_tokens(span.attributes)}", style="not bold dim")
        if trained:
            text.append("  trained", style="not bold green")
    return text


def _tokens(attributes: Mapping[str, Any]) -> str:
    """Return the call's token counts: from its token ids, else from the endpoint's `usage`."""
    prompt, response = attributes.get("prompt_token_ids"), attributes.get("response_token_ids")
    if prompt and response:
        text = f"{len(prompt)} + {len(response)} tokens"
    else:
        reply = attributes.get("response")
        usage = (reply.get("usage") if isinstance(reply, Mapping) else None) or {}
        counts = usage.get("prompt_tokens"), usage.get("completion_tokens")
        text = f"{counts[0]} + {counts[1]} tokens, no ids" if None not in counts else "no token ids"
    finish = attributes.get("finish_reason")
    return text if finish in (None, "stop", "tool_calls") else f"{text}, ended by {finish}"


def _call(branch: Tree, span: Span) -> None:
    request, response = span.attributes.get("request"), span.attributes.get("response")
    if isinstance(request, Mapping):
        tools = [str(_function(tool).get("name") or _content(tool)) for tool in request.get("tools") or ()]
        if tools:
            _field(branch, "tools", ", ".join(tools))
        for message in request.get("messages") or ():
            _message(branch, str(message.get("role", "message")), message)
    for choice in (response.get("choices") or ()) if isinstance(response, Mapping) else ():
        _message(branch, "reply", choice.get("message") or {}, style="green")


def _function(tool: Any) -> Mapping[str, Any]:
    found = tool.get("function") if isinstance(tool, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _message(branch: Tree, key: str, message: Mapping[str, Any], *, style: str = "") -> None:
    """Add a message's text, and each of its tool calls; a message that is nothing but calls has no text."""
    calls = tool_calls_of(message)
    if not calls or message.get("content"):
        _field(branch, key, _content(message.get("content")), style=style)
    for call in calls:
        _field(branch, "tool call", call, style=style)


def _content(content: Any) -> str:
    return storable(content) if isinstance(content, str) else json_text(content)


def _fields(branch: Tree, items: Iterable[tuple[str, Any]], *, skip: Sequence[str] | frozenset[str]) -> None:
    for key, value in items:
        if key in skip or value is None:
            continue
        if isinstance(value, Mapping):
            for inner, item in value.items():
                _field(branch, f"{key}.{inner}", _content(item))
        else:
            _field(branch, key, _content(value))


def _field(branch: Tree, key: str, value: str, *, style: str = "") -> None:
    text = Text(f"{key}: ", style="dim")
    text.append("\n" if "\n" in value else "")
    text.append(storable(value), style=f"not dim {style}".strip())
    branch.add(text)


def _verdict(rollout: Rollout) -> Text:
    if rollout.failure is not None:
        details = rollout.score.details if rollout.score is not None else {}
        reason = rollout.outcome.message or details.get("reason") or ""
        return Text(storable(f"failed: {rollout.failure}  {reason}".rstrip()), style="bold red")
    score = rollout.score
    assert score is not None  # a rollout without a failure has one
    text = Text(f"score {score.value:g}", style="bold green" if (score.value or 0) > 0 else "bold yellow")
    if score.status != "ok":
        text.append(f" ({score.status})")
    text.append(f"  judged in {1000 * rollout.reward_s:.1f} ms", style="not bold dim")
    extra = {**score.components, **score.details}
    if extra:
        text.append("  " + ", ".join(f"{k} {_content(v)}" for k, v in extra.items()), style="not bold")
    return text
