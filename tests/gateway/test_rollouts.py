"""Rollouts of a run through its gateway: the same triplets as through the tap, and what is left when runners die."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from model_server import ModelServer

from agentrig import AgentSpec, Endpoint, Task
from agentrig.errors import ConfigError
from agentrig.gateway.process import Gateway
from agentrig.gateway.settings import GatewaySettings
from agentrig.plan import Plan, resolve
from agentrig.rollouts import Rollout
from agentrig.runners.scorer import Scorer
from agentrig.traces import LLM_CALL


def tasks_of(*dos: str, wish: str = "") -> list[Task]:
    inputs = [{"number": i, "do": do, "wish": wish} for i, do in enumerate(dos)]
    return [Task(id=f"t{i}", input=g, private={"parity": "odd", "gold": "x"}) for i, g in enumerate(inputs)]


def rolled(plan: Plan, model: ModelServer, *batches: Sequence[Task]) -> list[list[Rollout]]:
    endpoint = Endpoint(base_url=model.url, model="toy-model", api_key="the-models-key", token_ids=True)
    found: list[list[Rollout]] = []
    with plan.make_gateway() as gateway:
        engine, runtime = plan.engine(
            scorer=Scorer(plan.build("reward"), budget_s=2), adapter=plan.build("adapter"), gateway=gateway
        )

        def body() -> None:
            found.extend(engine.run(tasks, n=1, endpoint=endpoint, step=1, mode="train") for tasks in batches)

        runtime.run(body)
    return found


def shape(rollout: Rollout) -> Any:
    trace = rollout.trace
    spans = {s.id: (s.name, s.node, s.error) for s in trace.spans}
    tree = [(spans[s.id], spans.get(s.parent or ""), s.attributes.get("request")) for s in trace.spans]
    triplets = [
        (t.prompt_ids, t.response_ids, t.logprobs, t.reward, t.node, t.span_id in spans) for t in rollout.triplets
    ]
    return rollout.failure, rollout.value, triplets, tree


def test_the_gateway_records_what_the_tap_records(model: ModelServer, toy_plan: Callable[..., Plan]) -> None:
    tasks = tasks_of("", "cold", "", "raise", "no-call")
    (tapped,) = rolled(toy_plan(), model, tasks)
    by_tap = [dict(b) for b in model.bodies()]
    model.requests.clear()
    plan = toy_plan("gateway.use=on")
    assert plan.as_dict()["gateway"]["use"] == "on"
    (passed,) = rolled(plan, model, tasks)
    assert [shape(r) for r in passed] == [shape(r) for r in tapped]
    assert sorted(map(str, model.bodies())) == sorted(map(str, by_tap))
    assert {r.headers["authorization"] for r in model.requests} == {"Bearer the-models-key"}
    assert sum(len(r.trace.llm_calls()) for r in passed) == 3, "each call once"


@pytest.mark.slow
def test_the_calls_of_a_killed_runner_are_kept(model: ModelServer, toy_plan: Callable[..., Plan]) -> None:
    plan = toy_plan("gateway.use=on", "runners.deadline_s=2", "runners.n=1", "runners.threads=1", "runners.retries=0")
    (found,) = rolled(plan, model, [*tasks_of("", wish="[sleep=30]"), *tasks_of("", "die")])
    assert [r.failure for r in found] == ["deadline", None, "runner-died"]
    root, call = found[0].trace.spans
    assert (root.parent, call.parent, call.name) == (None, root.id, LLM_CALL)
    assert call.error == "the client has broken the connection before the answer was complete"
    assert len(found[1].triplets) == 1
    assert [s.name for s in found[2].trace.spans] == ["rollout"]


PROGRAM = """
from agentrig import AgentSpec, hookimpl

@hookimpl
def register_agents():
    yield AgentSpec(name="program", summary="Leaves.", build=lambda config: None, calls="gateway")
"""


def test_auto_asks_the_agent_and_off_is_refused_for_one_that_needs_it(toy_file: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    files, program = [toy_file, str(tmp_path / "program.py")], {"agent": "program"}
    assert not resolve("toy", files=files).uses_gateway
    assert resolve("toy", files=files, overrides=["gateway.use=on"]).uses_gateway
    assert resolve("toy", files=files, uses=program).uses_gateway
    with pytest.raises(ConfigError, match='use = "off", but the calls of agent program leave'):
        resolve("toy", files=files, uses=program, overrides=["gateway.use=off"])
    with pytest.raises(ValueError, match='write calls="tap" or calls="gateway"'):
        AgentSpec(name="a", summary="", build=lambda config: None, calls="proxy")


@pytest.fixture
def taken() -> Iterator[int]:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_a_gateway_that_cannot_listen_says_where(taken: int) -> None:
    with pytest.raises(Exception, match=rf"cannot listen on 127.0.0.1:{taken} .gateway.host, gateway.port.: Address"):
        Gateway(GatewaySettings(port=taken)).__enter__()
