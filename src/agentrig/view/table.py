"""The results of runs side by side: the figures of the reference's published results, and more of each run."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from agentrig.correctness import turn_order
from agentrig.figures import NOTHING, counted, mean, percent, plain
from agentrig.text import printable
from agentrig.view import figures, tables
from agentrig.view.reading import RunData, rollout_rows, rows_in


def _shown(value: Any) -> str:
    return NOTHING if value is None else str(value)


def _arrow(found: Mapping[str, float] | None, digits: int) -> str:
    if found is None:
        return NOTHING
    first, last = plain(found["first"], digits), plain(found["last"], digits)
    return first if first == last else f"{first} → {last}"


def _part(seconds: Mapping[str, float], part: str) -> str:
    """Return the seconds of a part of a step, and its share of them."""
    whole = sum(seconds.values())
    return f"{plain(seconds[part], 2)} s ({percent(seconds[part] / whole)}%)" if part in seconds and whole else NOTHING


CELLS: Mapping[str, tuple[str, Callable[[Any], str]]] = {
    "accuracy": ("Accuracy before → after, %", lambda found: f"{percent(found['before'])} → {percent(found['after'])}"),
    "reward": ("Mean reward before → after", lambda found: f"{plain(found['before'], 3)} → {plain(found['after'], 3)}"),
    "model": ("Model", lambda name: name or NOTHING),
    "context": ("Schema, characters", _shown),
    "turns": ("Turns", _shown),
    "trained": (
        "Trained",
        lambda names: (
            ", ".join(names).replace("(no node)", "all calls" if len(names) == 1 else "others") if names else NOTHING
        ),
    ),
    "transitions_per_rollout": ("Calls kept by the adapter per rollout", lambda found: _arrow(found, 2)),
    "prompt_tokens": ("Prompt tokens a call", lambda found: _arrow(found, 1)),
    "response_tokens": ("Response tokens a call", lambda found: _arrow(found, 1)),
    "gpus": ("GPUs", lambda n: "0 (cpu)" if n == 0 else _shown(n)),
    "steps": ("Steps", _shown),
    "hours": ("Hours", lambda hours: plain(hours, 2)),
    "s_per_step": ("Seconds a step", lambda seconds: plain(seconds, 1)),
}
"""Key of `row_of` to its heading, and how its values are written; in the order of the table."""

NOTE = (
    "Accuracy is the percentage of correct answers among the held-out tasks that were scored; the mean reward is over "
    "the same tasks. Arrows go from the mean of a run's first steps to the mean of its last steps; prompt and response "
    "tokens are those of the calls that the adapter keeps."
)

OF_CLASSES = (
    " By class: the percentage of correct answers of its tasks; by trained calls, a task may be in another class after "
    "training. By turn: the share of the rollouts."
)

BESIDE = 60
"""Characters for the figures of runs whose names are not broken."""

BROKEN = 44
"""Characters of a line of what a row is of where names are not broken; a longer one is broken between its words."""

SHOWN = 8
"""Classes of a slice that a comparison in the terminal shows: those with most tasks."""


def row_of(run: RunData) -> dict[str, Any]:
    """Return a run's results as JSON values; None if the run does not have one.

    `first` and `last` are means over the run's first and last steps
    (`agentrig.view.figures.change`).
    """
    _, seconds = figures.series(run, "step_s")
    return {
        "run": run.name,
        "directory": str(run.directory),
        "recipe": run.recipe or None,
        "status": figures.status(run),
        "model": figures.model_name(run),
        # The published results call this context: the maximum characters of schema in a prompt.
        "context": run.setting("agent", "table_info_truncate"),
        "turns": run.setting("agent", "max_turns"),
        "trained": sorted(figures.totals(run, "nodes", "trained")) or None,
        **figures.held_out(run),
        "transitions_per_rollout": figures.change(run, "transitions_per_rollout"),
        "prompt_tokens": figures.change(run, "prompt_tokens"),
        "response_tokens": figures.change(run, "response_tokens"),
        "gpus": figures.accelerators(run),
        "steps": run.done or run.summary.get("steps") or 0,
        "hours": figures.hours(run),
        "s_per_step": mean(seconds),
        "time_s": figures.time_split(run),
        **rollout_counts(run),
        "failures": failures(run),
        "missing": list(run.missing),
    }


def rollout_counts(run: RunData) -> dict[str, int | None]:
    """Return how many `rollouts` a run has, measured ones too, and how many of them are of training; None if unknown.

    The summary's counts; without one, and of a run that ended in a step, which they leave out, those of its files.
    """
    if "rollouts" in run.summary and not run.error:
        return {"rollouts": run.summary["rollouts"], "train_rollouts": run.summary.get("train_rollouts")}
    counted = {True: 0, False: 0}
    for file in run.files:
        counted[file.mode == "train"] += rows_in(file)
    whole = sum(counted.values()) or run.summary.get("rollouts")
    return {"rollouts": whole, "train_rollouts": counted[True] if whole else None}


def failures(run: RunData) -> dict[str, int]:
    """Return how many rollouts failed, by kind.

    The summary's counts; without one, and of a run that ended in a step, which they leave out, those of the training
    steps and of the files of other rollouts.
    """
    if run.summary and not run.error:
        return {str(kind): int(n) for kind, n in figures.counts(run.summary.get("failures")).items()}
    counted = {int(line["step"]) for line in run.steps}
    others = [file for file in run.files if file.mode != "train" or file.step not in counted]
    found = Counter(figures.totals(run, "failures"))
    found.update(str(row["failure"]) for row in rollout_rows(others, ("failure",)) if row["failure"])
    return dict(found)


def text_of(shown: tables.Table, *, width: int | None = None) -> str:
    """Return a table and its note for a terminal, without control codes.

    Args:
        shown: The table. What its rows are of is in one line, unless their cells have several and a terminal's width
            is to be kept: elsewhere a name is to be copied, or searched for.
        width: In characters; None for the terminal's own.
    """
    import io
    import sys

    import rich.table
    from rich.console import Console
    from rich.text import Text

    several = any(kind == "lines" for _, kind in shown.heads)
    kept = several and (width is not None or sys.stdout.isatty())
    found = rich.table.Table(box=None, pad_edge=False, leading=int(several))
    for name, kind in shown.heads:
        found.add_column(Text(name), no_wrap=kind == "head" and not kept, overflow="fold")
    for cells in shown.rows:
        # A space in a number would be a place to break the line.
        first, *others = cells if kept or not several else [_broken(cells[0]), *cells[1:]]
        found.add_row(*(Text(printable(cell).replace("\N{NARROW NO-BREAK SPACE}", ",")) for cell in (first, *others)))
    buffer = io.StringIO()
    console = Console(file=buffer, width=width, color_system=None, force_terminal=False, highlight=False)
    if several and not kept:
        names = [len(line) for cells in shown.rows for line in _broken(cells[0]).splitlines()]
        console.width = max(console.width, BESIDE + max(names, default=0))
    for line in (line for said in shown.lead for line in [*printable(said).splitlines(), ""]):
        console.print(Text(line), soft_wrap=line.startswith(" "))  # a command stays in one line, to be copied
    console.print(found)
    console.print(Text(f"\n{shown.note}"))
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines())


def _broken(cell: str) -> str:
    """Return a cell with its long lines broken between words."""
    lines = [textwrap.wrap(line, BROKEN, break_long_words=False, break_on_hyphens=False) for line in cell.splitlines()]
    return "\n".join(part for parts in lines for part in parts)


def results(
    rows: Sequence[Mapping[str, Any]], most: int = tables.CLASSES, *, colors: Sequence[int] = ()
) -> tables.Table:
    """Return the results of runs, rows of `row_of`, as a table with a column for each of them.

    With what `tables.held_out` returned, it has the `most` largest classes of each slice, too. `colors` are those of
    the runs, as numbers.
    """
    ends, classes = ("before_ci95", "after_ci95"), list(parts([row for row in rows if "slices" in row], most))
    lines: list[list[str]] = []
    for key, (heading, text) in CELLS.items():
        lines.append([heading, *(text(row[key]) for row in rows)])
        if key == "accuracy":
            lines.append(["  95% intervals", *(" → ".join(interval(row[key][end]) for end in ends) for row in rows)])
            lines.append(["  held-out tasks", *(str(row[key]["n"] or NOTHING) for row in rows)])
            lines += ([heading, *cells] for heading, cells in classes)
        if key == "s_per_step":
            names = figures.in_order({part for row in rows for part in row["time_s"]})
            lines += (
                [f"  {figures.PART_NAMES.get(part, part)}", *(_part(row["time_s"], part) for row in rows)]
                for part in names
            )
    lines.append(["Failures", *(counted(row["failures"]) for row in rows)])
    lines.append(["Status", *(str(row["status"]) for row in rows)])
    lines = [line for line in lines if not line[0] or {*"".join(line[1:])} - {*f"{NOTHING} →"} or not any(line[1:])]
    heads = [("", "head"), *((str(row["run"]), "run" if len(rows) > 1 else "n") for row in rows)]
    tested = tables.parts_tested(row for row in rows if "components" in row)
    note = NOTE + (OF_CLASSES if classes else "") + (f" {tested}" if tested else "")
    return tables.Table(title="Results", heads=heads, rows=lines, note=note, colors=colors)


def parts(rows: Sequence[Mapping[str, Any]], most: int) -> Iterator[tuple[str, list[str]]]:
    """Yield lines of the comparison, held out: the accuracy by slice, the rollouts by turn, the parts of the reward."""

    def arrow(before: float | None, after: float | None) -> str:
        return NOTHING if before is after is None else f"{percent(before)} → {percent(after)}"

    def of_class(of: Mapping[str, Any]) -> str:
        sizes = dict.fromkeys(str(of[f"n_{end}"]) for end in tables.ENDS if of[f"n_{end}"])
        return f"{arrow(of['before'], of['after'])}, n = {' → '.join(sizes)}"

    for name in dict.fromkeys(name for row in rows for name in row["slices"]):
        classes = [row["slices"].get(name, {}) for row in rows]
        sizes = {part: max(of[part]["n"] for of in classes if part in of) for of in classes for part in of}
        kept = tables.largest(sizes, most)
        more = f", the {most} largest of {len(sizes)}" if len(kept) < len(sizes) else ""
        yield f"By {tables.slice_name(name)}{more}", [""] * len(rows)
        for part in kept:
            yield (
                f"  {part}",
                [of_class(of[part]) if part in of else NOTHING for of in classes],
            )
    turns = sorted({turn for row in rows for of in row["by_turn"].values() for turn in of}, key=turn_order)
    if turns:
        yield "By turn", [""] * len(rows)
    for turn in turns:
        ends = [[row["by_turn"][when] for when in ("before", "after")] for row in rows]
        shares = [[of.get(turn, 0) / sum(of.values()) if of else None for of in both] for both in ends]
        yield f"  {turn}", [arrow(*both) for both in shares]
    told = [{name: (cells, said) for name, cells, said in tables.reward_parts(row)} for row in rows]
    names = list(dict.fromkeys(name for of in told for name in of))
    if names:
        yield "Parts of the reward", [""] * len(rows)
    for name in names:
        cells = [(" → ".join(of[name][0]), of[name][1]) if name in of else (NOTHING, "") for of in told]
        yield f"  {name}", [", ".join(filter(None, cell)) for cell in cells]


def interval(found: Sequence[float] | None) -> str:
    """Return an interval of an accuracy in percent."""
    return NOTHING if found is None else f"{percent(found[0])}–{percent(found[1])}"
