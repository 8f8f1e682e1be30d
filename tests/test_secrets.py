"""Secrets and the environment of runners, over complete runs in real processes: keys are written nowhere."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import openai
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from model_server import ModelServer

from agentrig import Secret, text
from agentrig.cli.entry import main
from agentrig.endpoints import Endpoint
from agentrig.errors import AgentrigError, ConfigError
from agentrig.plan import Plan, resolve
from agentrig.pools import Job
from agentrig.processes.confine import BASE, declared, hint, key_advice, withheld
from agentrig.run.resume import resume_plan
from agentrig.run.training import train
from agentrig.runners.attempt import run_agent
from agentrig.text import storable

KEY = "sk-live-0123456789abcdef"
PLUGIN = str(Path(__file__).parent / "support" / "secret_plugin.py")
MakePlan = Callable[..., Plan]


@pytest.fixture(autouse=True)
def _no_masks() -> Iterator[None]:
    text._masks.clear()
    yield
    text._masks.clear()


@pytest.fixture
def plan(model: ModelServer, tmp_path: Path, toy_file: str, monkeypatch: pytest.MonkeyPatch) -> MakePlan:
    monkeypatch.setenv("TOY_TOOL_KEY", KEY)

    def make(*overrides: str, agent: str = "look") -> Plan:
        own = [f"algorithm.endpoint={model.url}", f"run.directory={tmp_path}/runs", "run.name=toy", "algorithm.steps=1"]
        own.append('run.block=["report"]')
        return resolve("toy", overrides=[*own, *overrides], uses={"agent": agent}, files=[toy_file, PLUGIN])

    return make


def everything(folder: Path) -> str:
    """Return all that a run has written, Parquet unpacked."""
    files = [f for f in folder.rglob("*") if f.is_file()]
    found = [
        str(pq.read_table(f).to_pylist()) if f.suffix == ".parquet" else f.read_text("utf-8", "replace") for f in files
    ]
    return "\n".join(found)


@pytest.mark.parametrize("form", ["env", pytest.param("file", marks=pytest.mark.slow)])
def test_a_secret_is_used_and_written_nowhere(
    plan: MakePlan, model: ModelServer, tmp_path: Path, form: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "key").write_text(f"{KEY}\n")
    where = {"env": "TOY_TOOL_KEY", "file": str(tmp_path / "key")}[form]
    made = plan(
        f"agent.api_key.{form}={where}", "agent.fail=true", "run.failure_limit=1", f"agent.tell={tmp_path}/told"
    )
    train(made)
    run = tmp_path / "runs" / "toy"
    assert f"key={KEY}" in (tmp_path / "told").read_text()  # the agent has it
    assert KEY in json.dumps(model.bodies())
    written = everything(run)
    assert KEY not in written
    assert f"<secret from {form} {where}>" in written  # in the failure's message and in the prompts
    assert f'{form} = "{where}"' in (run / "config.toml").read_text()
    assert json.loads((run / "manifest.json").read_text())["config"]["agent"]["api_key"] == {form: where}
    assert KEY not in repr(made) + str(made.as_dict()) + repr(made.agent_plan()) + "".join(capfd.readouterr())
    model.requests.clear()
    train(resume_plan(run, overrides=["algorithm.steps=2"]), resume=run)  # reads it again
    assert KEY in json.dumps(model.bodies())
    assert KEY not in everything(run)


def test_a_literal_secret_is_refused_without_being_shown(plan: MakePlan, tmp_path: Path) -> None:
    for value in (f'"{KEY}"', f'["{KEY}"]', f'{{key = "{KEY}"}}', "3", f'{{env = "A", key = "{KEY}"}}'):
        with pytest.raises(ConfigError, match=r'api_key of look .* write \{env = "NAME"\}') as caught:
            plan(f"agent.api_key={value}")
        assert KEY not in str(caught.value)
    with pytest.raises(ConfigError, match="TOY_NO_SUCH, which holds the secret, is not set"):
        plan('agent.api_key={env = "TOY_NO_SUCH"}')
    with pytest.raises(ConfigError, match="nowhere, which holds the secret, cannot be read: No such file"):
        plan(f'agent.api_key={{file = "{tmp_path}/nowhere"}}')
    (tmp_path / "empty").touch()
    with pytest.raises(ConfigError, match="which holds the secret, is empty"):
        plan(f'agent.api_key={{file = "{tmp_path}/empty"}}')
    with pytest.raises(ConfigError, match="named twice"):
        plan(f'agent.api_key={{env = "TOY_TOOL_KEY", file = "{tmp_path}/empty"}}')
    assert plan().configs["agent"].api_key is None


def test_only_reveal_shows_a_secret() -> None:
    secret = Secret(KEY, {"env": "A"})
    for shown in (str(secret), repr(secret), f"{secret}", repr([secret]), json.dumps({"a": secret}, default=str)):
        assert "<secret from env A>" in shown
        assert KEY not in shown
    copied = pickle.loads(pickle.dumps(Secret("123-456-789", {"env": "B"})))
    assert (copied.reveal(), str(copied), copied) == ("123-456-789", "<secret from env B>", Secret("123-456-789"))
    assert storable("the server said: bad key 123-456-789") == "the server said: bad key <secret from env B>"
    Secret("abc")
    assert storable("abc") == "abc"  # too short to be searched for


def test_dev_shows_no_secret(plan: MakePlan, model: ModelServer, tmp_path: Path, toy_file: str) -> None:
    for extra in ([], ["--json"]):
        words = ["dev", "toy", "--plugin", toy_file, "--plugin", PLUGIN, "--agent", "look", "--endpoint", model.url]
        found = CliRunner().invoke(main, [*words, *extra, "--limit", "2", "agent.api_key.env=TOY_TOOL_KEY"])
        assert found.exit_code == 0, found.output
        assert KEY in json.dumps(model.bodies())
        assert KEY not in found.output
        assert "secret from env TOY_TOOL_KEY" in found.output


# --- the environment of runners ---------------------------------------------------------------------

KEYS = ("OPENAI_API_KEY", "WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "TOY_UNDECLARED")

SCRIPT = """
import sys
from agentrig.plan import resolve
from agentrig.run.training import train
words = dict(agent="look")
plan = resolve("toy", overrides=sys.argv[3:], uses=words, files=[sys.argv[1], sys.argv[2]])
train(plan)
"""


@pytest.mark.slow
@pytest.mark.parametrize("granted", [False, True])
def test_runners_get_what_their_agent_declares(
    model: ModelServer, tmp_path: Path, toy_file: str, granted: bool
) -> None:
    """In a separate process, so that the fork server is new: `/proc/PID/environ` cannot be changed afterwards."""
    environment = {
        **os.environ,
        **dict.fromkeys(KEYS, KEY),
        "TOY_DECLARED": "declared-1",
        "TOY_KEYS_A": "declared-2",
        "LC_TIME": "C",
        "HTTP_PROXY": "http://127.0.0.1:9",
        "NO_PROXY": "127.0.0.1",
    }
    told = tmp_path / "told"
    overrides = [f"algorithm.endpoint={model.url}", f"run.directory={tmp_path}/runs", f"agent.tell={told}"]
    overrides.append('run.block=["report"]')
    overrides += ["algorithm.steps=1", 'runners.environment=["TOY_UNDECL*"]' if granted else "run.seed=1"]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, toy_file, PLUGIN, *overrides],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    proc, _, environ = told.read_text().partition("{")
    for name in KEYS:
        assert (f"'{name}'" in environ) is (granted and name == "TOY_UNDECLARED")
    assert KEY not in proc  # what the process was started with, which no later deletion changes
    for there in ("declared-1", "declared-2", "'LC_TIME'", "'HTTP_PROXY'", "'PATH'", "'HOME'", "'OMP_NUM_THREADS'"):
        assert there in environ
    for name in ("PATH", "HOME"):
        assert f"{name}=" in proc


def test_the_error_of_a_missing_variable_says_where_to_declare_it(
    plan: MakePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOY_UNDECLARED", "x")
    with pytest.raises(
        AgentrigError, match=r"KeyError: 'TOY_UNDECLARED'(.|\n)*\(the run has TOY_UNDECLARED, .*AgentSpec\.env"
    ):
        train(plan(agent="eager"))


def test_the_base_environment_has_no_key() -> None:
    assert not [name for name in BASE if any(word in name.upper() for word in ("_KEY", "_TOKEN", "SECRET", "PASSWORD"))]
    assert hint("nothing") == ""


def test_the_key_of_a_model_service_is_not_asked_for_before_the_runs_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrig.processes.confine._withheld", frozenset({"OPENAI_API_KEY"}))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    found = run_agent(
        lambda task_input, endpoint: openai.OpenAI(),
        Job(id="r", input={}, endpoint=Endpoint(base_url="http://127.0.0.1:9/v1", model="m")),
    )
    advice = (
        "give the agent's client endpoint.base_url and endpoint.api_key, in the function that answers a task, not in "
        "`build` (OPENAI_API_KEY in AgentSpec.environment is only for another model, which is not trained). "
    )
    assert found.outcome.message.startswith(f"{advice}OpenAIError: "), "it stands before OpenAI's own long text"
    assert [span.error.count("endpoint.api_key") for span in found.trace.spans if span.error] == [0], "said once"
    assert key_advice("KeyError: 'OPENAI_API_KEY'") == advice
    assert hint("KeyError: 'OPENAI_API_KEY'") == "", "the run's own key is not offered"
    assert "give the agent's client" in key_advice("TypeError: Could not resolve authentication method.")
    assert key_advice("401: send OPENAI_API_KEY, or endpoint.api_key") == "", "the gateway's answer says it already"


def test_the_main_process_keeps_its_environment(plan: MakePlan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    before = dict(os.environ)
    train(plan())
    assert {k: v for k, v in os.environ.items() if k in before} == before


def test_settings_mark_secrets() -> None:
    from agentrig_lightning import LightningAlgorithmConfig

    assert attrs.fields_dict(LightningAlgorithmConfig)["api_key"].metadata["secret"] is True
    config: Any = LightningAlgorithmConfig(api_key=Secret(KEY))
    assert KEY not in repr(config)


def test_an_agent_that_declares_nothing_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    assert declared(()) == {}
    assert declared(("MY_*",)) == {"MY_KEY": "secret"}
    assert "MY_KEY" in withheld(())
    assert "MY_KEY" not in withheld(("MY_*",))
