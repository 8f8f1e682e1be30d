from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import openai
import pytest
from agentrig_langgraph_sql.agent import SqlAgent, SqlAgentConfig, register_agents
from agentrig_langgraph_sql.prompts import PRESETS

from agentrig import AgentFailure, Endpoint
from agentrig.errors import ConfigError
from agentrig.plan import resolve
from agentrig.plugins.loading import load
from agentrig.prompting import prompted

ACCEPTED = ["```sql\nSELECT name FROM animal\n```", "VERDICT: CORRECT"]


def endpoint_at(server: Any, **changes: Any) -> Endpoint:
    return Endpoint(**{"base_url": server.url, "model": "zookeeper", **changes})


def task_about(zoo: Path) -> dict[str, str]:
    return {"question": "Who lives here?", "db_id": "zoo", "database": str(zoo)}


def test_the_picture_comes_from_the_spec() -> None:
    (spec,) = register_agents()
    assert spec.graph is not None
    assert "check_query -.-> rewrite_query" in spec.graph(spec.config())


def test_what_is_preloaded_exists() -> None:
    (spec,) = register_agents()
    assert all(importlib.import_module(module) for module in spec.preload)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_turns": 0},
        {"max_turns": 34},
        {"prompts": "long"},
        {"schema_style": "xml"},
        {"max_tokens": 0},
        {"query_timeout_s": 0},
        {"max_retries": -1},
        {"max_rows": 0},
        {"table_info_truncate": 1},
        {"sample_rows": 4},
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        SqlAgentConfig(**settings)


@pytest.mark.parametrize(("asked", "sent"), [({}, 2048), ({"max_tokens": 64}, 64), ({"max_tokens": 9999}, 2048)])
def test_the_smaller_limit_of_new_tokens_holds(chat_server: Any, zoo: Path, asked: dict[str, int], sent: int) -> None:
    chat_server.replies = ACCEPTED
    SqlAgent(SqlAgentConfig())(task_about(zoo), endpoint_at(chat_server, sampling={"temperature": 0.0, **asked}))
    assert [request["max_completion_tokens"] for request in chat_server.requests] == [sent, sent]
    assert [request["temperature"] for request in chat_server.requests] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("recipe", "rows"), [("mini", 0), ("spider", 3), ("fast", 3), ("qwen", 3), ("llama", 3), ("npu", 3)]
)
def test_recipes_show_as_many_rows_as_the_reference(recipe: str, rows: int) -> None:
    assert load().find("recipe", recipe).spec.settings["agent"].get("sample_rows", 0) == rows


@pytest.mark.parametrize("missing", ["question", "database"])
def test_a_task_without_a_field_is_a_typed_failure(chat_server: Any, zoo: Path, missing: str) -> None:
    task = {name: value for name, value in task_about(zoo).items() if name != missing}
    with pytest.raises(AgentFailure, match=f"needs the text {missing}.*choose tasks") as failure:
        SqlAgent(SqlAgentConfig())(task, endpoint_at(chat_server))
    assert failure.value.kind == "agent-error"
    assert chat_server.requests == []


def test_a_database_that_is_gone_is_a_typed_failure(chat_server: Any, tmp_path: Path) -> None:
    with pytest.raises(AgentFailure, match=r"gone\.sqlite") as failure:
        SqlAgent(SqlAgentConfig())(task_about(tmp_path / "gone.sqlite"), endpoint_at(chat_server))
    assert failure.value.kind == "database-error"


def test_a_failing_model_is_an_error_and_no_answer(chat_server: Any, zoo: Path) -> None:
    agent = SqlAgent(SqlAgentConfig(max_retries=0))
    chat_server.replies = [(500, b'{"error": {"message": "out of memory"}}')]
    with pytest.raises(openai.InternalServerError, match="out of memory"):  # the core counts openai's as llm-error
        agent(task_about(zoo), endpoint_at(chat_server))
    chat_server.replies = [(200, b"<html></html>")]
    with pytest.raises(AgentFailure, match="not answer with a chat completion") as failure:
        agent(task_about(zoo), endpoint_at(chat_server))
    assert failure.value.kind == "llm-error"


def test_the_key_is_in_no_message(zoo: Path) -> None:
    endpoint = Endpoint(base_url="http://127.0.0.1:9/v1", model="m", api_key="sk-secret")
    agent = SqlAgent(SqlAgentConfig(max_retries=0))
    with pytest.raises(openai.APIConnectionError) as failure:
        agent(task_about(zoo), endpoint)
    assert "sk-secret" not in f"{failure.value!r} {failure.value} {endpoint!r}"


ALONE = """
import json, os, sys
from agentrig import Endpoint
from agentrig_langgraph_sql.agent import SqlAgent, SqlAgentConfig
url, task = sys.argv[1], json.loads(sys.argv[2])
agent = SqlAgent(SqlAgentConfig())
answers = [agent(task, Endpoint(base_url=url, model="m"))]
child = os.fork()
answers.append(agent(task, Endpoint(base_url=url, model="m")))
if child == 0:
    os._exit(0 if len(set(answers)) == 1 else 3)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_runner_opens_its_own_connections_and_sends_nothing_to_langsmith(chat_server: Any, zoo: Path) -> None:
    chat_server.replies = lambda request: ACCEPTED["VERDICT" in request["messages"][0]["content"]]
    base = chat_server.url.removesuffix("/v1")
    environment = {**os.environ, "LANGSMITH_TRACING": "true", "LANGSMITH_ENDPOINT": base, "LANGSMITH_API_KEY": "x"}
    command = [sys.executable, "-W", "ignore", "-c", ALONE, chat_server.url, json.dumps(task_about(zoo))]
    subprocess.run(command, check=True, timeout=120, env=environment)
    assert chat_server.paths == ["/v1/chat/completions"] * 6
    assert len(set(chat_server.clients)) == 2


ROLLOUTS = """
import json, sys, time
from agentrig import Endpoint
from agentrig_langgraph_sql.agent import SqlAgent, SqlAgentConfig
agent, task = SqlAgent(SqlAgentConfig()), json.loads(sys.argv[2])
def rollout(seed):
    agent(task, Endpoint(base_url=sys.argv[1], model="m", sampling={"seed": seed}))
rollout(0)
start = time.process_time()
for seed in range(200): rollout(seed)
print((time.process_time() - start) / 200 * 1e3)
"""


@pytest.mark.slow
def test_a_rollout_is_cheap(chat_server: Any, zoo: Path) -> None:
    chat_server.replies = lambda request: ACCEPTED["VERDICT" in request["messages"][0]["content"]]
    command = [sys.executable, "-c", ROLLOUTS, chat_server.url, json.dumps(task_about(zoo))]
    run = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    # CPU milliseconds a rollout: about 14 on an idle core; the bound allows for a busy machine.
    assert float(run.stdout) < 30


@pytest.mark.parametrize("preset", ["full", "short"])
def test_its_prompts_are_those_of_the_preset_and_a_run_replaces_them(
    chat_server: Any, zoo: Path, tmp_path: Path, preset: str
) -> None:
    (spec,) = register_agents()
    config = SqlAgentConfig(prompts=preset, max_turns=2)
    declared = spec.declared(config)
    assert declared is not None
    assert list(declared) == ["write", "check", "rewrite"]

    def asked(prompts: Mapping[str, str]) -> list[list[dict[str, str]]]:
        chat_server.requests.clear()
        chat_server.replies = ["SELECT name FROM animal", "no", "SELECT count(*) FROM animal", "no"]
        with prompted(prompts):
            SqlAgent(config)(task_about(zoo), endpoint_at(chat_server))
        return [request["messages"] for request in chat_server.requests]

    alone = asked({})
    assert len(alone) == 4
    assert asked(declared) == alone, "what it declares is what it says without a run"
    again = asked({name: f"{name}! {text}" for name, text in declared.items()})
    for name, replaced, before in zip(("write", "check", "rewrite", "check"), again, alone, strict=True):
        first, *rest = before
        assert replaced == [{**first, "content": f"{name}! {first['content']}"}, *rest]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("prompts.write=Write {question}.", r"\[prompts\] write: it lacks the field \{dialect\}; it has a field"),
        ("prompts.system=x", "agent langgraph-sql has no prompt system"),
    ],
)
def test_a_prompt_that_loses_a_field_is_refused(override: str, said: str) -> None:
    uses = {"algorithm.use": "gepa", "server.use": "endpoint", "server.model": "m", "agent.prompts": "full"}
    base = [*(f"{key}={value}" for key, value in uses.items()), "server.base_url=http://127.0.0.1:9/v1"]
    assert resolve("mini", overrides=base).prompts == PRESETS["full"].instructions()
    with pytest.raises(ConfigError, match=said):
        resolve("mini", overrides=[*base, override])
