"""The page docs/agents.md: its plugins run, its commands and settings exist."""

from __future__ import annotations

import gc
import re
import shlex
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from agentrig_agent_match import AgentMatch, AgentMatchConfig
from click.testing import CliRunner
from quick import quick_first
from replay_llm import replay_server

from agentrig import AgentFailure, Endpoint
from agentrig.cli.entry import main
from agentrig.plugins.loading import load
from agentrig.pools import Job, Result
from agentrig.runners.attempt import run_agent
from agentrig.runners.jobs import AgentPlan
from agentrig.settings import structure

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


@pytest.fixture(autouse=True)
def _clients_end_here() -> Iterator[None]:
    """Close the clients after each test, as the end of a runner's process would, so that they cannot warn later."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
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


def test_an_agents_own_kind_of_failure_is_kept(endpoint: Endpoint) -> None:
    assert 'raise AgentFailure("why", kind="out-of-tools")' in PAGE

    def agent(task_input: Any, endpoint: Endpoint) -> str:
        raise AgentFailure("why", kind="out-of-tools")

    assert run_agent(agent, Job(id="r", input={}, endpoint=endpoint)).outcome.failure == "out-of-tools"


def test_agent_match_trains_what_the_page_says(tmp_path: Path, endpoint: Endpoint) -> None:
    trace = ran(tmp_path, "plan_first.py", endpoint, question="How many?").trace
    kept = {
        match: [t.node for t in AgentMatch(AgentMatchConfig(match=match))(trace)] for match in ("write", "plan|write")
    }
    assert AgentMatchConfig().match == "write"
    assert kept == {"write": ["write"], "plan|write": ["plan", "write"]}


def test_the_run_file_sets_what_the_plugin_has(tmp_path: Path) -> None:
    (text,) = [text for kind, text in BLOCKS if kind == "toml"]
    section = tomllib.loads(text)["agent"]
    spec = load(files=[written(tmp_path, "ask_once.py")]).find("agent", section.pop("use")).spec
    assert structure(spec.config, section, owner=spec.name, section="agent").hint == section["hint"]


def test_the_picture_is_printed(tmp_path: Path) -> None:
    command = ["plugins", "--plugin", written(tmp_path, "plan_first.py"), "show", "plan-first", "--graph"]
    shown = CliRunner().invoke(main, command)
    assert shown.exit_code == 0, shown.output
    assert "plan --> write" in shown.output


def test_the_commands_exist() -> None:
    lines = [line for kind, text in BLOCKS if kind == "bash" for line in text.splitlines()]
    assert len(lines) >= 3
    for line in lines:
        program, *words = shlex.split(line)
        assert program == "agentrig"
        command: click.Command = main
        context = click.Context(main)
        for word in words:
            if isinstance(command, click.Group) and (below := command.get_command(context, word)) is not None:
                command = below
            elif word.startswith("--"):
                assert word in {o for p in command.params for o in p.opts}, f"{line}: {command.name} has no {word}"
