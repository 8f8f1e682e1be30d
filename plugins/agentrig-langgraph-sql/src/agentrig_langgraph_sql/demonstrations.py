"""What right replies to this agent's calls are: write, check, rewrite, with mistakes that are checked and repaired."""

from __future__ import annotations

import re
from random import Random

from agentrig import Task
from agentrig.demonstrations import Call, Demonstrate, Reply, gold_of
from agentrig_langgraph_sql.prompts import Prompts

WRONG = 0.5
"""Share of conversations whose first query is wrong."""

SWAPS = (("ASC", "DESC"), ("min", "max"), ("avg", "sum"), ("<", ">"), ("=", "!="), ("AND", "OR"))
"""Words that turn a query into another one."""


def demonstrator(prompts: Prompts) -> Demonstrate:
    """Return what says the right reply to each call: the graph's calls alternate between a query and its check.

    Some first queries are wrong and not learned; their check refuses them, and the rewrite is the gold query.
    """

    def demonstrate(task: Task, call: Call) -> Reply:
        gold = gold_of(task)
        if call.turn % 2:
            right = call.replies[-1].content == written(gold, prompts)
            return Reply(content=prompts.correct if right else prompts.incorrect)
        wrong = mistaken(gold, call.rng) if call.turn == 0 and call.rng.random() < WRONG else gold
        return Reply(content=written(wrong, prompts), learn=wrong == gold)

    return demonstrate


def written(query: str, prompts: Prompts) -> str:
    """Return a query as the prompts want it in a reply."""
    return f"```sql\n{query}\n```" if prompts.fenced else query


def mistaken(query: str, rng: Random) -> str:
    """Return a query with one word changed, or one that ends too early where no word can be changed."""
    found = []
    for pair in SWAPS:
        for old, new in (pair, pair[::-1]):
            word = rf"\b{old}\b" if old.isalpha() else rf"(?<![<>=!]){re.escape(old)}(?![<>=])"
            changed = re.sub(word, new, query, count=1, flags=re.IGNORECASE)
            if changed != query:
                found.append(changed)
    return rng.choice(found) if found else query.rpartition(" ")[0]
