"""Which published sets of versions agentrig can drive: decided by the symbols in verl's own wheels."""

from pathlib import Path
from typing import Any

import pytest
from agentrig_ascend import Ascend
from agentrig_verl import schema, symbols
from agentrig_verl.checks import check_settings, check_symbols
from agentrig_verl.keys import attention

from agentrig.doctor import Situation
from agentrig.doctor.software import check_stack
from agentrig.errors import ConfigError
from agentrig.findings import Finding
from agentrig.hardware import Cpu, Device, Probe, Stack
from agentrig.plan import resolve

RELEASES = {"==0.5.0": "0.5.0", "==0.8.*": "0.8.0", "==0.9.*": "0.9.1"}
STACKS = pytest.mark.parametrize("stack", Ascend().stacks(), ids=lambda s: s.name)


def package(wheel: Any, stack: Stack) -> Path:
    folder: Path = wheel(f"verl=={RELEASES[stack.versions['verl']]}") / "verl"
    return folder


@pytest.fixture
def doctor(wheel: Any, monkeypatch: Any) -> Any:
    """Return a function that runs the doctor on the recipe `npu` with exactly the versions of a stack installed."""

    def look(stack: Stack) -> list[Finding]:
        root = package(wheel, stack)
        monkeypatch.setattr(schema, "package", lambda: root)
        monkeypatch.setattr(Ascend, "probe", lambda _: Probe(available=True, devices=(Device(name="910B3"),)))
        versions = {name: want[2:].replace("*", "0") for name, want in stack.versions.items()}
        ascend = Ascend()
        situation = Situation(hardware=ascend, candidates=[ascend], plan=resolve("npu"), versions=versions)
        return [*check_stack(situation), *check_symbols(situation)]

    return look


@STACKS
def test_a_stack_is_offered_exactly_when_its_verl_can_be_driven(wheel: Any, stack: Stack) -> None:
    missing = symbols.lacking(package(wheel, stack))
    assert (stack.proof == "history") == bool(missing), missing
    if missing:
        assert any(name.startswith("verl.trainer.ppo.v1") for name in missing)
        assert "verl.trainer.ppo.v1" in stack.source


@STACKS
def test_the_doctor_says_ok_to_no_stack_that_cannot_run(doctor: Any, stack: Stack) -> None:
    found = doctor(stack)
    problems = [f for f in found if f.result == "problem"]
    fine = [f for f in found if f.check == "stack" and f.result == "ok"]
    if stack.proof == "history":
        assert not fine
        (problem,) = problems
        assert problem.check == "verl"
        assert "verl.trainer.ppo.v1" in problem.evidence
        assert "verl 0.9" in problem.cure
        (told,) = [f for f in found if "which is history" in f.evidence]
        assert (told.result, told.cure) == ("warning", "install verl 0.9 on CANN 9.1")
    else:
        assert not problems
        assert [f.evidence.partition(",")[0] for f in fine] == [stack.name]
    offered = " ".join(f.evidence.partition("other stacks:")[2] for f in found)
    assert not any(s.name in offered for s in Ascend().stacks() if s.proof == "history")


def test_a_run_ends_before_ray_with_a_verl_that_cannot_be_driven(wheel: Any, monkeypatch: Any) -> None:
    root = wheel("verl==0.8.0") / "verl"
    monkeypatch.setattr(schema, "package", lambda: root)
    with pytest.raises(ConfigError, match=r"cannot use the installed verl: it has no verl\.trainer\.ppo\.v1") as error:
        symbols.require()
    assert "Install verl 0.9" in str(error.value)
    assert list(check_settings(Situation(hardware=Ascend(), plan=None))) == []


def test_flash_attention_of_an_npu_comes_with_torch_npu(tmp_path: Path, monkeypatch: Any) -> None:
    packed = {"actor_rollout_ref.model.use_remove_padding": True}
    lost = {
        "actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
        "actor_rollout_ref.model.use_remove_padding": False,
    }
    assert attention(packed, Ascend()) == lost
    (tmp_path / "torch_npu.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert Ascend().best_attention() == "flash_attention_2"
    assert attention(packed, Ascend()) == {}
    assert Cpu().best_attention() == "sdpa"


def test_the_error_of_a_recipe_for_an_npu_names_those_that_run(monkeypatch: Any) -> None:
    monkeypatch.setattr(Ascend, "probe", lambda _: Probe(available=True, devices=(Device(name="910B3"),)))
    with pytest.raises(ConfigError, match="carries verl, not grpo\n  recipes that run on it: fast, llama, npu, qwen"):
        resolve("spider", uses={"hardware": "ascend"}).use_hardware()
