"""The agent demonstrates itself: `agentrig warmup mini` learns right queries, right checks and rewrites."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from agentrig_langgraph_sql.demonstrations import mistaken
from agentrig_langgraph_sql.prompts import SHORT

from agentrig.plan import resolve
from agentrig.run.warmup import choose_labels, demonstrate


@pytest.mark.slow
def test_queries_checks_and_rewrites_are_demonstrated(tmp_path, monkeypatch):
    monkeypatch.setenv("AGENTRIG_CACHE", str(tmp_path))
    plan = resolve("mini", overrides=["runners.n=1"])
    labels = choose_labels(plan, 16, seed=0).tasks
    found = demonstrate(plan, labels)
    assert found.rejected == []
    golds = {task.private["gold"] for task in labels}
    kinds: Counter[str] = Counter()
    for turn in found.turns:
        prompt, reply = turn.messages[-1]["content"], turn.reply.content
        if prompt.startswith("check\n"):
            kinds[reply] += 1
            assert (prompt.split("\n")[2] in golds) == (reply == SHORT.correct)
        else:
            kinds["query"] += 1
            assert reply in golds
    assert kinds["query"] == 16, "each right query is learned once: as a first one, or as a rewrite"
    assert kinds[SHORT.incorrect] > 2
    assert kinds[SHORT.correct] + kinds[SHORT.incorrect] >= 16


@pytest.mark.parametrize("query", ["SELECT max(a) FROM t", "SELECT a FROM t WHERE b >= 3", "SELECT a FROM t"])
def test_a_mistake_is_another_query(query):
    assert mistaken(query, Random(0)) != query
