"""The service of examples/ answers, calls back, and runs a rollout once, as the page "Your existing agent" says."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import attrs
import httpx
import pytest
import uvicorn
from pages import ROOT

from agentrig import Endpoint
from agentrig.external.callbacks import Callback
from agentrig.external.config import HttpConfig
from agentrig.external.http import Exchange, HttpAgent, request_of
from agentrig.pools import Job
from agentrig.runners.attempt import run_agent
from agentrig.secrets import Secret
from agentrig.testing.scripted import Reply, ScriptedServer, scripted_server

PAGE = ROOT / "docs" / "how-to" / "existing-agent.md"
SERVICE = ROOT / "examples" / "agent_service.py"


@pytest.fixture(scope="module")
def service() -> Iterator[str]:
    module = ModuleType("agent_service")
    exec(compile(SERVICE.read_text("utf-8"), str(SERVICE), "exec"), module.__dict__)
    module.KEY = "service-key"
    server = uvicorn.Server(uvicorn.Config(module.app, port=0, log_config=None, lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        thread.join(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


@pytest.fixture
def model() -> Iterator[ScriptedServer]:
    with scripted_server(lambda body: body["messages"][0]["content"].upper()) as server:
        yield server


def job_of(model: ScriptedServer, name: str) -> Job:
    endpoint = Endpoint(base_url=model.url, model=model.model, api_key="k", sampling={"top_p": 0.5}, headers={"x": "1"})
    return Job(id=name, input={"question": "how many?"}, endpoint=endpoint)


@pytest.mark.parametrize("path", ["solve", "begin"])
def test_it_answers_with_the_rollouts_model(service: str, model: ScriptedServer, path: str) -> None:
    agent = HttpAgent(HttpConfig(url=f"{service}/{path}", api_key=Secret("service-key"), timeout_s=20))
    job = job_of(model, f"a {path}")
    outcome = run_agent(agent, job).outcome
    assert (outcome.failure, outcome.answer) == (None, "HOW MANY?"), outcome.message
    (request,) = model.requests
    assert request.body == {
        "model": model.model, "messages": [{"role": "user", "content": "how many?"}], "top_p": 0.5,
    }  # fmt: skip
    sent = {name: request.headers[name] for name in ("authorization", "agentrig-span", "x")}
    assert sent == {"authorization": "Bearer k", "agentrig-span": "write_query", "x": "1"}
    assert run_agent(agent, job).outcome.answer == "HOW MANY?"
    assert len(model.requests) == 1, "the same attempt is run once"
    run_agent(agent, attrs.evolve(job, attempt=2))
    assert len(model.requests) == 2


def test_a_wrong_key_and_a_failing_model_are_failures(service: str, model: ScriptedServer) -> None:
    wrong = HttpConfig(url=f"{service}/solve", api_key=Secret("another-key"))
    assert run_agent(HttpAgent(wrong), job_of(model, "b")).outcome.failure == "service-error"
    model.script = Reply(status=500, text="the model is gone")
    right = HttpConfig(url=f"{service}/solve", api_key=Secret("service-key"))
    outcome = run_agent(HttpAgent(right), job_of(model, "c")).outcome
    assert (outcome.failure, "the model is gone" in outcome.message) == ("llm-error", True)


def rows_of(heading: str) -> list[list[str]]:
    section = re.split(r"\n##+ ", PAGE.read_text("utf-8").split(f"\n### {heading}\n")[1])[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]


def test_the_page_has_every_key_and_every_kind(model: ScriptedServer) -> None:
    listed = {name for row in rows_of("What the service gets") for name in re.findall(r"`(\w+)`", row[0])}
    with Callback("x") as callback:
        sent: dict[str, Any] = request_of(job_of(model, "x"), callback, timeout_s=1.0)
    assert listed == set(sent)
    kinds = {name for row in rows_of("Failures of a service") for name in re.findall(r"`([\w-]+)`", row[-1])}
    assert kinds == set(re.findall(r"- `([\w-]+)`:", Exchange.__doc__ or ""))


def test_a_second_answer_gets_the_statuses_of_the_page() -> None:
    with Callback("x") as callback:
        headers = {"Authorization": f"Bearer {callback.key}"}
        statuses = [httpx.post(callback.url, json={"answer": n}, headers=headers).status_code for n in (1, 1, 2)]
    after = [httpx.post(callback.url, json={"answer": n}, headers=headers).status_code for n in (1, 2)]
    with Callback("y") as unanswered:
        headers = {"Authorization": f"Bearer {unanswered.key}"}
    late = httpx.post(unanswered.url, json={"answer": 1}, headers=headers).status_code
    assert [*statuses, *after, late] == [200, 200, 409, 200, 409, 410]
    text = " ".join(PAGE.read_text("utf-8").split())
    assert "The same answer again gets 200, also when the rollout has ended; another one gets 409." in text
    assert "If there was no answer until the rollout's end, the address answers 410." in text
