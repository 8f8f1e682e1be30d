"""Every override, against the YAML that verl's published wheels ship, composed by Hydra in struct mode."""

from typing import Any

import pytest
from agentrig_ascend import Ascend
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf
from quick import quick_first

from agentrig.hardware import apply_overrides

VERSIONS = ("0.5.0", "0.6.1", "0.7.1", "0.8.0", "0.9.1")

# What the reference's profile for CUDA sets, as far as the NPU profile touches it.
QWEN = {
    "actor_rollout_ref.rollout.engine_kwargs.vllm.enable_auto_tool_choice": True,
    "actor_rollout_ref.rollout.engine_kwargs.vllm.tool_call_parser": "hermes",
    "actor_rollout_ref.rollout.gpu_memory_utilization": 0.8,
    "actor_rollout_ref.actor.optim.lr": 1e-6,
}


def composed(wheel: Any, version: Any, overrides: Any) -> Any:
    """Return verl's configuration with overrides, as verl's own entry point would compose it."""
    folder = wheel(f"verl=={version}") / "verl" / "trainer" / "config"
    with initialize_config_dir(config_dir=str(folder), version_base=None):
        config = compose(config_name="ppo_trainer", overrides=list(overrides))
    OmegaConf.set_struct(config, True)
    return config


def added(settings: Any) -> Any:
    """Return dotted settings as Hydra wants them: `++` sets a key whether verl's YAML has it or not."""
    return [f"++{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in settings.items()]


@pytest.mark.parametrize("version", quick_first(VERSIONS, VERSIONS[-1:]))
def test_verl_accepts_every_override(wheel: Any, version: Any) -> None:
    overrides = Ascend().overrides({"verl": version})
    config = composed(wheel, version, [*added(QWEN), *(o.hydra() for o in overrides)])
    assert overrides
    for override in overrides:
        if override.delete:
            parent, _, key = override.key.rpartition(".")
            assert key not in OmegaConf.select(config, parent)
        else:
            assert OmegaConf.select(config, override.key) == override.value


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_verl_refuses_every_override_with_a_misspelled_key(wheel: Any, version: Any) -> None:
    defaults = composed(wheel, version, [])
    overrides = Ascend().overrides({"verl": version})
    for override in overrides:  # Hydra sets or deletes only what is there, as one of each kind shows below
        assert OmegaConf.select(defaults, override.key[:-1] + "zz") is None
    for override in {o.delete: o for o in overrides}.values():
        wrong = override.hydra().replace(override.key, override.key[:-1] + "zz")
        with pytest.raises(ConfigCompositionException, match=r"Could not (override|delete)"):
            composed(wheel, version, [wrong])


def test_on_the_reference_version_the_difference_is_the_references_own() -> None:
    overrides = Ascend().overrides({"verl": "0.5.0"})
    assert apply_overrides(QWEN, overrides) == {
        "actor_rollout_ref.rollout.gpu_memory_utilization": 0.8,
        "actor_rollout_ref.actor.optim.lr": 1e-6,
        "actor_rollout_ref.actor.use_torch_compile": False,
        "trainer.device": "npu",
    }
    assert [o.hydra() for o in overrides] == [
        "trainer.device=npu",
        "actor_rollout_ref.actor.use_torch_compile=false",
        "~actor_rollout_ref.rollout.engine_kwargs.vllm.enable_auto_tool_choice",
        "~actor_rollout_ref.rollout.engine_kwargs.vllm.tool_call_parser",
    ]


def test_no_override_applies_to_an_unknown_verl() -> None:
    assert Ascend().overrides({"verl": "1.0.0"}) == []
    assert Ascend().overrides({}) == []


@pytest.mark.parametrize("version", ["0.8.0", "0.9.1"])
def test_the_engine_of_newer_versions_reads_the_key_that_is_set(wheel: Any, version: Any) -> None:
    """From verl 0.8 on, actor.use_torch_compile is accepted and does not reach the engine, so the other key is set."""
    engine = wheel(f"verl=={version}") / "verl" / "workers" / "engine" / "fsdp" / "transformer_impl.py"
    assert "self.engine_config.use_torch_compile" in engine.read_text("utf-8")
    config = composed(wheel, version, ["actor_rollout_ref.actor.use_torch_compile=false"])
    assert config.actor_rollout_ref.actor.fsdp_config.use_torch_compile is True
    assert not (wheel(f"verl=={version}") / "verl" / "workers" / "actor" / "dp_actor.py").exists()


@pytest.mark.parametrize("version", ["0.7.1", "0.8.0", "0.9.1"])
def test_verl_sets_the_port_ranges_itself_from_0_7_1_on(wheel: Any, version: Any) -> None:
    text = (wheel(f"verl=={version}") / "verl" / "trainer" / "constants_ppo.py").read_text("utf-8")
    assert '"HCCL_HOST_SOCKET_PORT_RANGE": "auto"' in text


def test_verl_has_the_platform_under_the_name_that_is_used(wheel: Any) -> None:
    text = (wheel("verl==0.9.1") / "verl" / "plugin" / "platform" / "platform_npu.py").read_text("utf-8")
    assert f'@PlatformRegistry.register(platform="{Ascend().verl_platform}")' in text
    assert f'"{Ascend().ray_noset}"' in text
    assert f'"{Ascend().visible_devices}"' in text
