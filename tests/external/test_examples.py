"""The examples in bash, Node and the Agents SDK: played through the gateway, and trained."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import pytest
from rollouts import rollout

from agentrig import Endpoint
from agentrig.external.command import CommandAgent
from agentrig.external.config import CommandConfig
from agentrig.gateway.process import Gateway
from agentrig.gateway.settings import GatewaySettings
from agentrig.pools import Job, Result
from agentrig.runners.attempt import run_agent
from agentrig.testing.scripted import Reply, ScriptedServer, scripted_server
from agentrig.view.terminal import span_text

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "examples" / "programs"
SDK = PROGRAMS / "agents-sdk" / ".venv" / "bin" / "python"

COMMANDS = {
    "bash": "bash {folder}/bash/agent.sh",
    "node": "node {folder}/node/agent.mjs",
    "agents-sdk": f"{SDK} {{folder}}/agents-sdk/agent.py",
}


def missing(name: str) -> str:
    """Return what an example needs and this machine lacks; '' if it has all."""
    if name == "bash":
        return ", ".join(tool for tool in ("curl", "jq") if shutil.which(tool) is None)
    if name == "node":
        there = shutil.which("node") and (PROGRAMS / "node" / "node_modules" / "openai").exists()
        return "" if there else "Node and `npm install --prefix examples/programs/node`"
    return "" if SDK.exists() else f"{SDK} with openai-agents"


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as made:
        yield made


@pytest.fixture(scope="module")
def play(server: ScriptedServer) -> Iterator[Callable[..., Result]]:
    with Gateway(GatewaySettings()) as gateway:

        def run(name: str, reply: Reply, **keys: object) -> Result:
            server.script = reply
            config = CommandConfig(command=COMMANDS[name], folder=str(PROGRAMS), exit_codes={"22": "llm-error"}, **keys)
            endpoint = attrs.evolve(server.endpoint(temperature=0.5), gateway=gateway.address)
            return run_agent(CommandAgent(config), Job(id=f"{name}-1", input={"question": 'a "b"'}, endpoint=endpoint))

        yield run


@pytest.mark.parametrize("name", COMMANDS)
def test_an_example_plays_through_the_gateway(play: Callable[..., Result], server: ScriptedServer, name: str) -> None:
    if lacks := missing(name):
        pytest.skip(f"the example {name} needs {lacks}")
    found = play(name, Reply(tool_calls=[("roll", {"sides": 12})]))
    assert found.outcome.answer == {"sides": 12}, found.outcome
    (call,) = found.trace.llm_calls()
    assert found.trace.nodes(call) == ["player", "program"]
    assert call.attributes["response_token_ids"]
    assert call.attributes["request"]["temperature"] == 0.5  # the gateway adds what the program leaves out
    body = server.bodies()[-1]
    assert body["messages"] == [{"role": "user", "content": 'a "b"'}]
    assert body["tools"] == json.loads((PROGRAMS / "tools.json").read_text())
    (program,) = [s for s in found.trace.spans if s.name == "program"]
    assert "rolled" in program.attributes["stderr"]
    shown = span_text(
        rollout(answer=found.outcome.answer, trace=found.trace)
    ).splitlines()  # as `agentrig dev` prints it
    (calls,) = [line for line in shown if "reply:" in line]
    assert 'roll({"sides": 12})' in calls
    assert [line for line in shown if "tools roll" in line]
    assert [line for line in shown if "rolled " in line]
    assert play(name, Reply(text="none")).outcome.answer == {"sides": 0}
    refused = play(name, Reply(status=400, text="too long")).outcome
    assert (refused.failure, "too long" in refused.message) == ("llm-error", True)


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
@pytest.mark.skipif(bool(missing("bash")), reason="there is no curl or no jq")
def test_in_bubblewrap_the_gateway_is_reached_and_the_rest_is_hidden(play: Callable[..., Result]) -> None:
    if subprocess.run(["bwrap", "--unshare-user", "--ro-bind", "/", "/", "true"], capture_output=True).returncode:
        pytest.skip("this machine has no user namespaces for bubblewrap")
    assert play("bash", Reply(tool_calls=[("roll", {"sides": 4})]), sandbox="bubblewrap").outcome.answer == {"sides": 4}
    script = (
        f"test -e {ROOT}/pyproject.toml && echo seen; test -e {PROGRAMS}/dice.py && echo folder; touch x; (sleep 99 &)"
    )
    config = CommandConfig(command=script, shell=True, folder=str(PROGRAMS), sandbox="bubblewrap", answer="stdout")
    assert CommandAgent(config)({}, Endpoint(base_url="http://127.0.0.1:9/v1", model="m")) == "folder"


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_an_example_learns(tmp_path: Path, name: str) -> None:
    if lacks := missing(name):
        pytest.skip(f"the example {name} needs {lacks}")
    subprocess.run([sys.executable, str(PROGRAMS / "start.py"), str(tmp_path / "model")], check=True)
    words = [sys.executable, "-m", "agentrig", "train", str(PROGRAMS / f"{name}.toml"), "hardware.threads=1"]
    words += [f"algorithm.model={tmp_path / 'model'}", f"run.directory={tmp_path}", "run.name=run"]
    subprocess.run(words, cwd=ROOT, check=True)
    rewards = [json.loads(line)["reward"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(rewards) == 10
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1
