"""The tables of a run's page: what its steps add up to."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
from markupsafe import Markup

from agentrig.correctness import by_turn, turn_order, wrong_calls
from agentrig.figures import NOTHING, count, figure, flip_test, judged, mean, number, percent
from agentrig.ledger import REASONS
from agentrig.run.metrics import component_means, told_components
from agentrig.text import alike, amount
from agentrig.view import figures
from agentrig.view.plots import CAPTIONS, second_rewards
from agentrig.view.reading import SECOND, RolloutFile, RunData, dig, mapping, rollout_rows

ENDS = ("before", "after")

FEWEST = 20
"""Tasks that say whether a class of a slice has the whole gain: of fewer other tasks chance may be why."""

CLASSES = 40
"""Classes of a slice in its table: those with most tasks."""

PARTS = 8
"""Components of a reward that are shown: the first."""

WRONG = {
    "no-query": "no query",
    "error": "the query fails",
    "columns": "other columns",
    "rows": "another number of rows",
    "empty": "no row",
    "order": "another order",
    "values": "other values",
    "tables": "none of the right tables",
}
"""Why an answer is wrong, as execution match says it in one word (`details["wrong"]`)."""

PLACES: Mapping[str, str] = {
    "trained": "in the loss",
    "masked": "in a sequence as context, without loss",
    "handed_over": "handed over to the algorithm, which does not say what it did with them",
    "unaccounted": "neither trained, masked nor dropped: the run stopped",
}
"""The places of the ledger of calls, and what they mean."""

EXAMPLE = 240
"""Characters of a failure's message in the table."""


def _pairs(heads: Mapping[str, str] | Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    return list(heads.items() if isinstance(heads, Mapping) else heads)


@attrs.frozen(kw_only=True)
class Table:
    """One table; it is shown if it has rows or a note that stands for them.

    Attributes:
        heads: Its columns: the heading, and how they are set: `n` for numbers, `name` for one line, `lines`,
            `wide`, `head` for what a row is of, `run` for figures of a run with its colour, or ''.
        rows: Its cells, as text.
        narrow: Whether it fits beside others.
        more: Whether few need it, so that a page folds it.
        lead: What it says, above it; below the first line of each are commands.
        colors: The numbers of the colours of its columns of the kind `run`; in order if empty.
    """

    title: str
    heads: Sequence[tuple[str, str]] = attrs.field(converter=_pairs)
    rows: Sequence[Sequence[str]]
    note: str = ""
    narrow: bool = False
    more: bool = False
    lead: Sequence[str] = ()
    colors: Sequence[int] = ()


def tables(run: RunData, of_rollouts: Sequence[Table] = ()) -> list[Table]:
    """Return the tables that a run has something for, after those that take reading its rollouts."""
    found = [*of_rollouts, _nodes(run), _calls(run), _algorithm(run), _parts(run), _second(run)]
    return [table for table in found if table.rows or table in of_rollouts]


def held_out(run: RunData) -> dict[str, Any]:
    """Return what the held-out rollouts are broken down by, as `agentrig report --json` prints it.

    Returns:
        `slices`: of each slice of the tasks, of each of its classes, the accuracy `before` and `after` training, of how
        many tasks each (`n_before`, `n_after`), the larger number `n`, and where rewards are graded, neither 0 nor 1,
        their means (`reward_before`, `reward_after`).
        `by_turn`: before and after, how many rollouts became right or wrong at which turn.
        `wrong`: before and after, why answers are wrong, to how many; `scored`: of how many answers.
        `components`: `before` and `after`, the mean of each component of the scores that says more than the reward;
        and `p` of `flip_test` on the tasks that have it at both ends, multiplied by the number of these components
        (Bonferroni), or None.
        `calls`: before and after, how many calls were `scored`, and how many of them below 1: `wrong`.
    """
    files = run.of_mode("report")
    judged: dict[str, dict[str, dict[str, list[tuple[float, float]]]]] = defaultdict(dict)
    graded = False
    turns: dict[str, dict[str, int]] = {}
    wrong: dict[str, Counter[str]] = {}
    scored: dict[str, int] = {}
    called: dict[str, dict[str, int]] = {}
    components: dict[str, list[tuple[float, Mapping[str, Any]]]] = {}
    by_task: dict[str, dict[str, Mapping[str, float]]] = {}
    for when, some in zip(ENDS, (files[:1], files[1:][-1:]), strict=True):
        rows = [row for file in some for row in run.seen.of(file, _scored)]
        graded = graded or any(row["value"] not in (0, 1) for row in rows)
        for row in rows:
            for name, part in row["slices"].items():
                of_part = judged[name].setdefault(str(part), {end: [] for end in ENDS})
                of_part[when].append((row["correct"], row["value"]))
        wrong[when] = Counter(row["wrong"] for row in rows if row["wrong"])
        components[when] = [(row["value"], row["components"]) for row in rows]
        by_task[when] = {row["task"]: row["components"] for row in rows}
        turns[when], scored[when] = by_turn(rows), len(rows)
        called[when] = wrong_calls(row["calls"] for row in rows)
    classes = {
        name: {
            part: {
                "n": max(map(len, of.values())),
                **{end: mean([right for right, _ in of[end]]) for end in ENDS},
                **{f"n_{end}": len(of[end]) for end in ENDS},
                **({f"reward_{end}": mean([value for _, value in of[end]]) for end in ENDS} if graded else {}),
            }
            for part, of in parts.items()
        }
        for name, parts in judged.items()
        if len(parts) > 1
    }
    means = {end: component_means(components[end]) for end in ENDS}
    told = told_components(score for end in ENDS for score in components[end])
    both = [(by_task["before"][task], of) for task, of in by_task["after"].items() if task in by_task["before"]]
    moved = {name: [b[name] - a[name] for a, b in both if name in a and name in b] for name in told}
    tests = {name: flip_test(differences) for name, differences in moved.items() if len(differences) > 1}
    return {
        "slices": classes, "by_turn": turns, "wrong": {when: dict(of) for when, of in wrong.items()}, "scored": scored,
        "components": {
            name: {
                **{end: means[end].get(name) for end in ENDS},
                "p": min(1.0, len(tests) * tests[name]) if name in tests else None,
            }
            for name in told
        },
        "calls": called,
    }  # fmt: skip


def _scored(file: RolloutFile) -> list[dict[str, Any]]:
    """Return what `held_out` counts of each scored rollout of a file."""
    columns = ("task_id", "failure", "value", "correct", "details", "call_values", "components", "slices")
    found = []
    for row in rollout_rows([file], columns, optional=("call_values", "components")):
        if row["failure"] or (value := number(row["value"])) is None:
            continue
        values = row["call_values"] if isinstance(row["call_values"], list) else []
        details = mapping(row["details"])
        numbers = {name: number(part) for name, part in mapping(row["components"]).items()}
        found.append(
            {
                "task": str(row["task_id"]),
                "value": value,
                "correct": float(bool(row["correct"])),
                "slices": mapping(row.get("slices")),
                "wrong": str(details.get("wrong") or ""),
                "turn": details.get("turn"),
                "calls": [number(value) for value in values],
                "components": {name: part for name, part in numbers.items() if part is not None},
            }
        )
    return found


def reward_parts(found: Mapping[str, Any]) -> Iterator[tuple[str, list[str], str]]:
    """Yield what is told of the held-out reward before and after: its first components, and the calls it scored.

    A component comes with whether its difference may be chance, where that is known.
    """
    for name, of in [*found["components"].items()][:PARTS]:
        yield name, [figure(of[end]) for end in ENDS], judged(of["p"]) if of["p"] is not None else ""
    calls = [found["calls"][end] for end in ENDS]
    if any(calls):
        yield "calls scored below 1", [f"{of['wrong']} of {of['scored']}" if of else NOTHING for of in calls], ""


def parts_tested(every: Iterable[Mapping[str, Any]]) -> str:
    """Return which test the parts of the reward had in runs, and what its p is corrected for; '' without one."""
    tested = [sum(of["p"] is not None for of in found["components"].values()) for found in every]
    numbers = " or ".join(map(str, sorted({n for n in tested if n > 1})))
    corrected = f", p corrected for {numbers} parts" if numbers else ""
    return f"Parts of the reward: permutation test{corrected}." if any(tested) else ""


def gain_alone(found: Mapping[str, Any]) -> list[str]:
    """Say of a slice's class that the gain is in it alone: the other tasks, `FEWEST` at least, gained nothing."""
    said = []
    for name, parts in found["slices"].items():
        ends = {part: [of[f"n_{end}"] * (of[end] or 0.0) for end in ENDS] for part, of in parts.items()}
        whole = [sum(each) for each in zip(*ends.values(), strict=True)]
        tasks = [sum(of[f"n_{end}"] for of in parts.values()) for end in ENDS]
        for part, of in parts.items():
            n = [all_of - of[f"n_{end}"] for all_of, end in zip(tasks, ENDS, strict=True)]
            if name == "calls" or min(n) < FEWEST or 0 in (of["n_before"], of["n_after"]):
                continue
            before, after = ((every - own) / of_n for every, own, of_n in zip(whole, ends[part], n, strict=True))
            if of["after"] > of["before"] and after <= before:
                gained = f"{percent(of['before'])} → {percent(of['after'])}% of {amount(of['n'], 'task')}"
                others = f"of the other {max(n)} {percent(before)} → {percent(after)}%"
                said.append(f"The gain is in {slice_name(name)} {part} alone: {gained}; {others}.")
    return said


def slices(found: Mapping[str, Any]) -> list[Table]:
    """Return the held-out accuracy before and after by each slice of the tasks, by turn, and wrong answers."""
    measured = [end for end in ENDS if found["scored"].get(end)]
    by_turn, wrong = ({end: found[key][end] for end in measured} for key in ("by_turn", "wrong"))
    ends, every = {end.capitalize(): "n" for end in measured}, []
    for name, parts in found["slices"].items():
        kept = largest({part: of["n"] for part, of in parts.items()}, CLASSES)
        note = f"The {len(kept)} classes with most tasks, of {len(parts)}." if len(kept) < len(parts) else ""
        heads = {slice_name(name).capitalize(): "name", **ends}
        rows = [[part, *(_share_of(parts[part], end) for end in measured)] for part in kept]
        every.append(
            Table(title=f"Held-out accuracy by {slice_name(name)}", heads=heads, rows=rows, note=note, narrow=True)
        )
    judged = {end: sum(of.values()) for end, of in by_turn.items()}
    turns = sorted(_shares(by_turn, judged), key=lambda row: turn_order(row[0]))
    every.append(Table(title="Held-out rollouts by turn", heads={"Rollouts": "name", **ends}, rows=turns, narrow=True))
    tested = parts_tested([found])
    parts = [
        [name, *(cell for end, cell in zip(ENDS, cells, strict=True) if end in measured), *([said] if tested else [])]
        for name, cells, said in reward_parts(found)
    ]
    heads = {"Part": "name", **ends, **({"Difference": "name"} if tested else {})}
    every.append(Table(title="Held-out reward by part", heads=heads, rows=parts, note=tested, narrow=True))
    why = [[WRONG.get(why, why), *counts] for why, *counts in _shares(wrong, found["scored"])]
    note = "Shares are of all answers that were scored."
    return [*every, Table(title="Wrong answers", heads={"Why": "", **ends}, rows=why, note=note, narrow=True)]


def slice_name(name: str) -> str:
    """Return a slice's name for people: the slice `calls` counts the trained ones only."""
    return "trained calls" if name == "calls" else name


def _share_of(part: Mapping[str, Any], end: str) -> str:
    if not part[f"n_{end}"]:
        return NOTHING
    reward = part.get(f"reward_{end}")
    share = f"{_percent(part[end])} of {count(part[f'n_{end}'])}"
    return share if reward is None else f"{share}, mean reward {figure(reward)}"


def _shares(counts: Mapping[str, Mapping[str, int]], every: Mapping[str, int]) -> list[list[str]]:
    """Return a row for each kind: how many rollouts before and after, and the share of all; the most frequent first."""
    total = sum((Counter(of) for of in counts.values()), Counter())
    kinds = sorted(total, key=lambda kind: (-total[kind], kind))

    def cell(n: int, of: int) -> str:
        return f"{count(n)} ({percent(n / of)}%)" if of else NOTHING

    return [[kind, *(cell(of.get(kind, 0), every[end]) for end, of in counts.items())] for kind in kinds]


def largest(sizes: Mapping[str, int], most: int) -> list[str]:
    """Return the classes of a slice with most tasks, in the order to show them, from the number of tasks of each."""
    kept = sorted(sizes, key=lambda part: (-sizes[part], part))[:most]
    return sorted(kept, key=int) if all(part.isdecimal() for part in kept) else kept


def failures(run: RunData) -> Table:
    """Return the failures in the rollout files, the most frequent kind first, with an example of each."""
    modes: Counter[str] = Counter()
    counts: Counter[tuple[str, str]] = Counter()
    kinds: Counter[str] = Counter()
    examples: dict[str, dict[str, str]] = defaultdict(dict)  # kind to cause to message
    for row in rollout_rows(run.files, ("failure", "message", "details")):
        modes[row["mode"]] += 1
        if kind := row["failure"]:
            counts[kind, row["mode"]] += 1
            kinds[kind] += 1
            message = str(row["message"] or mapping(row["details"]).get("reason") or "")
            examples[kind].setdefault(alike(message), message)
    rows = []
    for kind in sorted(kinds, key=lambda kind: (-kinds[kind], kind)):
        first, causes = next(iter(examples[kind].values())), len(examples[kind])
        example = first if len(first) <= EXAMPLE else f"{first[:EXAMPLE]}…"
        example = f"of {causes} causes: {example}" if causes > 1 else example
        rows.append([kind, *(count(counts[kind, mode]) for mode in modes), example])
    note = "" if rows else f"None: every one of {amount(count(sum(modes.values())), 'rollout')} was scored."
    rows += [["of rollouts", *map(count, modes.values()), ""]] if rows else []
    heads = {"Kind": "name", **dict.fromkeys(modes, "n"), "For example": "wide"}
    return Table(
        title="Failures", heads=heads, rows=rows, note=note if modes else "There are no rollouts.", narrow=True
    )


def _nodes(run: RunData) -> Table:
    seen, trained = figures.totals(run, "nodes", "seen"), figures.totals(run, "nodes", "trained")
    rows = []
    for name in sorted(seen.keys() | trained.keys(), key=lambda name: (-seen.get(name, 0), name)):
        n, kept = seen.get(name, 0), trained.get(name, 0)
        rows.append([name, count(n), count(kept), _percent(kept / n if n else None)])
    return Table(
        title="Agent names",
        heads={"Node": "", "Calls": "n", "Kept": "n", "Share": "n"},
        rows=rows,
        note="Calls to the model in training rollouts, by the graph node that made them, and those that the adapter "
        "kept. Of these, the algorithm may leave out some: the table of calls has them.",
        narrow=True,
        more=True,
    )


def _calls(run: RunData) -> Table:
    calls, tokens = figures.books(run, "calls"), figures.books(run, "call_tokens")
    whole = calls.get("recorded", 0)
    reasons = sorted((name for name in calls if name.startswith("dropped: ")), key=lambda name: -calls[name])
    places = {name: says for name, says in PLACES.items() if whole and (calls.get(name) or name == "trained")}
    places |= {name: REASONS.get(name.removeprefix("dropped: "), "") for name in reasons if whole}
    shares = {name: calls.get(name, 0) / whole for name in places}
    return Table(
        title="Calls",
        heads={"Place": "lines", "Calls": "n", "Tokens": "n", "Share": "n"},
        rows=[
            [
                f"{place}\n{says}".strip(),
                count(calls.get(place, 0)),
                count(tokens.get(place, 0)),
                _percent(shares[place]),
            ]
            for place, says in places.items()
        ],
        note="Every recorded call of the training rollouts is in exactly one row; tokens are sampled ones. A step in "
        "which the rows do not add up ends the run.",
        narrow=True,
        more=True,
    )


def _algorithm(run: RunData) -> Table:
    rows = []
    for name in dict.fromkeys(name for row in run.steps for name in mapping(row.get("algorithm"))):
        _, values = figures.series(run, "algorithm", name)
        if values:
            ends = (values[0], values[-1], min(values), max(values))
            rows.append([name, spark(values), *map(figure, ends)])
    heads = {"Figure": "", "By step": "", **dict.fromkeys(("First", "Last", "Least", "Most"), "n")}
    told = {row[0]: CAPTIONS.get(f"algorithm/{row[0]}", "") for row in rows}
    note = "\n".join(f"{name}: {caption}" for name, caption in told.items() if caption)
    return Table(title="Algorithm", heads=heads, rows=rows, note=note, more=True)


def spark(values: Sequence[float], width: int = 120, height: int = 22) -> str:
    """Return a small curve of the values as SVG; empty for fewer than two."""
    if len(values) < 2:
        return ""
    low, span = min(values), (max(values) - min(values)) or 1.0
    across = (width - 2) / (len(values) - 1)
    points = (f"{1 + i * across:.1f},{height - 2 - (height - 4) * (v - low) / span:.1f}" for i, v in enumerate(values))
    return Markup(
        f'<svg class="spark" viewBox="0 0 {width} {height}" preserveAspectRatio="none" aria-hidden="true">'
        f'<polyline points="{" ".join(points)}"/></svg>'
    )


def _parts(run: RunData) -> Table:
    rows = []
    for name in dict.fromkeys(name for row in run.steps for name in mapping(row.get("reward_parts"))):
        _, values = figures.series(run, "reward_parts", name)
        if values:
            few = max(1, min(figures.SMOOTHING, len(values) // 2))
            rows.append([str(name), *(figure(mean(some)) for some in (values[:few], values[-few:], values))])
    heads = {"Part": "", "First steps": "n", "Last steps": "n", "Mean": "n"}
    n = sum(figures.series(run, "rollouts")[1]) - sum(figures.totals(run, "failures").values())
    note = f"Of the scored training rollouts, n = {count(int(n))}."
    return Table(title="Parts of the reward", heads=heads, rows=rows, note=note)


def _second(run: RunData) -> Table:
    trained, rows = mean(figures.series(run, "reward")[1]), []
    for name in second_rewards(run):
        differ = of = agreed = judged = 0.0
        for row in run.steps:
            found = mapping(dig(row, SECOND, name))
            n, share = number(found.get("n")), number(found.get("agreement"))
            differ, of = differ + (number(found.get("differs")) or 0), of + (n or 0)
            if share is not None and n:
                agreed, judged = agreed + share * n, judged + n
        own = figure(mean(figures.series(run, SECOND, name, "mean")[1]))
        others = f"{count(differ)} of {count(of)}" if of else NOTHING
        rows.append([name, own, figure(trained), others, _percent(agreed / judged if judged else None)])
    columns = ("Its mean", "Trained reward's mean", "Rollouts with another value", "Agree on what is correct")
    return Table(title="Second rewards", heads={"Reward": "", **dict.fromkeys(columns, "n")}, rows=rows)


def _percent(share: float | None) -> str:
    return NOTHING if share is None else f"{percent(share)}%"
