"""The rollouts that the report shows whole: those of its examples, and a group of the last training step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentrig.view.calls import calls_of
from agentrig.view.gold import Gold
from agentrig.view.links import Anchors
from agentrig.view.readable import readable, text_of
from agentrig.view.reading import RunData, number, verdict
from agentrig.view.sample_traces import question
from agentrig.view.samples import last_group
from agentrig.view.tokens import Tokenizers

LONGEST_TEXT = 4_000
"""Characters of a message or an output in the file; the live page shows more."""

MOST_TOKENS = 600
"""Tokens of a call in the file."""

LEFT_OUT = "this file leaves it out, and `agentrig report RUN --gold` adds it"


class Shelf:
    """Makes rollouts readable for one file.

    Args:
        gold: Whether to show the private part of their tasks, which the run's task set is asked for.
    """

    def __init__(self, *, gold: bool) -> None:
        self._gold = Gold() if gold else None
        self._tokenizers = Tokenizers()

    def shown(self, run: RunData, view: Mapping[str, Any]) -> dict[str, Any]:
        """Return the rollouts that a run's examples mention, and those of a group.

        Args:
            run: The run.
            view: What else the page shows of it.

        Returns:
            `shown`, `group`, `to` (where their links lead), `damage` and `missing` (what cannot be read), for the
            templates.
        """
        missing = list(view["missing"])
        group = last_group(run, missing)
        rows = [*(group.rows if group else ())]
        rows += [each.row for each in view["reward_disagreements"]]
        if view["pairs"]:
            rows += [side.row for pair in view["pairs"].shown for side in (pair.before, pair.after)]
        by_id = {str(row["id"]): row for row in rows}
        anchors = {id: f"{view['at']}rollout-{place}" for place, id in enumerate(by_id, 1)}
        tokenizer, why = self._tokenizers.of(run) if rows else (None, "")
        damage = [f"{why}: sampled tokens are shown by their ids"] if why else []
        places: dict[str, Mapping[str, Any]] = {}
        for step in sorted({row["step"] for row in by_id.values() if row["mode"] == "train"}):
            found, wrong = calls_of(run.directory, step, by_id.keys())
            places |= found
            damage += [wrong] if wrong else []
        shown = []
        for id, row in by_id.items():
            gold, no_gold = self._gold.of(run.directory, str(row["task_id"])) if self._gold else (None, LEFT_OUT)
            shown.append(
                {
                    "at": anchors[id],
                    "title": question(row)[0],
                    "seen": readable(row, places.get(id, {}), tokenizer, LONGEST_TEXT, MOST_TOKENS),
                    "gold": [(key, text_of(value, LONGEST_TEXT)) for key, value in (gold or {}).items()],
                    "no_gold": no_gold,
                }
            )
        return {
            "shown": shown,
            "group": group
            and {"step": group.step, "title": group.title, "rollouts": [chip(row) for row in group.members]},
            "to": Anchors(anchors),
            "damage": damage,
            "missing": list(dict.fromkeys(missing)),
        }


def chip(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a rollout's score as a page shows it: short, with words for those who cannot see its colour."""
    kind, value = verdict(row), number(row.get("value"))
    text = "×" if kind == "failed" else f"{value:.2g}" if value is not None else "–"
    said = str(row.get("failure") or "not scored") if kind == "failed" else f"{kind}, score {value:g}"
    return {"id": row["id"], "verdict": kind, "text": text, "said": said}
