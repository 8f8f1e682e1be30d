"""Prompts of agents: their fields, what a run file may put in their place, and how they reach the agent."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import agentrig_lightning
import attrs
import pytest
from prompted_plugin import PROMPTS

import agentrig
from agentrig import AgentFailure, AgentSpec, Endpoint
from agentrig.errors import ConfigError
from agentrig.external.http import request_of
from agentrig.plan import Plan, resolve, to_toml
from agentrig.plugins.builtin import register_agents
from agentrig.pools import Job
from agentrig.prompting import checked, fields, misfit, prompted, prompts, read_prompts
from agentrig.runners.attempt import run_agent
from agentrig.tasks import Task

PLUGIN = Path(__file__).parent / "support" / "prompted_plugin.py"
ENDPOINT = Endpoint(base_url="http://127.0.0.1:9/v1", model="m")


def plan_of(place: Path, *overrides: str, **more: Any) -> Plan:
    uses = ["tasks.use=sums", "agent.use=prompted", "reward.use=exact", "algorithm.use=gepa", "hardware.use=cpu"]
    server = ["server.use=endpoint", "server.base_url=http://127.0.0.1:9/v1", "server.model=m"]
    file = place / "run.toml"
    if not file.exists():
        file.write_text("")
    return resolve(str(file), overrides=[*uses, *server, *overrides], files=[str(PLUGIN)], **more)


def test_fields_are_those_that_format_fills() -> None:
    assert fields("Answer {question} of {task.id}, {n:>{width}} {{no field}}") == {"question", "task.id", "n", "width"}
    for text in ("open {", "{}", "{0}", "shut }"):
        with pytest.raises(ValueError, match=r".+"):
            fields(text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("Say {question}, and {question} again", ""),
        ("Say it", "it lacks the field {question}"),
        ("{question.__class__}", "it lacks the field {question}; it has a field {question.__class__}"),
        ("{question} {name}", "it has a field {name}"),
        ("{question} {", "it is no template"),
        (" \n", "it is empty"),
        (3, "it is no text"),
    ],
)
def test_another_text_must_have_the_same_fields(text: Any, why: str) -> None:
    found = misfit(text, "Answer {question}")
    assert found.startswith(why)
    assert bool(found) == bool(why)
    assert misfit("anything {goes}", None) == ""


def test_the_prompts_in_force_are_those_of_the_rollout_also_in_its_threads() -> None:
    def agent(task_input: Any, endpoint: Endpoint) -> Any:
        with ThreadPoolExecutor(1) as pool:
            return [prompts({"a": "own", "b": "own"}), pool.submit(agentrig.prompts).result()]

    job = Job(id="r", input={}, endpoint=ENDPOINT, prompts={"a": "set"})
    assert run_agent(agent, job).outcome.answer == [{"a": "set", "b": "own"}, {"a": "set"}]
    assert prompts() == {}
    assert prompts(PROMPTS) == PROMPTS
    with prompted({"a": "x"}):
        assert prompts() == {"a": "x"}


def test_a_run_file_and_overrides_replace_prompts_and_the_run_keeps_them(tmp_path: Path) -> None:
    assert plan_of(tmp_path).prompts == PROMPTS
    plan = plan_of(tmp_path, "prompts.system=Briefly: {question}")
    assert plan.prompts == {"system": "Briefly: {question}"}
    again = tmp_path / "again.toml"
    again.write_text(to_toml(plan.as_dict()))
    assert resolve(str(again), files=[str(PLUGIN)]).prompts == plan.prompts

    for text in ('Say:\n\n"""{question}"""\\\n', "\n{question}\r\n", "{question}\\n"):
        written = to_toml(plan_of(tmp_path, prompts={"system": text}).as_dict())
        again.write_text(written, newline="")
        assert resolve(str(again), files=[str(PLUGIN)]).prompts == {"system": text}
        assert ("\n\n" in written.partition("[prompts]")[2]) == text.startswith("Say"), "as it is, if it has lines"

    # Another agent has other prompts: those of the recipe's agent are not its own.
    assert resolve(str(again), uses={"agent": "unprompted"}, files=[str(PLUGIN)]).prompts == {}


def test_the_rollouts_of_a_plan_get_its_prompts(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "prompts.system=Briefly: {question}")
    jobs: list[Job] = []
    runtime: Any = SimpleNamespace(submit=lambda batch, results: (jobs.extend(batch), results.put(KeyError("ended"))))
    engine, _ = plan.engine(scorer=None, adapter=None, pool=SimpleNamespace())  # type: ignore[arg-type]
    engine._runtime = runtime
    with pytest.raises(KeyError, match="ended"):
        engine.run([Task(id="t", input={})], n=1, endpoint=ENDPOINT, step=1, mode="train")
    assert [job.prompts for job in jobs] == [{"system": "Briefly: {question}"}]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("prompts.system=Say it", r"\[prompts\] system: it lacks the field \{question\}"),
        ("prompts.sytem=Say {question}", r"agent prompted has no prompt sytem\..*system"),
        ("prompts.system=3", r"\[prompts\] system: it is no text"),
    ],
)
def test_a_prompt_that_does_not_fit_is_refused(tmp_path: Path, override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        plan_of(tmp_path, override)
    with pytest.raises(ConfigError, match="declares none"):
        plan_of(tmp_path, "agent.use=unprompted", "prompts.system=x")


def test_the_prompts_that_a_run_found_can_be_used(tmp_path: Path) -> None:
    (tmp_path / "prompts.json").write_text(json.dumps({"prompts": {"system": 'Say "ü" to {question}\n'}}))
    for source in (tmp_path, tmp_path / "prompts.json"):
        assert plan_of(tmp_path, prompts=read_prompts(source)).prompts == {"system": 'Say "ü" to {question}\n'}
    for text, why in (
        ("[]", "has no prompts"),
        ('{"nosuch": "x"}', "has no prompts"),
        ('{"prompts": 5}', "has prompts of another form"),
        ("{bad", "is not JSON: Expecting property name"),
    ):
        (tmp_path / "prompts.json").write_text(text)
        with pytest.raises(ConfigError, match=rf"prompts\.json {why}.*; it must hold \{{\"prompts\": "):
            read_prompts(tmp_path)
    with pytest.raises(ConfigError, match="name the run directory"):
        read_prompts(tmp_path / "no.json")


def test_a_spec_with_a_broken_template_is_refused() -> None:
    for wrong in ({"system": "open {"}, {"system": ""}, ["system"]):
        with pytest.raises(ValueError, match="AgentSpec broken: "):
            AgentSpec(name="broken", summary="x", build=lambda config: len, prompts=wrong)  # type: ignore[arg-type]


def test_prompts_may_depend_on_the_settings() -> None:
    spec = AgentSpec(name="x", summary="x", build=lambda config: len, prompts=lambda config: {"system": config})
    assert spec.declared("Say {question}") == {"system": "Say {question}"}
    with pytest.raises(ValueError, match="AgentSpec x: the prompt system: it is no template"):
        spec.declared("open {")


def test_programs_and_services_get_prompts_in_their_input() -> None:
    specs = {spec.name: spec for spec in [*register_agents(), *agentrig_lightning.register_agents()]}
    assert [specs[name].prompts for name in ("command", "http", "agent-lightning-1")] == [None] * 3
    assert checked({"any": "Say {question}"}, None, agent="command") == {"any": "Say {question}"}

    job = Job(id="r", input={"question": "why"}, endpoint=ENDPOINT, prompts={"system": "s"})
    assert job.given == {"question": "why", "prompts": {"system": "s"}}
    assert request_of(job, None, timeout_s=1.0)["input"] == job.given
    assert attrs.evolve(job, prompts={}).given == {"question": "why"}
    with pytest.raises(AgentFailure, match="a task has that too"):
        _ = attrs.evolve(job, input={"prompts": 1}).given


def test_a_program_reads_its_prompts(tmp_path: Path) -> None:
    from agentrig.external.command import CommandAgent
    from agentrig.external.config import CommandConfig

    agent = CommandAgent(CommandConfig(command=["cat"]))
    job = Job(id="r", input={"question": "why"}, endpoint=ENDPOINT, prompts={"system": "s"})
    assert agent.run_job(job) == {"question": "why", "prompts": {"system": "s"}}
