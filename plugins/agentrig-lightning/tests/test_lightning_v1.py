"""Agents of Agent Lightning 1.x run unchanged: variables, events, and the same calls as under its own gateway."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agentrig_lightning.v1.agent import build
from agentrig_lightning.v1.config import LightningV1Config

from agentrig import Endpoint
from agentrig.agents import Outcome
from agentrig.gateway.process import Gateway
from agentrig.gateway.settings import GatewaySettings
from agentrig.pools import Job
from agentrig.runners.attempt import run_agent
from agentrig.testing.scripted import ScriptedServer, scripted_server

THEIRS = os.environ.get("AGENTRIG_AGENT_LIGHTNING_1", "")
"""A Python that has agentlightning 1.x: `python3.12 -m venv V; V/bin/pip install agentlightning==1.0.2`."""

AGENT = """
import json, os, httpx

KEY = {"Authorization": "Bearer " + os.environ.get("AGL_KEY", "")}

def ask(text):
    body = {"model": "auto", "messages": [{"role": "user", "content": text}], "max_tokens": 9}
    url = os.environ["AGL_OPENAI_BASE_URL"] + "/chat/completions"
    reply = httpx.post(url, json=body, headers=KEY, timeout=20)
    reply.raise_for_status()
    return reply.json()["choices"][0]["message"]["content"]

def post(kind, data):
    url = os.environ["AGL_EVENT_URL"]
    httpx.post(url, json={"event_type": kind, "data": data}, headers=KEY, timeout=20).raise_for_status()

class Agent:
    async def run(self):
        said = ask(os.environ["QUESTION"]) + ask(os.environ["HINT"] + os.environ["MORE"])
        post("reward", {"value": 0.25})
        post("agent_output", {"answer": said})
        post("reward", {"value": 1.0 if said == os.environ["ANSWER"] else 0.0})

class Plain:
    def run(self):
        what = os.environ["QUESTION"]
        if what == "raise":
            raise ValueError("no idea")
        if what == "nonsense":
            assert httpx.post(os.environ["AGL_EVENT_URL"], json={"value": 1}, headers=KEY).status_code == 400
        if what == "other key":
            url = os.environ["AGL_EVENT_URL"]
            assert httpx.post(url, json={"event_type": "reward", "data": {"value": 1}}).status_code == 401
"""
ENV_MAP = {"QUESTION": "input.question", "ANSWER": "input.gold.text", "MORE": "input.more", "HINT": "think: "}
TASK = {"question": "how many?", "gold": {"text": "okok"}, "more": {"é": [1, 2]}}


@pytest.fixture
def model() -> Iterator[ScriptedServer]:
    with scripted_server("ok") as server:
        yield server


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    with Gateway(GatewaySettings(models={"auto": "policy"})) as running:
        yield running


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "their_agent.py").write_text(AGENT)
    return tmp_path


def ran(gateway: Gateway, model: ScriptedServer, task: Any, **keys: Any) -> Any:
    endpoint = Endpoint(base_url=model.url, model=model.model, token_ids=True, gateway=gateway.address)
    job = Job(id="r", input=task, endpoint=endpoint, prompts={"hint": "think: "})
    return run_agent(build(LightningV1Config(**keys)), job)


@pytest.mark.parametrize("hint", ["think: ", "input.prompts.hint"])
def test_a_class_gets_its_variables_and_its_last_reward_counts(
    gateway: Gateway, model: ScriptedServer, folder: Path, hint: str
) -> None:
    env_map = {**ENV_MAP, "HINT": hint}
    result = ran(gateway, model, TASK, agent_class="their_agent.Agent", folder=str(folder), env_map=env_map)
    assert result.outcome == Outcome(own_reward=1.0), result.outcome
    calls = result.trace.llm_calls()
    assert [c.attributes["request"]["model"] for c in calls] == ["auto", "auto"]
    assert all(c.attributes["response_token_ids"] for c in calls)
    assert sorted(b["messages"][0]["content"] for b in model.bodies()) == [
        "how many?", 'think: {"é": [1, 2]}',
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("question", "kind", "words"),
    [
        ("raise", "agent-error", "no idea"),
        ("nothing", "no-answer", "it posted nothing to AGL_EVENT_URL"),
        ("nonsense", "bad-answer", "was refused: an event is"),
        ("other key", "no-answer", "was refused: this address asks for its own key"),
    ],
)
def test_what_goes_wrong_is_a_typed_failure_and_no_reward_of_zero(
    gateway: Gateway, model: ScriptedServer, folder: Path, question: str, kind: str, words: str
) -> None:
    task = {"question": question}
    keys: dict[str, Any] = {"folder": str(folder), "env_map": {"QUESTION": "input.question"}}
    outcome = ran(gateway, model, task, agent_class="their_agent:Plain", **keys).outcome
    assert (outcome.failure, outcome.own_reward) == (kind, None), outcome.message
    assert words in outcome.message


def test_one_of_class_and_command_is_named() -> None:
    with pytest.raises(ValueError, match="name one of"):
        LightningV1Config()


THEIR_RUN = """
import asyncio, json, sys, threading, time
import httpx, uvicorn
from omegaconf import OmegaConf
from agentlightning.client import AgentLightningAsyncClient
from agentlightning.controller.local_reconciler import LocalReconciler
from agentlightning.server.app import create_app

model, task, env_map = json.loads(sys.argv[1])
proxy = {"model_name": "scripted", "train": {"temperature": 1}, "val": {"temperature": 1}}
server = uvicorn.Server(uvicorn.Config(create_app({"key": "k", "default_proxy": proxy}), port=0, log_level="error"))
threading.Thread(target=server.run, daemon=True).start()
while not server.started:
    time.sleep(0.01)
url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
api = httpx.Client(base_url=url, headers={"Authorization": "Bearer k"})
api.post("/api/models", json=[{"model": "scripted", "endpoint": model}]).raise_for_status()
local = {"agent_class": "their_agent.Agent", "env_map": env_map}
api.post("/api/rollouts", json=[{"rollout_id": "r", "input": task, "config": {"local": local}}]).raise_for_status()

async def work():
    config = {"runner_type": "local", "agl_server": {"url": url, "agent_url": None, "key": "k"}}
    config["local_runner"] = {"maximum_size": 1, "poll_interval": 0.1}
    async with AgentLightningAsyncClient(base_url=url, key="k") as client:
        reconciler = LocalReconciler(api=client, config=OmegaConf.create(config))
        running = asyncio.create_task(reconciler.run())
        while True:
            found = (await client.get("/api/rollouts/r")).json()["rollout"]["status"]["state"]
            if found in ("succeeded", "failed"):
                break
            await asyncio.sleep(0.1)
        reconciler.stop()
        await running
    return found

state = asyncio.run(work())
events = api.get("/api/rollouts/r/events").json()
rewards = [e["data"]["value"] for e in events if e["event_type"] == "reward"]
calls = [e["data"]["response"] for e in events if e["event_type"] == "model_request"]
ids = [[c["prompt_token_ids"], c["choices"][0]["token_ids"]] for c in calls]
print(json.dumps({"state": state, "reward": rewards[-1], "ids": ids}))
"""


@pytest.mark.skipif(not THEIRS, reason="AGENTRIG_AGENT_LIGHTNING_1 names no Python with agentlightning 1.x")
def test_an_agent_does_the_same_under_the_installed_agent_lightning(
    gateway: Gateway, model: ScriptedServer, folder: Path
) -> None:
    asked = json.dumps([model.url, TASK, ENV_MAP])
    done = subprocess.run(
        [THEIRS, "-c", THEIR_RUN, asked], cwd=folder, env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = json.loads(done.stdout.splitlines()[-1])
    their_calls = [b["messages"] for b in model.bodies()]
    model.requests.clear()
    keys: dict[str, Any] = {"folder": str(folder), "env_map": ENV_MAP, "python": THEIRS}
    result = ran(gateway, model, TASK, agent_class="their_agent.Agent", **keys)
    assert result.outcome.failure is None, result.outcome.message
    ours = [[c.attributes["prompt_token_ids"], c.attributes["response_token_ids"]] for c in result.trace.llm_calls()]
    assert (theirs["state"], theirs["reward"]) == ("succeeded", result.outcome.own_reward)
    assert [b["messages"] for b in model.bodies()] == their_calls
    assert ours == theirs["ids"]
