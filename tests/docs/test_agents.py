"""The page docs/agents.md: its plugins run, its commands and settings exist."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agentrig_agent_match import AgentMatch, AgentMatchConfig
from click.testing import CliRunner
from quick import quick_first
from replay_llm import replay_server

from agentrig import Endpoint
from agentrig.cli.entry import main
from agentrig.pools import Job, Result
from agentrig.runners.attempt import run_agent
from agentrig.runners.jobs import AgentPlan

PAGE = (Path(__file__).parents[2] / "docs" / "agents.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.M | re.S)
FILES = {m[1]: text for kind, text in BLOCKS if kind == "python" and (m := re.match(r"# (\w+\.py)\n", text))}
NAMES = {"ask_once.py": "ask-once", "plan_first.py": "plan-first"}
NODES = {"ask_once.py": ["write_query"], "plan_first.py": ["plan", "write"]}


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    with replay_server({"*": "SELECT 7"}, tmp_path_factory.mktemp("model")) as address:
        sampling = {"temperature": 0.25, "max_tokens": 31}
        headers = {"X-Rollout": "1"}
        yield Endpoint(base_url=address, model="replay", token_ids=True, sampling=sampling, headers=headers)


pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # a runner's process would end its clients


@pytest.fixture(autouse=True)
def _clients_end_here() -> Iterator[None]:
    """Close the clients with each test, so that they cannot warn later."""
    yield
    gc.collect()


def written(folder: Path, file: str) -> str:
    path = folder / file
    path.write_text(FILES[file])
    return str(path)


def ran(folder: Path, file: str, endpoint: Endpoint, **task: Any) -> Result:
    agent = AgentPlan(name=NAMES[file], config={}, files=[written(folder, file)]).build()
    return run_agent(agent, Job(id="r", input=task, endpoint=endpoint))


def test_the_page_has_a_plugin_of_each_sort() -> None:
    assert set(FILES) == set(NAMES)


@pytest.mark.parametrize("file", sorted(NAMES))
def test_a_plugin_of_the_page_answers_and_is_recorded(tmp_path: Path, endpoint: Endpoint, file: str) -> None:
    result = ran(tmp_path, file, endpoint, question="How many?")
    assert result.outcome.failure is None, result.outcome.message
    assert "SELECT 7" in result.outcome.answer
    calls = result.trace.llm_calls()
    assert [result.trace.nodes(call)[0] for call in calls] == NODES[file]
    for call in calls:
        assert call.attributes["prompt_token_ids"]
        assert call.attributes["response_token_ids"]
        assert {**call.attributes["request"], **endpoint.sampling} == call.attributes["request"]


@pytest.mark.parametrize("file", quick_first(NAMES, ("ask_once.py",)))
def test_a_plugin_of_the_page_lets_errors_of_the_model_through(tmp_path: Path, file: str) -> None:
    dead = Endpoint(base_url="http://127.0.0.1:9/v1", model="m")
    assert ran(tmp_path, file, dead, question="How many?").outcome.failure == "llm-error"


def test_agent_match_trains_what_the_page_says(tmp_path: Path, endpoint: Endpoint) -> None:
    trace = ran(tmp_path, "plan_first.py", endpoint, question="How many?").trace
    assert [t.node for t in AgentMatch(AgentMatchConfig())(trace)] == ["write"]


def test_the_picture_is_printed(tmp_path: Path) -> None:
    command = ["plugins", "--plugin", written(tmp_path, "plan_first.py"), "show", "plan-first", "--graph"]
    shown = CliRunner().invoke(main, command)
    assert shown.exit_code == 0, shown.output
    assert "plan --> write" in shown.output
