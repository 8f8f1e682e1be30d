"""`agentrig validate --endpoint URL`: a trial with a real server, and servers that cannot be used."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from agentrig.cli.entry import main
from agentrig.testing.scripted import Reply, ScriptedServer, scripted_server

FILE = str(Path(__file__).parent / "domain.py")
PLAY = ["play.rollouts", "play.scored", "play.readable", "play.trains"]


def adds(body: Mapping[str, Any]) -> Reply:
    """Add the two numbers; the last task is answered wrongly."""
    a, b = map(int, body["messages"][0]["content"].split(" + ")) if "+" in body["messages"][0]["content"] else (0, 1)
    return Reply(text=str(a + b if b < 6 else a), token_ids=True)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedServer]:
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", "right")
    with scripted_server(adds, model="adder", key="right") as server:
        yield server


def validate(url: str, *more: str) -> Result:
    words = ["validate", FILE, "--limit", "3", "--json", *(w for check in PLAY for w in ("--only", check))]
    return CliRunner().invoke(main, [*words, *(["--endpoint", url] if url else []), *more])


def statuses(result: Result) -> dict[str, str]:
    (report,) = json.loads(result.stdout)["reports"]
    return {r["check"]: r["status"] for r in report["results"]}


def test_a_trial_with_a_real_model(server: ScriptedServer) -> None:
    """Calls have its key; what would be trained has its token ids."""
    result = validate(server.url + "/", "--model", "adder")
    assert result.exit_code == 0, result.output
    assert statuses(result) == {check: "skipped" if check == "play.readable" else "passed" for check in PLAY}
    (trial,) = json.loads(result.stdout)["trials"]
    assert trial["reward_mean"] == {"model": round(2 / 3, 4)}
    assert trial["trained_by_node"] == {"solve": 3}
    asked = [r for r in server.requests if "+" in r.body["messages"][0]["content"]]
    assert [(r.body["model"], r.body["temperature"]) for r in asked] == [("adder", 0.0)] * 3
    assert trial["prompt_tokens_per_rollout"] == round(sum(len(server.prompt_ids(r.body)) for r in asked) / 3, 2)
    assert trial["response_tokens_per_rollout"] == 3.0


@pytest.mark.slow
def test_a_server_without_token_ids_shows_scores_and_costs_only(server: ScriptedServer) -> None:
    server.script = Reply(text="104", token_ids=False)
    result = validate(server.url)
    assert result.exit_code == 0, result.output
    assert statuses(result)["play.trains"] == "skipped"
    assert "/v1 returns no token ids (`return_token_ids`" in result.stdout
    (trial,) = json.loads(result.stdout)["trials"]
    assert trial["reward_mean"] == {"model": round(1 / 3, 4)}
    assert trial["trained_by_node"] == {}
    assert (trial["trained_tokens_per_rollout"], trial["response_tokens_per_rollout"]) == (0.0, 3.0)
    assert all("return_token_ids" not in r.body for r in server.requests[1:]), "asked once, not in each call"


@pytest.mark.slow
def test_a_server_that_fails_each_call_is_red(server: ScriptedServer) -> None:
    server.script = Reply(status=503, text="no room for this model")
    result = validate(server.url)
    assert result.exit_code == 1
    assert statuses(result)["play.rollouts"] == "failed"
    assert "3 of 3 rollouts failed; the first: task dev-100: it ended with llm-error" in result.stdout
    assert "503" in result.stdout


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.mark.parametrize(
    ("case", "more", "said"),
    [
        ("down", [], "/v1 does not answer: <urlopen error [Errno 111] Connection refused>. Is the server up, and does"),
        ("wrong key", [], "/v1/models answers 401 Unauthorized: check the address, and the key in OPENAI_API_KEY"),
        (
            "unknown model",
            ["--model", "addr"],
            '/v1 has no model "addr". Did you mean "adder"? It lists: adder',
        ),
        ("no endpoint", ["--model", "adder"], "--model needs a server: add --endpoint or set OPENAI_BASE_URL"),
    ],
    ids=["down", "wrong-key", "unknown-model", "no-endpoint"],
)
def test_a_server_that_cannot_be_used_ends_the_command(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, case: str, more: list[str], said: str
) -> None:
    urls = {"down": f"http://127.0.0.1:{free_port()}/v1", "no endpoint": ""}
    if case == "wrong key":
        monkeypatch.setenv("OPENAI_API_KEY", "wrong")
    result = validate(urls.get(case, server.url), *more)
    assert result.exit_code == 1
    assert said in result.stderr
    assert result.stdout == ""
    assert server.requests == [], "nothing is played"
