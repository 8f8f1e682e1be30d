"""The reward `json-repair`: graded by what was repaired and what was kept; correct if all is right."""

from __future__ import annotations

import json

from agentrig import Outcome, Score, Task
from agentrig_json_repair.validation import first_error, is_right


def score(task: Task, outcome: Outcome, budget_s: float) -> Score:
    """Score a document.

    It is correct if it validates and every property that was right at the start has its value still. So an answer
    that throws the document away is not correct. Otherwise the value is half of the share of faults that are
    repaired, times the share of right properties that are kept.
    """
    schema, before = task.input["schema"], task.input["document"]
    try:
        after = json.loads(outcome.answer)
    except (TypeError, ValueError, RecursionError):
        return Score.ok(0.0, correct=False, repaired=0.0, kept=0.0)
    if not isinstance(after, dict):
        return Score.ok(0.0, correct=False, repaired=0.0, kept=0.0)
    rules = schema["properties"]
    right = [name for name, rule in rules.items() if name in before and is_right(rule, before[name])]
    wrong = [name for name in rules if name not in right]
    extra = [name for name in before if name not in rules]
    good = sum(name in after and is_right(rules[name], after[name]) for name in wrong)
    good += sum(name not in after for name in extra)
    repaired = good / max(1, len(wrong) + len(extra))
    kept = sum(name in after and after[name] == before[name] for name in right) / len(right) if right else 1.0
    correct = not first_error(schema, after) and kept == 1.0
    return Score.ok(1.0 if correct else 0.5 * repaired * kept, correct=correct, repaired=repaired, kept=kept)
