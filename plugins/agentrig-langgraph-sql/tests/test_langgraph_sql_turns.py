"""Each query of a rollout is scored, so that a turn that repaired the query and one that broke it are told apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from agentrig_langgraph_sql import graph
from agentrig_langgraph_sql.agent import register_agents
from agentrig_spider.rewards.specs import specs

import agentrig
from agentrig import Endpoint, Score, Task
from agentrig.adapters import triplet_of
from agentrig.credit import TurnConfig, turn
from agentrig.pools import Job, Result
from agentrig.rewards import given, given_to_calls
from agentrig.rollouts import Rollout
from agentrig.runners.attempt import run_agent
from agentrig.runners.scorer import Scorer
from agentrig.testing.scripted import Reply, ScriptedServer, serving
from agentrig.traces import FEEDBACK

RIGHT, WRONG = "SELECT name FROM animal", "SELECT id FROM animal"
NO, YES = f"Better:\n```sql\n{RIGHT}\n```\nVERDICT: INCORRECT", "VERDICT: CORRECT"


def played(zoo: Path, queries: list[str]) -> tuple[Task, Result]:
    """Run the agent on a model that writes these queries, and is content with the last only."""
    replies = [text for query in queries for text in (f"```sql\n{query}\n```", NO)]
    replies[-1] = YES

    def reply(body: Any) -> Reply:
        return Reply(text=replies.pop(0))

    (agent,) = register_agents()
    task = Task(id="t", input={"question": "Who?", "database": str(zoo)}, private={"gold": RIGHT})
    with serving(ScriptedServer(reply)) as server:
        endpoint = Endpoint(base_url=server.url, model="scripted", sampling={"temperature": 1.0}, token_ids=True)
        result = run_agent(agent.build(agent.config()), Job(id="r", input=task.input, endpoint=endpoint))
    assert result.outcome.answer == queries[-1], result.outcome
    return task, result


@pytest.mark.parametrize("name", ["spider-exec", "spider-exec-strict"])
@pytest.mark.parametrize(
    ("queries", "values", "turn"),
    [
        ([WRONG, RIGHT, WRONG], [0.0, None, 1.0, None, 0.0, None], "broken at turn 3"),
        ([WRONG, "SELECT nothing FROM animal", RIGHT], [0.0, None, 0.0, None, 1.0, None], "repaired at turn 3"),
        ([RIGHT], [1.0, None], "right at turn 1"),
        ([WRONG], [0.0, None], "wrong at every turn"),
    ],
)
def test_each_query_of_a_rollout_is_scored(
    zoo: Path, name: str, queries: list[str], values: list[float | None], turn: str
) -> None:
    """The check quotes a right query, which no node runs, so it is not a turn."""
    task, result = played(zoo, queries)
    reward = {spec.name: spec for spec in specs()}[name]
    assert reward.sees_trace
    scorer = Scorer(reward.build(reward.config()), budget_s=5, sees_trace=True)
    (score,) = scorer([(task, result.outcome, result.trace)])
    assert (score.status, score.value, list(score.calls)) == ("ok", values[-2], values)
    assert score.details["turn"] == turn


def test_only_the_query_that_was_right_gains_by_rewards_that_the_agent_gives(
    zoo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three turns, of which only the second is right; the node that runs a query rewards it, and calls no model."""
    real = graph.run_query

    def run_query(database: str, query: str, **limits: Any) -> Any:
        result = real(database, query, **limits)
        agentrig.reward(float("Tom" in result.text(1000)), feedback=f"{query} was run")
        return result

    monkeypatch.setattr(graph, "run_query", run_query)
    group = []
    for i, queries in enumerate(([WRONG, RIGHT, WRONG], [WRONG] * 3, [WRONG] * 3)):
        task, result = played(zoo, queries)
        triplets = [t for c in result.trace.llm_calls() if (t := triplet_of(c, node="")) is not None]
        assert len(triplets) == 6
        rollout = Rollout(
            id=f"r{i}", task=task, group="g", mode="train", step=1, outcome=result.outcome, score=Score.ok(0.0),
            trace=result.trace, triplets=triplets,
        )  # fmt: skip
        group.append(rollout)
    assert given_to_calls(group[0].trace) == [0.0, None, 1.0, None, 0.0, None]
    assert [span.attributes[FEEDBACK] for span, _ in given(group[0].trace)][1] == f"{RIGHT} was run"
    ((mixed, *others),) = turn([group], TurnConfig())
    assert mixed == [0.0, None, pytest.approx(2 / 3), None, 0.0, None]
    assert others == [[0.0, None, pytest.approx(-1 / 3), None, 0.0, None]] * 2
