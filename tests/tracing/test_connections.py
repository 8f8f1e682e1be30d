"""Calls through other libraries than httpx: named by `dev` and `train`, with what to do."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import httpx
import pytest
from click.testing import CliRunner
from embedded_servers import embedded
from model_server import ModelServer
from rollouts import rollout

from agentrig import Endpoint, Task
from agentrig.cli.entry import main
from agentrig.errors import RunStopped
from agentrig.plan import Plan, resolve
from agentrig.pools import Job
from agentrig.run.evaluate import evaluate
from agentrig.run.guards import check_failures, unseen_calls
from agentrig.run.training import train
from agentrig.runners.attempt import run_agent
from agentrig.testing.scripted import scripted_server
from agentrig.traces import MISSED
from agentrig.tracing.recording import recording

BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "?"}]}).encode()

AGENT = """
import {library}
from agentrig import AgentSpec, hookimpl

def ask(task_input, endpoint):
    url = f"{{endpoint.base_url}}/chat/completions"
    body = {{"model": endpoint.model, "messages": [{{"role": "user", "content": "?"}}], **endpoint.sampling}}
    return {call}.json()["choices"][0]["message"]["content"]

@hookimpl
def register_agents():
    yield AgentSpec(name="asker", summary="Asks.", build=lambda config: ask)
"""


def by_requests(url: str) -> None:
    import requests

    assert requests.post(url, data=BODY, timeout=20).ok


def by_urllib3(url: str) -> None:
    import urllib3

    with urllib3.PoolManager() as pool:
        assert pool.request("POST", url, body=BODY).status == 200


def by_urllib(url: str) -> None:
    with urllib.request.urlopen(urllib.request.Request(url, data=BODY), timeout=20) as reply:
        assert reply.status == 200


def by_aiohttp(url: str) -> None:
    import aiohttp

    async def ask() -> None:
        async with aiohttp.ClientSession() as session, session.post(url, data=BODY) as reply:
            assert reply.status == 200

    asyncio.run(ask())


def by_httpx(url: str) -> None:
    assert httpx.post(url, content=BODY).status_code == 200


def by_asynchronous_openai(url: str) -> None:
    """Its connection is opened by a task of its own, whose stack has no frame of httpx."""
    import openai

    async def ask() -> None:
        async with openai.AsyncOpenAI(base_url=url.removesuffix("/chat/completions"), api_key="x") as client:
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "?"}])

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("call", "seen"),
    [
        (by_requests, {"requests": 1}),
        (by_urllib3, {"urllib3": 1}),
        (by_urllib, {"urllib": 1}),
        (by_aiohttp, {"aiohttp": 1}),
        (by_httpx, {}),
        (by_asynchronous_openai, {}),
    ],
)
@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
def test_connections_to_the_models_server_are_counted(
    model: ModelServer, call: Callable[[str], None], seen: dict[str, int], name: str
) -> None:
    url = model.url.replace("127.0.0.1", name)
    with recording("r", token_ids=True, base_url=url) as recorder:
        call(f"{url}/chat/completions")
    trace = recorder.trace()
    assert trace.spans[0].attributes.get(MISSED, {}) == seen
    assert len(trace.llm_calls()) == (0 if seen else 1)
    with recording("r", token_ids=True, base_url="http://127.0.0.1:9/v1") as other:  # a tool's server, say
        call(f"{url}/chat/completions")
    assert MISSED not in other.trace().spans[0].attributes


@pytest.fixture
def words(model: ModelServer, tmp_path: Path, toy_file: str) -> Callable[[str, str], list[str]]:
    """Return the arguments of a command whose agent uses a library."""

    def make(library: str, call: str) -> list[str]:
        file = tmp_path / "asker.py"
        file.write_text(AGENT.format(library=library, call=call))
        return [toy_file, str(file)]

    return make


def test_dev_and_train_report_missed_calls(
    model: ModelServer, tmp_path: Path, words: Callable[[str, str], list[str]]
) -> None:
    files = words("requests", "requests.post(url, json=body, timeout=20)")
    told = "calls to the model's server were made by requests"
    plugins = [w for f in files for w in ("--plugin", f)]
    found = CliRunner().invoke(main, ["dev", "toy", *plugins, "--agent", "asker", "--endpoint", model.url])
    said = (f"{told} (3)" in found.stderr, "Set gateway.use=on" in found.stderr)
    assert (found.exit_code, *said) == (0, True, True)
    own = [f"algorithm.endpoint={model.url}", f"run.directory={tmp_path}/runs", "algorithm.report=false"]
    plan: Plan = resolve("toy", overrides=own, uses={"agent": "asker"}, files=files)
    with pytest.raises(RunStopped, match=rf"gave no transitions(.|\n)*{told} \(12\)"):
        train(plan)


FORKS = """(
    key := {"Authorization": f"Bearer {endpoint.api_key}", **endpoint.headers},
    httpx.post(url, json=body, headers=key),
    child := os.fork(),
    child or (httpx.post(url, json=body, headers=key), os._exit(0)),
    os.waitpid(child, 0),
    httpx.post(url, json=body),
)[-1]"""


def test_calls_of_another_process_are_counted(
    tiny_model: Path, tmp_path: Path, words: Callable[[str, str], list[str]]
) -> None:
    files = words("os, httpx", FORKS)
    plan = resolve("toy", uses={"agent": "asker"}, files=files, overrides=[f"run.directory={tmp_path}"])
    with embedded(tiny_model, slots=4, max_length=64) as server:
        sampled = [endpoint.with_sampling(max_tokens=2) for endpoint in server.endpoints]
        for n in (2, 1):  # what came before is not counted again
            tasks = [Task(id=f"t{i}", input={"number": i}, private={"parity": "odd"}) for i in range(n)]
            found = evaluate(plan, tasks=tasks, endpoint=sampled, mode="dev", keep=True)
            calls = sum(len(r.trace.llm_calls()) for r in found.rollouts)
            assert (found.failures, calls, found.unrecorded) == ({}, 2 * n, n)
    assert "1 call to the model's server came from another process" in unseen_calls(found.rollouts, unrecorded=1)


@pytest.mark.slow
def test_a_run_that_misses_some_of_its_calls_is_warned(
    model: ModelServer,
    tmp_path: Path,
    words: Callable[[str, str], list[str]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    files = words("requests, httpx", "(requests.post(url, json=body), httpx.post(url, json=body))[1]")
    own = [f"algorithm.endpoint={model.url}", f"run.directory={tmp_path}/runs", "algorithm.report=false"]
    train(resolve("toy", overrides=[*own, "algorithm.steps=2"], uses={"agent": "asker"}, files=files))
    warned = [r.getMessage() for r in caplog.records if "made by requests (12)" in r.getMessage()]
    assert len(warned) == 1  # once a run


@pytest.mark.parametrize("route", ["completions", "messages", "responses"])
def test_a_call_of_another_api_is_counted_and_the_gateway_is_named(route: str) -> None:
    """Whether the model's server refuses it, as here, or answers it: nothing records its tokens."""

    def agent(task_input: Any, endpoint: Endpoint) -> str:
        httpx.post(f"{endpoint.base_url}/{route}", json={"model": endpoint.model}).raise_for_status()
        return "done"

    with scripted_server("ok") as model:
        result = run_agent(agent, Job(id="r1", input={}, endpoint=model.endpoint()))
    root = result.trace.spans[0]
    assert root.attributes[MISSED] == {f"POST /v1/{route}": 1}
    ended = attrs.evolve(rollout(failure="llm-error", trace=result.trace), outcome=result.outcome)
    with pytest.raises(RunStopped, match=rf"made by POST /v1/{route} \(1\).* Set gateway.use=on"):
        check_failures([ended], 0.25, step=1, mode="train")
