"""The two-role agent of the page "Train one role of an agent that uses several models": its ledger, and a training."""

from __future__ import annotations

import gc
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from agentrig_agent_match import AgentMatch, AgentMatchConfig
from pages import ROOT, blocks
from rollouts import rollout

from agentrig import Endpoint
from agentrig.gateway.process import Gateway
from agentrig.gateway.settings import GatewaySettings
from agentrig.ledger import Ledger
from agentrig.plan import resolve
from agentrig.pools import Job
from agentrig.run.training import train
from agentrig.runners.attempt import run_agent
from agentrig.runners.jobs import AgentPlan
from agentrig.testing.databases import one_table_database
from agentrig.testing.scripted import scripted_server

PAGE = ROOT / "docs" / "how-to" / "several-models.md"
KEY = "key-of-the-planner"


@pytest.fixture(autouse=True)
def _connections_end() -> Iterator[None]:
    """End the connections that the agent keeps until its process ends."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def written(folder: Path) -> str:
    (text,) = (b.text for b in blocks() if b.page == PAGE and b.language == "python")
    (folder / "two_roles.py").write_text(text)
    return str(folder / "two_roles.py")


@pytest.mark.parametrize(
    ("planner_is", "match", "trained", "dropped"),
    [
        ("fixed", "^coder$", 1, {"other-server": 1}),
        ("policy", "^coder$", 1, {"unmatched-model": 1}),
        ("policy", "", 2, {}),
    ],
)
def test_the_ledger_counts_each_role(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planner_is: str, match: str, trained: int, dropped: Any
) -> None:
    monkeypatch.setenv("PLANNER_KEY", KEY)
    agent = AgentPlan(name="two-roles", config={}, files=[written(tmp_path)]).build()
    with scripted_server("SELECT 1") as policy, scripted_server("animal", model="large-1") as large:
        fixed = {"base_url": large.url, "model": "large-1", "api_key_env": "PLANNER_KEY"}
        models = {"coder": "policy", "planner": fixed if planner_is == "fixed" else "policy"}
        with Gateway(GatewaySettings(models=models)) as gateway:
            endpoint = Endpoint(base_url=policy.url, model=policy.model, token_ids=True, gateway=gateway.address)
            question = {"question": "how heavy?", "database": str(one_table_database(tmp_path))}
            result = run_agent(agent, Job(id="r", input=question, endpoint=endpoint))
        assert len(large.requests) == (1 if planner_is == "fixed" else 0)
    assert result.outcome.answer == "SELECT 1", result.outcome.message
    adapter = AgentMatch(AgentMatchConfig(match="", model=match))
    ledger = Ledger(adapter, adapter_name="agent-match", algorithm_name="own")
    ledger.record([rollout(trace=result.trace, triplets=adapter(result.trace))], step=1)
    books = ledger.close(None, step=1)
    assert books.wrong == ""
    assert books.calls["recorded"] == 2
    assert (books.calls["handed_over"], dict(books.calls["dropped"])) == (trained, dropped)


@pytest.mark.slow
def test_the_coder_is_trained_and_the_fixed_planner_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANNER_KEY", KEY)
    with scripted_server("I do not know.", model="large-1") as planner:
        settings = [
            *("algorithm.steps=1", "algorithm.tasks_per_step=8", "algorithm.group_size=4", "hardware.use=cpu"),
            *("run.validation_tasks=1", "run.report_tasks=1", "algorithm.validate_every=0", 'run.block=["report"]'),
            *(f"run.directory={tmp_path}", "run.name=roles", "runners.n=1", "server.use=embedded", "adapter.match="),
            *("gateway.models.coder=policy", f"gateway.models.planner.base_url={planner.url}", "adapter.model=^coder$"),
            *("gateway.models.planner.model=large-1", "gateway.models.planner.api_key_env=PLANNER_KEY"),
        ]
        train(resolve("mini", overrides=settings, uses={"agent": "two-roles"}, files=[written(tmp_path)]))
        asked = len(planner.requests)
        keys = {r.headers["authorization"] for r in planner.requests}
    run = tmp_path / "roles"
    (line,) = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    calls: dict[str, Any] = line["calls"]
    assert (calls["recorded"], calls["dropped"].pop("other-server")) == (64, 32)
    assert calls["trained"] + sum(calls["dropped"].values()) == 32
    assert calls["trained"] > 0
    assert (keys, asked >= 32) == ({f"Bearer {KEY}"}, True)
    files = [f for f in run.rglob("*") if f.is_file()]
    assert not [f for f in files if KEY.encode() in f.read_bytes()]
    assert pq.read_table(next((run / "rollouts").rglob("*.parquet"))).num_rows
