"""Several models behind one gateway: the policy under further names, and fixed ones that are never trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from agentrig import Endpoint
from agentrig.errors import ConfigError
from agentrig.gateway.client import GatewayAttempt, GatewayError
from agentrig.gateway.process import Gateway
from agentrig.gateway.settings import GatewaySettings
from agentrig.plan import Plan
from agentrig.settings import structure
from agentrig.testing.scripted import ScriptedServer, scripted_server
from agentrig.traces import SERVER

KEY = "key-of-the-fixed-model"


@pytest.fixture(scope="module")
def policy() -> Iterator[ScriptedServer]:
    with scripted_server("of the policy") as server:
        yield server


@pytest.fixture(scope="module")
def coder() -> Iterator[ScriptedServer]:
    with scripted_server("of the coder", model="coder-7b") as server:
        yield server


@pytest.fixture(scope="module")
def gateway(policy: ScriptedServer, coder: ScriptedServer) -> Iterator[Gateway]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CODER_KEY", KEY)
        fixed = {"base_url": coder.url, "model": "coder-7b", "api_key_env": "CODER_KEY"}
        with Gateway(GatewaySettings(models={"planner": "policy", "critic": "policy", "coder": fixed})) as running:
            yield running


def say(endpoint: Endpoint, model: Any, **body: Any) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": "?"}], **body}
    headers = {"authorization": f"Bearer {endpoint.api_key}"}
    return httpx.post(f"{endpoint.base_url}/chat/completions", json=body, headers=headers, timeout=30)


def test_names_lead_to_their_models_and_only_the_policys_tokens_are_recorded(
    gateway: Gateway, policy: ScriptedServer, coder: ScriptedServer
) -> None:
    policy.requests.clear()
    visit = GatewayAttempt(gateway.address, "r")
    endpoint = visit.open(1, policy.endpoint(temperature=0.7))
    said = [say(endpoint, name).json() for name in ("planner", "coder", "critic", endpoint.model)]
    assert [s["choices"][0]["message"]["content"] for s in said] == [
        "of the policy", "of the coder", "of the policy", "of the policy",
    ]  # fmt: skip
    asked = say(endpoint, "coder", return_token_ids=True, logprobs=True, temperature=0.1).json()
    assert asked["choices"][0]["token_ids"], "an agent gets what it asks for"
    streamed = say(endpoint, "coder", stream=True).text
    assert "data: [DONE]" in streamed
    calls = visit.close().spans
    assert [r.body["model"] for r in policy.requests] == [policy.model] * 3
    assert [r.body["temperature"] for r in policy.requests] == [0.7] * 3
    assert [r.body["model"] for r in coder.requests] == ["coder-7b"] * 3
    assert {r.headers["authorization"] for r in coder.requests} == {f"Bearer {KEY}"}
    assert "temperature" not in coder.requests[0].body, "the run's sampling is that of the policy"
    assert "return_token_ids" not in coder.requests[0].body
    names = [c.attributes["request"]["model"] for c in calls]
    assert names == ["planner", "coder", "critic", policy.model, "coder", "coder"], "the names that the agent sent"
    for call, name in zip(calls, names, strict=True):
        own = name != "coder"
        assert bool(call.attributes.get("response_token_ids")) == own
        assert bool(call.attributes.get("response_logprobs")) == own
        assert call.attributes.get(SERVER) == (None if own else f"localhost:{coder.server_address[1]}")
    assert KEY not in str(calls)


def test_an_unknown_name_is_refused_with_the_list_and_the_models_are_listed(
    gateway: Gateway, policy: ScriptedServer
) -> None:
    visit = GatewayAttempt(gateway.address, "unknown")
    endpoint = visit.open(1, policy.endpoint())
    for name, status, words in (
        ("painter", 404, "there is no model 'painter' here; send model = 'scripted'"),
        (None, 400, "model is missing; send model = 'scripted'"),
        (["coder"], 400, "model must be a text, not ['coder']; send model = 'scripted'"),
    ):
        refused = say(endpoint, name)
        assert refused.status_code == status
        assert refused.json()["error"]["message"].startswith(words)
        assert "or 'planner' or 'critic' or 'coder'" in refused.json()["error"]["message"]
    headers = {"authorization": f"Bearer {endpoint.api_key}"}
    listed = httpx.get(f"{endpoint.base_url}/models", headers=headers, timeout=30).json()["data"]
    assert [m["id"] for m in listed] == ["scripted", "planner", "critic", "coder"]
    assert all(c.error and SERVER not in c.attributes for c in visit.close().spans)
    taken = GatewayAttempt(gateway.address, "taken")
    with pytest.raises(GatewayError, match="the run's model is called coder, and so is a fixed one"):
        taken.open(1, Endpoint(base_url=policy.url, model="coder"))


def test_a_fixed_model_that_is_down_is_a_failed_call_to_it(policy: ScriptedServer) -> None:
    models = {"coder": {"base_url": "http://127.0.0.1:9/v1"}}
    with Gateway(GatewaySettings(models=models)) as running:
        visit = GatewayAttempt(running.address, "down")
        reply = say(visit.open(1, policy.endpoint()), "coder")
        (call,) = visit.close().spans
    assert reply.status_code == 502
    assert "the model's server at http://127.0.0.1:9/v1 failed" in reply.json()["error"]["message"]
    assert call.attributes[SERVER] == "localhost:9"


@pytest.mark.parametrize(
    ("models", "words"),
    [
        ({"a": "other"}, "write NAME = \"policy\""),
        ({"a": {}}, "[gateway.models.a] the model a needs base_url"),
        ({"a": {"base_url": "host/v1"}}, "base_url = 'host/v1' is no address: write http://"),
        ({"a": {"base_url": "http://u:secret-word@h/v1"}}, "holds a login"),
        ({"a": {"base_url": "http://h/v1", "api_key": "sk-secret-word"}}, "name the variable that holds it"),
        ({"a": {"base_url": "http://h/v1", "modle": "x"}}, 'has no key "modle". Did you mean "model"?'),
        ({"a": {"base_url": "http://h/v1", "model": 7}}, "model = 7 does not fit the model a: expected text"),
        ({"a": {"base_url": "http://h/v1", "api_key_env": "NOT_SET_HERE"}}, "variable NOT_SET_HERE, which holds"),
        ({"a": "policy", "a.base_url": "http://h/v1"}, "models has a twice"),
    ],
)  # fmt: skip
def test_models_of_another_form_are_refused(models: Any, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        structure(GatewaySettings, {"models": models}, owner="a run", section="gateway")
    message = str(error.value)
    assert words in message
    assert "secret-word" not in message


def test_a_plan_with_models_has_a_gateway_and_no_key(
    toy_plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CODER_KEY", KEY)
    own = ["gateway.models.planner=policy", "gateway.models.coder.base_url=http://h/v1"]
    plan = toy_plan(*own, "gateway.models.coder.api_key_env=CODER_KEY")
    assert plan.uses_gateway
    coder = plan.gateway.named["coder"]
    assert plan.gateway.named["planner"] is None
    assert coder is not None
    assert (coder.endpoint("coder").model, coder.endpoint("coder").api_key) == ("coder", KEY)
    assert KEY not in str(plan.as_dict()) + repr(plan.gateway)
    with pytest.raises(ConfigError, match="names models that only the gateway can reach"):
        toy_plan(*own, "gateway.use=off")
