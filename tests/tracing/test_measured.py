"""Calls are sampled as the run says, by the tap and by the gateway; in a measurement whatever the agent sends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import pytest
from rollouts import rollout

from agentrig import Endpoint, Trace
from agentrig.gateway.process import Gateway
from agentrig.gateway.settings import GatewaySettings
from agentrig.pools import Job
from agentrig.run.guards import warn_of_fields
from agentrig.runners.attempt import run_agent
from agentrig.testing.scripted import ScriptedServer, scripted_server
from agentrig.traces import ASKED, Span

openai = pytest.importorskip("openai")

SENT: list[dict[str, Any]] = [{}, {"temperature": 0.7, "top_p": 0.5, "max_tokens": 5}, {"max_completion_tokens": 7}]
SENT += [{"temperature": 0}, {"temperature": 0.0, "top_p": 1.0}]
"""What five calls of an agent that nobody has changed send."""

LIMITS = [(64, None), (5, None), (None, 7), (64, None), (64, None)]
"""Their `max_tokens` and `max_completion_tokens` under the run's limit of 64."""


def unchanged(task_input: Any, endpoint: Endpoint) -> str:
    with openai.OpenAI(base_url=endpoint.base_url, api_key="dummy", max_retries=0) as client:
        for i, fields in enumerate(SENT):
            asked = {"model": endpoint.model, "messages": [{"role": "user", "content": "?"}], **fields}
            reply = client.chat.completions.create(**asked, stream=i == 0)
            if i == 0:
                list(reply)
    return "done"


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    with Gateway(GatewaySettings()) as running:
        yield running


@pytest.fixture
def model() -> Iterator[ScriptedServer]:
    with scripted_server("odd") as server:
        yield server


def calls(model: ScriptedServer, mode: str, gateway: Gateway | None, agent: Any = unchanged) -> list[Span]:
    endpoint = model.endpoint(temperature=0.0, top_p=1.0, max_tokens=64)
    endpoint = attrs.evolve(endpoint, headers={"x-run": "1"}, gateway=gateway.address if gateway else None)
    result = run_agent(agent, Job(id="r1", input={}, endpoint=endpoint, mode=mode))
    assert result.outcome.failure is None, result.outcome.message
    return result.trace.llm_calls()


@pytest.mark.parametrize("through", ["tap", "gateway"])
@pytest.mark.parametrize("mode", ["val", "test"])
def test_all_calls_of_a_measurement_are_sampled_as_the_run_says(
    model: ScriptedServer, gateway: Gateway, mode: str, through: str
) -> None:
    spans = calls(model, mode, gateway if through == "gateway" else None)
    bodies = model.bodies()
    assert through == "gateway" or [r.headers.get("x-run") for r in model.requests] == ["1"] * 5
    assert [(b["temperature"], b["top_p"]) for b in bodies] == [(0.0, 1.0)] * 5
    assert [(b.get("max_tokens"), b.get("max_completion_tokens")) for b in bodies] == LIMITS
    for span, body in zip(spans, bodies, strict=True):  # the record has what was used, and what was asked otherwise
        assert {k: span.attributes["request"][k] for k in ("temperature", "top_p")} == {
            "temperature": 0.0,
            "top_p": 1.0,
        }
        assert span.attributes["request"] == body
    own = [None, {"temperature": 0.7, "top_p": 0.5}, None, {"temperature": 0}, None]  # the last passes on the run's
    assert [s.attributes.get(ASKED) for s in spans] == own


@pytest.mark.parametrize("through", ["tap", "gateway"])
def test_training_adds_what_a_call_lacks_and_leaves_what_the_agent_sends(
    model: ScriptedServer, gateway: Gateway, through: str
) -> None:
    spans = calls(model, "train", gateway if through == "gateway" else None)
    bodies = model.bodies()
    assert through == "gateway" or [r.headers.get("x-run") for r in model.requests] == ["1"] * 5
    assert [(b["temperature"], b["top_p"]) for b in bodies] == [(0.0, 1.0), (0.7, 0.5), *[(0.0, 1.0)] * 3]
    assert [(b.get("max_tokens"), b.get("max_completion_tokens")) for b in bodies] == LIMITS
    assert [s.attributes["request"] for s in spans] == bodies
    assert not any(ASKED in s.attributes for s in spans)


@pytest.mark.parametrize("through", ["tap", "gateway"])
@pytest.mark.parametrize("mode", ["train", "val"])
def test_of_two_limits_the_smaller_holds_and_the_run_says_so(
    model: ScriptedServer, gateway: Gateway, mode: Any, through: str, caplog: pytest.LogCaptureFixture
) -> None:
    def wordy(task_input: Any, endpoint: Endpoint) -> str:
        with openai.OpenAI(base_url=endpoint.base_url, api_key="dummy", max_retries=0) as client:
            for name in ("max_tokens", "max_completion_tokens"):
                asked = {"model": endpoint.model, "messages": [{"role": "user", "content": "?"}], name: 2048}
                client.chat.completions.create(**asked)
        return "done"

    spans = calls(model, mode, gateway if through == "gateway" else None, wordy)
    limits = [(b.get("max_tokens"), b.get("max_completion_tokens")) for b in model.bodies()]
    assert limits == [(64, None), (None, 64)]
    assert [s.attributes[ASKED] for s in spans] == [{"max_tokens": 2048}, {"max_completion_tokens": 2048}]
    whole, first = (rollout(trace=Trace(rollout_id="r1", spans=tuple(some))) for some in (spans, spans[:1]))
    assert warn_of_fields([whole], {"use": "verl", "verl": {"data": {"max_response_length": 64}}})
    said = "2 calls asked for up to 2048 tokens; the run's limit of 64 holds"
    assert f"{said} (algorithm.verl.data.max_response_length)" in caplog.text
    assert warn_of_fields([first], {"use": "grpo", "max_tokens": 64})
    assert "1 call asked for up to 2048 tokens; the run's limit of 64 holds (algorithm.max_tokens)\n" in caplog.text


def test_other_servers_get_what_the_agent_sends(model: ScriptedServer) -> None:
    with scripted_server("elsewhere") as foreign:

        def judge(task_input: Any, endpoint: Endpoint) -> str:
            return unchanged(task_input, attrs.evolve(endpoint, base_url=foreign.url))

        for mode in ("train", "test"):
            calls(model, mode, None, judge)
        assert [b.get("temperature") for b in foreign.bodies()] == [None, 0.7, None, 0, 0.0] * 2
        assert not any("x-run" in r.headers for r in foreign.requests)


def test_a_litagent_keeps_its_temperature_of_validation(model: ScriptedServer) -> None:
    def lit(task_input: Any, endpoint: Endpoint) -> str:
        return unchanged(task_input, endpoint)

    lit.reads_own_trace = True  # type: ignore[attr-defined]
    calls(model, "val", None, lit)
    assert [b.get("temperature") for b in model.bodies()] == [0.0, 0.7, 0.0, 0, 0.0]
