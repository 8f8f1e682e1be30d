"""A rollout in a terminal: every node, prompt, reply, token count and time, as `agentrig dev` shows it."""

from __future__ import annotations

import io
from collections.abc import Iterable

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from agentrig.rollouts import Rollout
from agentrig.text import storable
from agentrig.view.rollout import Call, Node, Readable, Step, readable_rollout


def span_tree(rollout: Rollout) -> Tree:
    """Return the whole span tree of a rollout, for rich to print.

    Text from a rollout is never parsed as rich markup, so brackets in a prompt are printed unchanged.
    """
    shown = readable_rollout(rollout)
    row, parts = shown.row, {part.id: part for part in shown.parts}
    head = Text(f"rollout {row['id']}", style="bold")
    head.append(f"  task {row['task_id']}", style="not bold")
    head.append(f"  {row['duration_s']:.2f} s, {row['calls']} calls, {row['triplets']} trained", style="not bold dim")
    tree = Tree(head, guide_style="dim")
    _fields(tree, shown.input)
    if not shown.tree:
        tree.add(Text("no spans were recorded", style="yellow"))
    branches = [tree]
    for node in shown.tree:
        part = parts.get(node.id)
        branch = branches[node.depth].add(_heading(node, part))
        branches[node.depth + 1 :] = [branch]
        if isinstance(part, Call):
            _call(branch, part)
        elif part is not None:
            _fields(branch, [*part.texts, *part.facts])
        if node.error:
            branch.add(Text(node.error, style="red"))
    tree.add(_verdict(shown))
    return tree


def span_text(rollout: Rollout, *, width: int = 120) -> str:
    """Return the span tree as plain text of lines of this width, without control codes."""
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False, highlight=False)
    with console.capture() as shown:
        console.print(span_tree(rollout))
    return "\n".join(line.rstrip() for line in shown.get().splitlines())


def _heading(node: Node, part: Call | Step | None) -> Text:
    text = Text(node.name, style="bold magenta" if node.kind == "call" else "bold cyan")
    text.append(f"  {node.seconds:.3f} s at {node.at:+.3f}", style="not bold dim")
    if isinstance(part, Call):
        text.append(f"  {part.length}", style="not bold dim")
        if part.trained:
            text.append("  trained", style="not bold green")
    return text


def _call(branch: Tree, call: Call) -> None:
    if call.facts:
        branch.add(Text(storable(", ".join(f"{key} {text}" for key, text in call.facts)), style="dim"))
    if call.repeated:
        branch.add(Text(f"messages as in the call before: {call.repeated}", style="dim"))
    for message in call.messages:
        _fields(branch, [(message.role, message.text)] if message.text or not message.calls else [])
        _fields(branch, [("tool call", each) for each in message.calls])
    if call.reply:
        _fields(branch, [("reply", call.reply)], style="green")


def _fields(branch: Tree, fields: Iterable[tuple[str, str]], *, style: str = "") -> None:
    for key, value in fields:
        text = Text(f"{key}: ", style="dim")
        text.append("\n" if "\n" in value else "")
        text.append(storable(value), style=f"not dim {style}".strip())
        branch.add(text)


def _verdict(shown: Readable) -> Text:
    reasons = ", ".join(f"{key} {text}" for key, text in shown.reasons)
    if shown.verdict == "failed":
        said = next((text for _, text in shown.reasons), "")
        return Text(storable(f"failed: {shown.score}  {said}".rstrip()), style="bold red")
    text = Text(f"score {shown.score}", style="bold yellow" if shown.verdict == "wrong" else "bold green")
    text.append(f"  judged in {1000 * shown.row['reward_s']:.1f} ms", style="not bold dim")
    text.append(f"  {storable(reasons)}" if reasons else "", style="not bold")
    return text
