"""The run's key is sent with calls to the run's own server, whatever key the agent's client has, and nowhere else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from agentrig.endpoints import Endpoint
from agentrig.pools import Job
from agentrig.runners.attempt import run_agent
from agentrig.testing.scripted import LocalServer, QuietHandler, ScriptedServer, scripted_server, serving
from agentrig.tracing.recording import recording

openai = pytest.importorskip("openai")

KEY = "the-runs-own-key"
MESSAGES = [{"role": "user", "content": "Is 3 odd?"}]


class HeaderServer(LocalServer):
    """Keeps the headers of every request; redirects if it has a target.

    Attributes:
        seen: The headers of each request, names in lower case.
        target: Where it redirects to; '' for an answer of its own.
    """

    def __init__(self) -> None:
        super().__init__(_Headers)
        self.seen: list[dict[str, str]] = []
        self.target = ""


class _Headers(QuietHandler):
    server: HeaderServer

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        self.server.seen.append({name.lower(): value for name, value in self.headers.items()})
        target = self.server.target
        self.reply(307 if target else 200, {}, {"location": target} if target else {})

    do_POST = do_GET


@pytest.fixture
def run_server() -> Iterator[ScriptedServer]:
    """The run's server: it refuses every other key."""
    with scripted_server("odd", key=KEY) as server:
        yield server


@pytest.fixture
def foreign() -> Iterator[HeaderServer]:
    with serving(HeaderServer()) as server:
        yield server


def rollout(endpoint: Endpoint, agent: Callable[[], Any]) -> None:
    """Run an agent as a runner does."""
    result = run_agent(lambda task_input, endpoint: str(agent()), Job(id="r1", input={}, endpoint=endpoint))
    assert result.outcome.failure is None, result.outcome.message


def said(url: str, **options: Any) -> str:
    """Ask as LitSQLAgent does: with a key that is none."""
    with openai.OpenAI(base_url=url, api_key="dummy", max_retries=0) as client:
        reply = client.chat.completions.create(model="m", messages=MESSAGES, **options)
        if options.get("stream"):
            return "".join(event.choices[0].delta.content or "" for event in reply if event.choices)
        return str(reply.choices[0].message.content)


async def said_async(url: str) -> str:
    async with openai.AsyncOpenAI(base_url=url, api_key="dummy", max_retries=0) as client:
        reply = await client.chat.completions.create(model="m", messages=MESSAGES)
        return str(reply.choices[0].message.content)


@pytest.mark.parametrize(
    "ask",
    [said, lambda url: said(url, stream=True), lambda url: asyncio.run(said_async(url))],
    ids=["plain", "stream", "async"],
)
def test_a_client_with_another_key_is_answered_by_the_runs_server(
    run_server: ScriptedServer, ask: Callable[[str], str]
) -> None:
    heard: list[str] = []
    rollout(run_server.endpoint(), lambda: heard.append(ask(run_server.url)))
    assert heard == ["odd"]


def test_it_is_answered_by_the_gateway_too(run_server: ScriptedServer) -> None:
    with recording("r1", token_ids=True, base_url=run_server.url, key=KEY, gateway=True):
        assert said(run_server.url) == "odd"


def test_the_servers_list_of_models_is_answered_too(run_server: ScriptedServer) -> None:
    def agent() -> None:
        with openai.OpenAI(base_url=run_server.url, api_key="dummy", max_retries=0) as client:
            assert [m.id for m in client.models.list()] == ["scripted"]

    rollout(run_server.endpoint(), agent)


def test_outside_a_rollout_nothing_is_added(run_server: ScriptedServer) -> None:
    with pytest.raises(openai.AuthenticationError):
        said(run_server.url)


def test_another_server_gets_the_agents_own_header(run_server: ScriptedServer, foreign: HeaderServer) -> None:
    """Also one on another port of the same machine, and one that hides behind the run's name."""
    port = foreign.server_address[1]
    run_port = run_server.server_address[1]

    def agent() -> None:
        for url in (foreign.url, f"http://localhost:{port}/v1", f"http://127.0.0.1%3A{run_port}@127.0.0.1:{port}/v1"):
            httpx.post(f"{url}/chat/completions", json={"messages": MESSAGES}, headers={"authorization": "Bearer mine"})
            httpx.get(f"{url}/models")

    rollout(run_server.endpoint(), agent)
    assert len(foreign.seen) == 6
    assert KEY not in str(foreign.seen)
    assert [h.get("authorization") for h in foreign.seen[:4]] == ["Bearer mine", None] * 2


@pytest.mark.parametrize("is_async", [False, True])
def test_a_redirect_to_another_server_drops_the_key(foreign: HeaderServer, is_async: bool) -> None:
    with serving(HeaderServer()) as own:
        own.target = f"{foreign.url}/chat/completions"
        body = {"messages": MESSAGES}

        async def ask() -> None:
            async with httpx.AsyncClient(follow_redirects=True) as client:
                await client.post(f"{own.url}/chat/completions", json=body)

        def agent() -> None:
            if is_async:
                asyncio.run(ask())
            else:
                httpx.post(f"{own.url}/chat/completions", json=body, follow_redirects=True)

        rollout(Endpoint(base_url=own.url, model="m", api_key=KEY, token_ids=True), agent)
    assert own.seen[0]["authorization"] == f"Bearer {KEY}"
    assert len(foreign.seen) == 1
    assert KEY not in str(foreign.seen)


def test_a_redirect_from_another_server_brings_no_key(foreign: HeaderServer) -> None:
    """Whoever sends the agent to the run's server must not make it act with the run's key."""
    with serving(HeaderServer()) as own:
        foreign.target = f"{own.url}/chat/completions"
        rollout(
            Endpoint(base_url=own.url, model="m", api_key=KEY),
            lambda: httpx.post(f"{foreign.url}/chat/completions", json={}, follow_redirects=True),
        )
    assert KEY not in str(own.seen)
    assert len(own.seen) == 1


def test_a_server_without_a_key_gets_what_the_agent_sends() -> None:
    """A user's own server, given by `--endpoint`: its key may be known to the agent only."""
    with scripted_server("odd", key="known-to-the-agent") as server:

        def agent() -> None:
            with openai.OpenAI(base_url=server.url, api_key="known-to-the-agent", max_retries=0) as client:
                client.chat.completions.create(model="m", messages=MESSAGES)

        rollout(Endpoint(base_url=server.url, model="m"), agent)
