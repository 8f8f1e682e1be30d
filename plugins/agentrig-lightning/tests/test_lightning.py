"""Code for Agent Lightning 0.3 works unchanged: agents, tracers, adapters and algorithms."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lightning_runs import SITECUSTOMIZE
from model_server import ModelServer, model_server

SUPPORT = Path(__file__).parents[3] / "tests" / "support"


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, toy_file: str) -> tuple[dict[str, Any], Path]:
    """The results of one run of everything, in a separate process that records attempts to use the network."""
    folder = tmp_path_factory.mktemp("lightning")
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(SITECUSTOMIZE)
    path = os.pathsep.join([str(folder / "site"), os.environ.get("PYTHONPATH", "")])
    keep = {k: v for k, v in os.environ.items() if k not in ("LITELLM_LOCAL_MODEL_COST_MAP", "AGENTOPS_TELEMETRY")}
    with model_server() as server:
        done = subprocess.run(
            [sys.executable, str(SUPPORT / "lightning_runs.py"), str(folder), server.url, toy_file],
            env={**keep, "PYTHONPATH": path, "AGENTRIG_TEST_NETWORK_LOG": str(folder / "network.log")},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=240,
        )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found, folder


@pytest.mark.slow
def test_no_network_is_used_no_litellm_imported_and_no_log_left(ran: tuple[dict[str, Any], Path]) -> None:
    log = (ran[1] / "network.log").read_text()
    hosts = {line.split()[1] for line in log.splitlines() if line.startswith("socket.")}
    assert hosts == {"192.0.2.1"}, log  # the one that the agent `lit-fails` tries, to show that it would be seen
    assert ran[0]["litellm"] == []
    assert [f.name for f in ran[1].glob("*.log")] == ["network.log"]


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["lit", "lit-async", "lit-emits"])
def test_an_unchanged_agent(ran: tuple[dict[str, Any], Path], agent: str) -> None:
    rollouts = ran[0][agent]
    assert [r["message"] for r in rollouts if r["failure"]] == []
    assert [r["value"] for r in rollouts] == [float(r["number"] % 2) for r in rollouts]
    for r in rollouts:
        assert r["calls"] == 1
        (triplet,) = r["triplets"]
        assert triplet["prompt"].endswith(f"Is {r['number']} odd?")
        assert triplet["response"] == "odd"
        assert triplet["logprobs"] == [-0.25] * 3
        assert triplet["reward"] == r["value"]


@pytest.mark.slow
def test_an_agent_that_raises_is_a_typed_failure(ran: tuple[dict[str, Any], Path]) -> None:
    assert {r["failure"] for r in ran[0]["lit-fails"]} == {"agent-error"}
    assert "no such column" in ran[0]["lit-fails"][0]["message"]


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["lit-agentops", "lit-agentops-async"])
def test_their_agentops_tracer(ran: tuple[dict[str, Any], Path], agent: str) -> None:
    rollouts = ran[0][agent]
    assert [r["message"] for r in rollouts if r["failure"]] == []
    assert [r["value"] for r in rollouts] == [float(r["number"] % 2) for r in rollouts]
    for r in rollouts:
        assert r["calls"] == 1, r["names"]  # recorded by their tracer alone, and once
        assert r["orphans"] == 0
        assert r["roots"] == 1
        assert r["temperatures"] == [0.5]  # one of them passes no sampling: the tap adds the run's
        (triplet,) = r["triplets"]
        assert triplet["prompt"].endswith(f"Is {r['number']} odd?")
        assert (triplet["response"], triplet["logprobs"]) == ("odd", [-0.25] * 3)


@pytest.mark.slow
def test_their_opentelemetry_tracer(ran: tuple[dict[str, Any], Path]) -> None:
    rollouts = ran[0]["lit-otel"]
    assert [r["message"] for r in rollouts if r["failure"]] == []
    assert [r["value"] for r in rollouts] == [float(r["number"] % 2) for r in rollouts]
    assert all(r["calls"] == 0 for r in rollouts)  # that tracer sees no calls; the run would stop and say so
    assert all(any("annotation" in n or "reward" in n for n in r["names"]) for r in rollouts)


@pytest.mark.slow
def test_their_adapter(ran: tuple[dict[str, Any], Path]) -> None:
    for r in ran[0]["lit-triplets"]:
        (triplet,) = r["triplets"]
        assert triplet["node"] == "write_query"
        assert (triplet["response"], triplet["logprobs"], triplet["reward"]) == ("odd", [-0.25] * 3, r["value"])
    assert all(len(r["triplets"]) == 1 for r in ran[0]["lit-all"])


@pytest.mark.slow
def test_their_algorithm(ran: tuple[dict[str, Any], Path]) -> None:
    rows = json.loads((ran[1] / "lit-sweep.json").read_text())
    assert sorted(r["number"] for r in rows) == list(range(6))
    for row in rows:
        right = float(row["number"] % 2)
        assert row["status"] == "succeeded"
        assert row["reward"] == right
        assert "openai.chat.completion" in row["names"]
        (triplet,) = row["triplets"]
        assert bytes(triplet["prompt"]).decode().startswith(f"Is {row['number']} odd?")
        assert bytes(triplet["response"]) == b"odd"
        assert triplet["reward"] == right
    summary = ran[0]["lit-sweep"]
    assert (summary["steps"], summary["train_rollouts"], summary["failures"]) == (1, 6, {})
    run = ran[1] / "runs" / "lit-sweep"
    (line,) = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    assert (line["reward"], line["nodes"]["trained"]) == (0.5, {"write_query": 6})
    assert (line["calls"]["handed_over"], line["calls"]["dropped"]) == (6, {})
    assert (run / "rollouts" / "train-00001.parquet").is_file()


@pytest.mark.slow
def test_their_synchronous_algorithm(ran: tuple[dict[str, Any], Path]) -> None:
    assert ran[0]["lit-waiting"]["train_rollouts"] == 1


@pytest.mark.slow
def test_an_algorithm_gets_the_adapter_that_its_script_names(ran: tuple[dict[str, Any], Path]) -> None:
    (conversation,) = json.loads((ran[1] / "lit-waiting.json").read_text())
    user, assistant = conversation["messages"]
    assert (user["role"], assistant) == ("user", {"role": "assistant", "content": "odd"})
    assert user["content"].startswith("Is ")


def test_an_algorithm_gets_an_adapter_of_theirs_as_it_is() -> None:
    import agentrig_lightning as lightning
    from agentlightning import TracerTraceToTriplet
    from agentrig_lightning.adapters import trace_adapter

    theirs = TracerTraceToTriplet()
    spec = lightning.adapter(lambda: theirs, name="theirs", summary="Theirs.")
    assert trace_adapter(spec.build(spec.config())) is theirs


@pytest.mark.slow
def test_a_function_is_an_algorithm_and_gets_no_dataset(ran: tuple[dict[str, Any], Path]) -> None:
    """It takes the store and the user's resources; its agent, a function too, gets the resources that it stores."""
    rows = json.loads((ran[1] / "lit-first.json").read_text())
    assert rows == [
        ["train", "{number}", 0.0, "succeeded", ["main_llm"]],
        ["train", "Is {number} odd?", 0.5, "succeeded", ["main_llm"]],
        ["val", "{number}", 0.0, "succeeded", ["main_llm"]],
        ["val", "Is {number} odd?", 0.25, "succeeded", ["main_llm"]],
    ]
    assert ran[0]["lit-first"]["failures"] == {}


def test_an_adapter_is_not_shown_an_empty_trace(model: ModelServer) -> None:
    import agentrig_lightning as lightning
    from agentlightning import TracerTraceToTriplet

    from agentrig import Trace

    spec = lightning.adapter(TracerTraceToTriplet, name="theirs", summary="Theirs.")
    assert spec.build(spec.config())(Trace(rollout_id="r")) == ()
