"""Models from ModelScope: verl's and vLLM's switches, the cache, and the doctor's checks."""

import socket

import pytest
from agentrig_verl import modelscope
from hosts import only

from agentrig.doctor import Situation, content
from agentrig.hardware import Cpu
from agentrig.plan import resolve
from agentrig.plugins.loading import load

ON = {"VERL_USE_MODELSCOPE": "True", "VLLM_USE_MODELSCOPE": "true"}


def of_verl(model, environ):
    """The doctor's situation for a run of verl whose model is a name, before modelscope is searched for."""
    plan = resolve("fast", overrides=[f"algorithm.model={model}"], uses={"hardware": "cuda"})
    return Situation(hardware=Cpu(), plan=plan, environ=environ)


def modelscope_installed(folder, monkeypatch):
    (folder / "modelscope.py").touch()
    monkeypatch.syspath_prepend(folder)


def test_modelscope_is_not_checked_without_its_switch_or_with_another_algorithm():
    assert list(modelscope.check_modelscope(of_verl("some/model", {}))) == []
    assert modelscope.hub({}) is None
    assert check_modelscope_of("verl")
    assert not check_modelscope_of("grpo")


def check_modelscope_of(algorithm):
    """Whether the doctor would run the check for a run of this algorithm."""
    spec = load().find("algorithm", algorithm).spec
    return modelscope.check_modelscope in spec.checks and spec.hub is modelscope.hub


def test_modelscopes_switches_go_together_and_need_its_package(tmp_path, monkeypatch):
    missing, both = modelscope.check_modelscope(of_verl("some/model", ON))
    assert (missing.result, missing.cure) == ("problem", "pip install modelscope")
    modelscope_installed(tmp_path, monkeypatch)
    assert only(modelscope.check_modelscope(of_verl("some/model", ON)), "ok").evidence == both.evidence
    one = only(modelscope.check_modelscope(of_verl("some/model", {"VERL_USE_MODELSCOPE": "true"})), "problem")
    assert "VLLM_USE_MODELSCOPE is not" in one.evidence
    assert list(modelscope.check_modelscope(of_verl(str(tmp_path), {"VERL_USE_MODELSCOPE": "true"}))) == []
    odd = only(modelscope.check_modelscope(of_verl("some/model", {"VLLM_USE_MODELSCOPE": "1"})), "problem")
    assert "VLLM_USE_MODELSCOPE=1 counts as off" in odd.evidence


@pytest.mark.parametrize(
    "place", ["models/some--model.5/snapshots/master", "models/some/model___5", "hub/models/some/model___5"]
)
def test_a_model_in_modelscopes_cache_is_found(tmp_path, place):
    (tmp_path / place).mkdir(parents=True)
    for name in ("config.json", "tokenizer_config.json", "model.safetensors"):
        (tmp_path / place / name).write_text("{}")
    environ = {**ON, "MODELSCOPE_CACHE": str(tmp_path)}
    assert place in only(content.check_model(of_verl("some/model.5", environ)), "ok").evidence


def test_a_model_is_looked_for_at_modelscope(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    environ = {**ON, "MODELSCOPE_CACHE": str(tmp_path), "MODELSCOPE_ENDPOINT": f"http://127.0.0.1:{port}"}
    found = only(content.check_model(of_verl("some/model", environ)), "problem")
    assert f"127.0.0.1:{port} cannot be reached" in found.evidence
    assert modelscope.endpoint({}) == "https://modelscope.cn"
