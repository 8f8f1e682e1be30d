"""In a terminal: a rollout as `agentrig dev` shows it, and the end of a run as `agentrig train` shows it."""

from __future__ import annotations

import io
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from agentrig.errors import AgentrigError, RunStopped
from agentrig.figures import NOTHING, counted, duration, figure, percent, plain
from agentrig.plan import resume_command, script_of
from agentrig.prompting import PROMPTS_FILE
from agentrig.rollouts import Rollout
from agentrig.text import amount, cut, differs_in_kind_only, one_line, printable, with_kind
from agentrig.view import figures, tables
from agentrig.view.causes.evidence import Evidence
from agentrig.view.causes.outcome import by_class, changes, mean_reward, remarks
from agentrig.view.diagnosis import IT_ENDED, diagnose, ending
from agentrig.view.plots import second_rewards
from agentrig.view.reading import SECOND, RunData, judged, mapping, read_run
from agentrig.view.related import compare_command, to_compare
from agentrig.view.rollout import LONGEST_TEXT, Call, Node, Readable, is_said, readable_rollout, text_of
from agentrig.view.samples import WORSE, before_after
from agentrig.view.table import SHOWN, failures, interval

LONGEST_INPUT = 2_000
"""Characters that a terminal shows of a part of a task: prompts, which have what the model gets of it, are longer."""

LONGEST_ID = 100
"""Characters of a task's id that are shown."""

LONGEST_ANSWER = 400
"""Characters of an answer, or of a reward's reasons, that the end of a run shows."""

LONGEST_DETAIL = 2_000
"""Characters of each detail of a score that a rollout shows."""

SHORT_ANSWER = 200
"""Characters of an answer that is shown beside its score, although a reply below has the same text."""


def _calls(n: int, kept: int, own_model: bool) -> str:
    """Return how many calls a rollout made, and from how many of them training would learn."""
    made = amount(n, "call")
    if not n:
        return made
    training = "training" if own_model else "training with the run's own model"
    return f"{made}, which {training} would learn from" if kept == n else f"{made}, {training} would learn from {kept}"


def span_tree(rollout: Rollout, *, gold: bool = False, own_model: bool = True) -> Tree:
    """Return the whole span tree of a rollout, for rich to print: its score and answer first.

    With `gold`, the private part of the task is below the answer; where they look alike and one is text and the other
    is none, both say so. Without `own_model`, a server answered that training does not use, and this is said.

    Text from a rollout is never parsed as rich markup, so brackets in a prompt are printed unchanged. Long texts are
    cut: rich takes a second for a million characters.
    """
    shown = readable_rollout(rollout)
    row = shown.row
    head = Text(f"rollout {row['id']}", style="bold")
    head.append(f"  task {one_line(cut(row['task_id'], LONGEST_ID))}", style="not bold")
    head.append(
        f"  {row['duration_s']:.2f} s, {_calls(row['calls'], row['triplets'], own_model)}", style="not bold dim"
    )
    tree = Tree(head, guide_style="dim")
    tree.add(_verdict(shown))
    _fields(tree, shown.input, longest=LONGEST_INPUT)
    said = shown.said
    answer, private = rollout.outcome.answer, rollout.task.private if gold else {}
    alike = {key for key, value in private.items() if differs_in_kind_only(answer, value)}
    long = len(shown.answer) > SHORT_ANSWER and shown.answer.strip() in said
    told = with_kind(answer) if alike else "the text of a reply below" if long else shown.answer
    outcome = rollout.outcome
    if outcome.failure is None and outcome.answer is None and outcome.own_reward is None:
        told = "None"  # most often an agent without `return`
    _fields(tree, [("answer", told)] if told else [])
    kept = ((f"private.{k}", with_kind(v) if k in alike else text_of(v, 1 << 60)) for k, v in private.items())
    _fields(tree, kept, longest=LONGEST_INPUT)
    if not shown.tree:
        tree.add(Text("no spans were recorded", style="yellow"))
    branches = [tree]
    for node in shown.tree:
        branch = branches[node.depth].add(_heading(node))
        branches[node.depth + 1 :] = [branch]
        if node.call:
            _call(branch, node.call, node.facts)
        else:
            _fields(branch, [*(field for field in node.texts if not is_said(field[1], said)), *node.facts])
        if node.error:
            branch.add(Text(printable(_beginning(node.error, LONGEST_TEXT)), style="red"))
    return tree


def span_text(rollout: Rollout, *, width: int = 120) -> str:
    """Return the span tree as plain text of lines of this width, without control codes."""
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False, highlight=False)
    with console.capture() as shown:
        console.print(span_tree(rollout))
    return "\n".join(line.rstrip() for line in shown.get().splitlines())


def _heading(node: Node) -> Text:
    text = Text(one_line(node.name), style="bold magenta" if node.kind == "call" else "bold cyan")
    text.append(f"  {node.seconds:.3f} s at {node.at:+.3f}", style="not bold dim")
    if node.call:
        text.append(f"  {node.call.length}", style="not bold dim")
        text.append("  for training" if node.call.trained else "", style="not bold green")
    return text


def _call(branch: Tree, call: Call, facts: Iterable[tuple[str, str]]) -> None:
    if facts:
        branch.add(Text(printable(", ".join(f"{key} {text}" for key, text in facts)), style="dim"))
    if call.repeated:
        branch.add(Text(f"messages as in the call before: {call.repeated}", style="dim"))
    for message in call.messages:
        _fields(branch, [(message.heading, message.text)] if message.text or not message.calls else [])
        _fields(branch, [("tool call", each) for each in message.calls])
    if call.reply:
        _fields(branch, [("reply", call.reply)], style="green")


def _beginning(text: str, longest: int) -> str:
    """Return so many characters of a text, and how many it has more."""
    more = len(text) - longest
    return text if more <= 0 else f"{text[:longest]}\n… {amount(f'{more:,}', 'character')} more"


def _fields(branch: Tree, fields: Iterable[tuple[str, str]], *, style: str = "", longest: int = LONGEST_TEXT) -> None:
    for key, whole in fields:
        value = _beginning(whole, longest)
        text = Text(printable(f"{key}: "), style="dim")
        text.append("\n" if "\n" in value else "")
        text.append(printable(value), style=f"not dim {style}".strip())
        branch.add(text)


def _verdict(shown: Readable) -> Text:
    reasons = shown.remarks(LONGEST_DETAIL)
    if shown.verdict == "failed":
        said = next((cut(text, LONGEST_DETAIL) for _, text in shown.reasons), "")
        return Text(printable(f"failed: {shown.score}  {said}".rstrip()), style="bold red")
    text = Text(f"score {shown.score}", style="bold yellow" if shown.verdict == "wrong" else "bold green")
    text.append(f"  judged in {1000 * shown.row['reward_s']:.1f} ms", style="not bold dim")
    text.append(f"  {printable(reasons)}" if reasons else "", style="not bold")
    return text


def run_ending(directory: Path) -> Iterator[str | Table]:
    """Yield what a terminal shows of a run that has ended: lines, and tables that fit its width.

    The held-out figures before and after, those of parts of the reward and of classes too, whether the difference may
    be chance, a task before and after side by side, the first cause that `agentrig why` names, and the commands to go
    on with.
    """
    run = read_run(directory)
    held_out = figures.held_out(run)
    accuracy, reward = held_out["accuracy"], held_out["reward"]
    before, after = accuracy["before"], accuracy["after"]
    parts = tables.held_out(run)
    if before is None and after is None:
        yield "no held-out accuracy: there are no report tasks (run.report names their split)"
    else:
        how = figures.sampling(run.config, "val_temperature")
        table = _ends(", ".join(filter(None, [amount(accuracy["n"], "held-out task"), how])))
        table.add_column()
        measured = Evidence.of_ends(run)
        table.add_row(
            "accuracy",
            *(NOTHING if share is None else f"{percent(share)}%" for share in (before, after)),
            measured.gain_text,
        )
        table.add_row("95% interval", interval(accuracy["before_ci95"]), interval(accuracy["after_ci95"]))
        if any(value is not None for value in reward.values()):
            table.add_row("mean reward", plain(reward["before"], 3), plain(reward["after"], 3))
        for name, cells, said in tables.reward_parts(parts):
            told = "" if measured.rescored else said
            table.add_row(Text(f"  {one_line(cut(name, LONGEST_ID))}"), *cells, told)
        yield table
        if not measured.rescored:
            yield from filter(None, [tables.parts_tested([parts])])
        if measured.where.startswith("held-out") and measured.classes:
            n = len(measured.classes)
            head = f"the {SHOWN} of {n} classes" if n > SHOWN else "by class"
            table = _ends(f"{head} that changed by most points" if n > SHOWN else head)
            corrected, rows = by_class(measured, SHOWN)
            table.add_column(corrected)
            for name, *cells in rows:
                table.add_row(Text(one_line(cut(name, LONGEST_ID))), *cells)
            yield table
    for name in second_rewards(run):
        pair = figures.change(run, SECOND, name, "mean"), figures.change(run, "reward")
        ends = [f"{figure(each['first'])} → {figure(each['last'])}" for each in pair if each]
        yield f"second reward {name}, first → last steps: {', trained reward '.join(ends)}"
    evidence, (first, *others) = Evidence.of(run), ending(diagnose(run))
    tests = [change.text for change in (*changes(evidence), *mean_reward(evidence))]
    for text in tests:
        if text not in first:  # what is said below is not said here
            yield f"{text[0].upper()}{text[1:]}."
    known = remarks(evidence, parts)
    if any(text in first for text in tests):
        others = [*others, *known]
    else:
        yield from known
    pairs = before_after(evidence)
    shown = pairs["shown"][:1] if pairs else []
    if pairs and pairs["worse"]:  # not only the one that got better
        shown += [pair for pair in pairs["shown"][1:] if pair["outcome"] == WORSE][:1]
    for pair in shown:
        yield ""
        yield printable(f"{pair['outcome']}: {cut(pair['title'], LONGEST_ANSWER)}")
        table = _ends("")
        for name, cells in _side_by_side(pair["sides"]):
            table.add_row(Text(name, style="dim"), *(Text(printable(cell)) for cell in cells))
        yield table
    if shown:
        yield "agentrig watch shows the right answer too"
    yield ""
    yield printable(f"why: {first}")
    yield from (printable(f"     {line}") for line in others)
    hours, failed = figures.hours(run), failures(run)
    solved = ", solved" if run.summary.get("solved") else ""
    took = "" if hours is None else f" in {duration(3600 * hours)}"
    yield f"{amount(run.summary.get('steps', run.done), 'step')}{took}{solved}" + (
        f", failed {counted(failed)}" if failed else ""
    )
    yield ""
    places = _next(run) | _tracked(mapping(run.summary.get("observer_writes")))
    width = max(map(len, places))
    yield from (f"{name:<{width}}  {place}" for name, place in places.items())


def run_error(error: RunStopped) -> str:
    """Return what a terminal shows of the error that ended a run: its message, and what `agentrig why` says first."""
    seen = str(error)
    if error.run is None:
        return seen
    try:
        first, *others = ending(diagnose(error.run))
    except AgentrigError:  # its directory was moved, or deleted
        return seen
    told = first.partition(": ")[2].startswith(seen.partition("\n")[0])  # the error is the cause itself
    lines = [*([] if told else [f"why: {first}"]), *others]
    more = f"more: agentrig why {shlex.quote(str(error.run))}"
    return "\n".join([seen, *(f"  {line}" for line in [*lines, more] if line.removeprefix(IT_ENDED) not in seen)])


def _ends(head: str) -> Table:
    """Return a table with a column for each end of a run."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in (head, "before", "after"):
        table.add_column(name, overflow="fold")
    return table


def _side_by_side(sides: Iterable[Readable]) -> Iterator[tuple[str, list[str]]]:
    sides = list(sides)
    answers = _unlike([side.row["answer"] for side in sides]) or [side.answer for side in sides]
    yield "answer", [cut(answer, LONGEST_ANSWER) or NOTHING for answer in answers]
    yield "score", [f"{side.score} ({judged(side.row)})" for side in sides]
    reasons = [side.remarks() for side in sides]
    if any(reasons):
        yield "reward says", [cut(text, LONGEST_ANSWER) for text in reasons]


def _unlike(answers: Sequence[Any]) -> list[str]:
    """Return answers without the keys that are alike in both, which are counted; none if there are no such keys."""
    if not all(isinstance(answer, Mapping) for answer in answers):
        return []
    first, last = answers
    alike = {key for key in first.keys() & last.keys() if first[key] == last[key]}
    if not alike or first == last:
        return []
    more = f"\n… {amount(len(alike), 'key')} alike"
    return [text_of({key: value for key, value in each.items() if key not in alike}) + more for each in answers]


def _next(data: RunData) -> dict[str, str]:
    """Return a run's page, and the commands to go on with."""
    directory = data.directory
    run, page = shlex.quote(str(directory)), directory / "report.html"
    found = {
        "report": str(page) if page.is_file() else f"not written: `agentrig report {run}` says why",
        "why": f"agentrig why {run}",
        "watch": f"agentrig watch {run}",
    }
    if other := to_compare(data):
        found["compare"] = compare_command(other, directory)
    if (directory / "checkpoints" / "latest").is_file():
        config = shlex.quote(str(directory / "config.toml"))
        measure = f"agentrig eval {config} --checkpoint {run}"
        if script_of(directory):
            measure = "by the script, with the exported model: only the script has the agent and the tasks"
            if "steps" in mapping(data.config.get("algorithm")):
                more = f"algorithm.steps={2 * data.done}"
                found["resume"] = resume_command(str(data.manifest["resumes"]), Path(run), more)
        found |= {"eval": measure, "export": f"agentrig export {run} my-model"}
        if (directory / PROMPTS_FILE).is_file():
            found |= {"eval": f"agentrig eval {config} --prompts {run}", "export": str(directory / PROMPTS_FILE)}
    return found


def _tracked(writes: Mapping[str, Any]) -> dict[str, str]:
    """Return of each tracker the command that shows or sends what it wrote, else its page, else its folder."""
    found = {}
    for name, place in writes.items():
        found[name] = next((str(place[key]) for key in ("command", "url", "folder") if mapping(place).get(key)), "")
        if found[name] and mapping(place).get("written") == 0:
            found[name] = f"nothing arrived: {found[name]}"
    return {name: place for name, place in found.items() if place}
