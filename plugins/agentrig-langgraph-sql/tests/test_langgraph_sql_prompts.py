"""A run improves the prompts of the reference agent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from agentrig_langgraph_sql.prompts import FULL
from prompted_model import Model, settings

from agentrig.plan import resolve
from agentrig.run.training import train
from agentrig.testing.scripted import serving


def answers(said: str) -> str:
    """Write a query with a limit if the prompt says so; accept every query."""
    if said.startswith("You review"):
        return FULL.correct
    return f"```sql\nSELECT 1{' LIMIT 7' if 'SEVEN' in said else ''}\n```"


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["gepa", "apo"])
def test_a_run_improves_the_prompt_that_its_reward_depends_on(tmp_path: Path, algorithm: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text("")
    uses = ["tasks.use=mini-sql", "agent.use=langgraph-sql", "reward.use=limit", "agent.prompts=full"]
    small = ["run.report_tasks=4", "run.validation_tasks=4", "algorithm.max_calls=80"]
    with serving(Model()) as model:
        model.answers = answers
        summary = train(resolve(str(file), overrides=[*settings(model.url, tmp_path, algorithm), *uses, *small]))
    assert (summary["accuracy"]["before"], summary["accuracy"]["after"]) == (0.0, 1.0)
    found = json.loads((tmp_path / "run" / "prompts.json").read_text())["prompts"]
    assert list(found) == ["write", "check", "rewrite"]
    assert found["write"] == f"{FULL.instructions()['write']} For queries: SEVEN."
