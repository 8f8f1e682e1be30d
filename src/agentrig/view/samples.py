"""The rollouts that a page shows: a task before and after training, where two rewards disagree, a group of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from agentrig.figures import number
from agentrig.text import cut
from agentrig.view.beside import PrivatePart, calls_of, private_of, tokenizer_of
from agentrig.view.causes.evidence import Evidence
from agentrig.view.html import Links
from agentrig.view.reading import SECOND, RunData, mapping, rollout_rows
from agentrig.view.rollout import (
    COLUMNS,
    FOLDER,
    QUESTION,
    Readable,
    chip,
    question,
    readable,
    readable_private,
    score_of,
    text_of,
)

LONGEST_TEXT = 4_000
"""Characters of a message or an output in the file; the live page shows more."""

MOST_TOKENS = 600
"""Tokens of a call in the file."""

SHORT = 80
"""Most characters of a value of a task's input that is shown beside its question."""

MOST_DISAGREEMENTS = 6
"""Rollouts that are shown because two rewards disagree on them."""

WITHOUT_GOLD = ("reason", "wrong")
"""The details of a score that every report shows; feedback, and what else a reward says, may hold the gold."""

LEFT_OUT = "this file leaves it out, and `agentrig report RUN --gold` adds it"

WORSE = "right before, wrong after"

KINDS = {
    (False, True): ("wrong before, right after", 3),
    (True, False): (WORSE, 1),
    (False, False): ("wrong both times", 1),
    (True, True): ("right both times", 1),
}
"""Whether a task was right before and after training, to the words for it and how many of these are shown."""


def before_after(evidence: Evidence) -> dict[str, Any] | None:
    """Choose tasks that were measured before and after training, and return their rollouts.

    It chooses tasks of each kind at equal distances in the order of their ids, including tasks that got worse, so that
    the choice is reproducible and not biased.

    Returns:
        `where` they were measured, how many tasks were `judged` both times and got `better` and `worse`, whether that
        may be `chance`, all whose verdict `changed` (the words for it, and each task with the ids of its two rollouts),
        and the few that are `shown`; None without two measurements.
    """
    if evidence.ends is None:
        return None
    first, last = evidence.ends
    groups: dict[tuple[bool, bool], list[str]] = {kind: [] for kind in KINDS}
    for task in sorted(first.keys() & last.keys()):
        groups[first[task][1], last[task][1]].append(task)
    chosen = [(task, words) for kind, (words, most) in KINDS.items() for task in spread(groups[kind], most)]
    ids = {end[task][0] for task, _ in chosen for end in evidence.ends}
    files = evidence.run.measured()
    changed = {KINDS[kind][0]: groups[kind] for kind in KINDS if kind[0] != kind[1]}
    asked = {first[task][0]: task for tasks in changed.values() for task in tasks}
    titles = {
        asked[row["id"]]: question({**row, "task_id": asked[row["id"]]})
        for row in rollout_rows(files[:1], ("id", "input"), ids=asked.keys())
    }
    whole = {row["id"]: row for row in rollout_rows([files[0], files[-1]], COLUMNS, ids=ids)}
    shown = []
    for task, words in chosen:
        rows = [whole[end[task][0]] for end in evidence.ends if end[task][0] in whole]
        if len(rows) == 2:
            sides = [readable(row, {}, None, LONGEST_TEXT, 0) for row in rows]
            facts = [(key, text) for key, text in sides[0].input if len(text) <= SHORT and not text.startswith(FOLDER)]
            facts = [("task", task), *(fact for fact in facts if fact[1] not in ("", sides[0].title))]
            pair = {"task": task, "private": None, "title": sides[0].title, "outcome": words}
            shown.append({**pair, "facts": facts, "sides": sides})
    better, worse, _, judged = evidence.changed
    told = {"better": better, "worse": worse, "chance": evidence.chance, "judged": judged}
    lists = {
        words: [
            {"task": task, "title": cut(titles[task], QUESTION), "ids": [end[task][0] for end in evidence.ends]}
            for task in tasks
            if task in titles
        ]
        for words, tasks in changed.items()
        if tasks
    }
    return {"where": evidence.where, "shown": shown, "changed": lists, **told}


def spread(tasks: Sequence[str], most: int) -> list[str]:
    """Return so many of the tasks at equal distances, or all."""
    n = min(most, len(tasks))
    return [tasks[(2 * i + 1) * len(tasks) // (2 * n)] for i in range(n)]


def reward_disagreements(run: RunData) -> list[dict[str, Any]]:
    """Return the latest few rollouts whose value in a second reward differs from the one that was trained on."""
    found: list[dict[str, Any]] = []
    for file in reversed(run.of_mode("train")):
        scored = list(rollout_rows([file], ("id", "value", SECOND)))
        others = {str(row["id"]): name for row in scored if (name := _other(row))}
        for row in rollout_rows([file], COLUMNS, ids=others.keys()) if others else ():
            name, answer = others[row["id"]], row["answer"]
            second = mapping(row[SECOND][name])
            reason = mapping(second.get("details")).get("reason")
            told = f"trained reward {score_of({'value': row['value']})}, {name} {score_of(second)}"
            shown = {"row": row, "title": question(row), "answer": cut(text_of(answer), LONGEST_TEXT)}
            found.append({**shown, "told": f"{told} ({reason})" if reason else told})
            if len(found) == MOST_DISAGREEMENTS:
                return found
    return found


def _other(row: Mapping[str, Any]) -> str | None:
    """Return the name of the first second reward with another value than the row's, or None."""
    seconds = mapping(row[SECOND]).items()
    return next((str(name) for name, score in seconds if mapping(score).get("value") != row["value"]), None)


def last_group(run: RunData) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the first group of the last training step whose rollouts differ in value, or else the first one.

    Returns:
        Its `step`, its task's `title` and the scores of all its `rollouts`, and the whole rows of a few: those with
        the highest and the lowest values. Both are empty for a run without training rollouts.
    """
    files = run.of_mode("train")[-1:]
    groups: dict[tuple[Any, Any], list[dict[str, Any]]] = {}
    for row in rollout_rows(files, ("id", "task_id", "group", "failure", "value", "correct")):
        groups.setdefault((row["group"], row["task_id"]), []).append(row)
    all_groups = list(groups.values())
    members = next((g for g in all_groups if len({row["value"] for row in g}) > 1), all_groups[0] if groups else [])
    ranked = sorted(members, key=lambda row: number(row["value"]) or 0.0, reverse=True)
    chosen = ranked if len(ranked) <= 4 else [*ranked[:2], *ranked[-2:]]
    ids = [str(row["id"]) for row in chosen]
    rows = sorted(rollout_rows(files, COLUMNS, ids=ids), key=lambda row: ids.index(row["id"]))
    if not rows:
        return {}, []
    return {"step": files[0].step, "title": question(rows[0]), "rollouts": [chip(row) for row in members]}, rows


def add_gold(run: RunData, pairs: Mapping[str, Any] | None) -> None:
    """Add the private part of their tasks to what `before_after` returned, where it can be loaded."""
    for pair in pairs["shown"] if pairs else ():
        pair["private"] = readable_private(private_of(run.directory, pair["task"]), LONGEST_TEXT)


def _without_gold(seen: Readable) -> Readable:
    details = mapping(seen.row["details"]).keys() - WITHOUT_GOLD
    return attrs.evolve(seen, reasons=[(key, LEFT_OUT if key in details else text) for key, text in seen.reasons])


def shown(run: RunData, view: Mapping[str, Any], *, gold: bool) -> dict[str, Any]:
    """Return the rollouts that a run's examples mention, and those of a group of the last step, for one file.

    Returns:
        `shown`, `group`, `to` (where their links lead), `damage` and `missing` (what cannot be read), for templates.
    """
    if gold:
        add_gold(run, view["pairs"])
    else:
        for pair in (view["pairs"] or {"shown": ()})["shown"]:
            pair["sides"] = [_without_gold(side) for side in pair["sides"]]
    group, rows = last_group(run)
    rows += [each["row"] for each in view["reward_disagreements"]]
    rows += [side.row for pair in (view["pairs"] or {"shown": ()})["shown"] for side in pair["sides"]]
    by_id = {str(row["id"]): row for row in rows}
    anchors = {id: f"{view['at']}rollout-{place}" for place, id in enumerate(by_id, 1)}
    tokenizer, why = tokenizer_of(run) if rows else (None, "")
    calls, damage = calls_of(run.directory, list(by_id.values()))
    damage = [f"{why}: sampled tokens are shown by their ids", *damage] if why else damage
    whole = []
    for id, row in by_id.items():
        private = private_of(run.directory, str(row["task_id"])) if gold else PrivatePart(missing=LEFT_OUT)
        seen = readable(row, calls.get(id, {}), tokenizer, LONGEST_TEXT, MOST_TOKENS)
        seen = seen if gold else _without_gold(seen)
        whole.append({"at": anchors[id], "seen": seen, "private": readable_private(private, LONGEST_TEXT)})
    missing = list(dict.fromkeys([*view["missing"], *run.damage]))
    return {"shown": whole, "group": group, "to": Links(anchors=anchors), "damage": damage, "missing": missing}
