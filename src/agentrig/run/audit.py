"""What the auditor reads beside the record: the task set and the reward of a plan, built afresh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agentrig.agents import Outcome
from agentrig.audit.record import Row, Sources
from agentrig.plan import Plan
from agentrig.rewards import Score
from agentrig.run.splits import load_splits
from agentrig.tasks import Task
from agentrig.traces import Span, Trace


def sources_of(plan: Plan) -> Sources:
    """Build a plan's task set and reward for the auditor.

    Raises:
        AgentrigError: One can't be built, or the task set can't be loaded.
    """
    return Sources(splits={role: rows for role, (_, rows) in load_splits(plan).items()}, score=_scoring(plan))


def _scoring(plan: Plan) -> Callable[[Task, Row], Score]:
    reward, sees_trace = plan.reward()
    budget_s, many = plan.run.reward_budget_s, getattr(reward, "score_many", None)

    def score(task: Task, row: Row) -> Score:
        item: tuple[Any, ...] = (task, Outcome(answer=row.answer, own_reward=row.own_reward))
        if sees_trace:
            item = (*item, Trace(rollout_id=row.id, spans=tuple(Span(**span) for span in row.spans)))
        try:
            if many is not None:
                found: Score = many([item], budget_s)[0]
                return found
            return reward(*item[:2], budget_s, *item[2:])  # type: ignore[no-any-return]
        except Exception as error:
            return Score.invalid(f"{type(error).__name__}: {error}")

    return score
