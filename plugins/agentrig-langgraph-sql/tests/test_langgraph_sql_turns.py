"""Each query of a rollout is scored, so that a turn that repaired the query and one that broke it are told apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from agentrig_langgraph_sql.agent import register_agents
from agentrig_spider.rewards.specs import specs

from agentrig import Endpoint, Task
from agentrig.correctness import turn_of
from agentrig.pools import Job
from agentrig.runners.attempt import run_agent
from agentrig.runners.scorer import Scorer
from agentrig.testing.scripted import Reply, ScriptedServer, serving

RIGHT, WRONG = "SELECT name FROM animal", "SELECT id FROM animal"
NO, YES = f"Better:\n```sql\n{RIGHT}\n```\nVERDICT: INCORRECT", "VERDICT: CORRECT"


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
    reward = {spec.name: spec for spec in specs()}[name]
    assert reward.sees_trace
    scorer = Scorer(reward.build(reward.config()), budget_s=5, sees_trace=True)
    (score,) = scorer([(task, result.outcome, result.trace)])
    assert (score.status, score.value, list(score.calls)) == ("ok", values[-2], values)
    assert turn_of(score.calls) == turn
