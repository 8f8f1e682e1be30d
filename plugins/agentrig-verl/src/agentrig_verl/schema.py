"""verl's configuration, composed from verl's own YAML: a key that verl does not have is an error before Ray starts."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrig.errors import ConfigError, nearest

OPEN = frozenset(
    {
        "actor_rollout_ref.model.override_config",
        "actor_rollout_ref.rollout.engine_kwargs.vllm",
        "actor_rollout_ref.rollout.engine_kwargs.sglang",
        "actor_rollout_ref.rollout.engine_kwargs.trtllm",
        "actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs",
        "actor_rollout_ref.model.fused_kernel_options",
        "data.apply_chat_template_kwargs",
        "ray_kwargs.ray_init",
        "ray_kwargs.ray_init.runtime_env",
    }
)
"""Tables that verl hands on to another library: below them any key may be added."""

ADDED = frozenset({"actor_rollout_ref.rollout.agent.agent_loop_manager_class"})
"""Keys that verl reads and its dataclasses have, but that its YAML leaves out."""

IGNORED: Mapping[str, str] = {
    "actor_rollout_ref.actor.use_prefix_grouper": "verl ignores it since 0.8",
    "actor_rollout_ref.rollout.skip_tokenizer_init": "verl 0.9's vLLM server always loads the tokenizer",
    "data.val_batch_size": "validation goes through agentrig, which takes the whole split",
    "data.train_files": "tasks come from agentrig; set [tasks]",
    "data.val_files": "tasks come from agentrig; set [tasks] and run.validation",
    "data.custom_cls.path": "tasks come from agentrig; set [tasks]",
    "data.filter_overlong_prompts": "an agent's prompts are not known before it runs",
    "trainer.rollout_data_dir": "every rollout is in the run directory, as Parquet",
    "trainer.validation_data_dir": "every rollout is in the run directory, as Parquet",
    "trainer.default_local_dir": "checkpoints go to the run directory",
    "trainer.resume_mode": "use agentrig train --resume",
    "trainer.resume_from_path": "use agentrig train --resume",
    "actor_rollout_ref.model.path": "set algorithm.model",
    "reward.custom_reward_function.path": "set [reward]",
    "reward.reward_model.enable": "set [reward]",
    "actor_rollout_ref.model.lora.rank": "verl's FSDP engine reads actor_rollout_ref.model.lora_rank",
    "actor_rollout_ref.rollout.agent.num_workers": "agentrig's runners take the place of verl's; set runners.n",
    "actor_rollout_ref.rollout.agent.default_agent_loop": "agentrig's runners take the place of verl's; set [agent]",
    "data.val_max_samples": "set run.validation_tasks",
    "trainer.val_only": "use agentrig eval",
    "trainer.log_val_generations": "every rollout is in the run directory, as Parquet",
}
"""Keys that would have no effect here; setting one is an error that says why."""


def config_directory() -> Path:
    """Return the folder of verl's trainer YAML, without importing verl.

    Raises:
        ConfigError: verl is not installed.
    """
    spec = importlib.util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("verl is not installed here; docs/gpu.md names the command that builds the GPU environment")
    return Path(next(iter(spec.submodule_search_locations))) / "trainer" / "config"


def installed() -> bool:
    """Whether verl and Hydra can be imported here."""
    return all(importlib.util.find_spec(name) is not None for name in ("verl", "hydra", "omegaconf"))


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables as dotted keys; below an open table (see `OPEN`) dicts stay values.

    Raises:
        ConfigError: A key is given twice, once nested and once dotted.
    """
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        path = f"{prefix}.{key}" if prefix else key
        inside_open = any(path.startswith(f"{table}.") for table in OPEN - {"ray_kwargs.ray_init"})
        parts = flatten(value, path) if isinstance(value, Mapping) and value and not inside_open else {path: value}
        for name, part in parts.items():
            if name in flat:
                raise ConfigError(f"[algorithm] verl: {name} is set twice")
            flat[name] = part
    return flat


def compose(settings: Mapping[str, Any], *, trusted: Mapping[str, Any] | None = None) -> Any:
    """Compose verl's PPO configuration.

    Args:
        settings: Dotted or nested keys that a recipe, a run file or the command line sets.
        trusted: Dotted keys that this plugin sets itself, whatever `IGNORED` says.

    Returns:
        An OmegaConf `DictConfig`, struct mode on.

    Raises:
        ConfigError: A key that verl has not, a value of another type, or a key that would be ignored or overwritten.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf, open_dict

    GlobalHydra.instance().clear()
    with initialize_config_dir(str(config_directory()), version_base=None):
        config = hydra_compose("ppo_trainer")
    OmegaConf.set_struct(config, True)
    flat, trusted = flatten(settings), dict(trusted or {})
    for key in flat:
        if key in IGNORED:
            raise ConfigError(f"[algorithm] verl: {key} would have no effect here: {IGNORED[key]}")
        if key in trusted and flat[key] != trusted[key]:
            raise ConfigError(f"[algorithm] verl: {key} is agentrig's to set, to {trusted[key]!r}; leave it out")
    known: list[str] = []
    for key, value in {**flat, **trusted}.items():
        value = _check(config, key, value, known)
        with open_dict(config):
            OmegaConf.update(config, key, value, merge=True, force_add=True)
    return config


def _check(config: Any, key: str, value: Any, known: list[str]) -> Any:
    """Return the value, a number in text as a number; raise unless verl's YAML has the key and a value of its kind."""
    from omegaconf import DictConfig, OmegaConf

    if any(key.startswith(f"{table}.") for table in OPEN) or key in ADDED:
        return value
    parent_path, _, name = key.rpartition(".")
    parent = OmegaConf.select(config, parent_path) if parent_path else config
    if not isinstance(parent, DictConfig) or name not in list(parent.keys()):  # `in` is False for ???
        if not known:
            known.extend(k for k in leaves(config) if k not in IGNORED)
        raise ConfigError(f"[algorithm] verl has no key {key}.{_suggest(key, known)}")
    if OmegaConf.is_missing(parent, name) or OmegaConf.is_interpolation(parent, name):
        return value
    old = parent[name]
    if isinstance(old, DictConfig) and not isinstance(value, Mapping):
        raise ConfigError(f"[algorithm] verl: {key} is a table with the keys {', '.join(map(str, old))}")
    if old is not None and value is not None and not _fits(old, value):
        raise ConfigError(
            f"[algorithm] verl: {key} = {value!r} does not fit; verl's own value is {old!r} ({type(old).__name__})"
        )
    if isinstance(value, str) and isinstance(old, int | float):
        return int(value) if re.fullmatch(r"[+-]?\d+", value) else float(value)
    return value


def _fits(old: Any, value: Any) -> bool:
    from omegaconf import ListConfig

    if isinstance(old, bool):
        return isinstance(value, bool)
    if isinstance(old, int | float):
        if isinstance(value, str):  # YAML reads 1e-6 as text, and so do verl's own scripts
            try:
                float(value)
            except ValueError:
                return False
            return True
        return isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(old, ListConfig):
        return isinstance(value, Sequence)
    return True


def leaves(config: Any, prefix: str = "") -> list[str]:
    """Return the dotted keys of all values in a configuration."""
    from omegaconf import DictConfig

    found = []
    for name in config:
        path = f"{prefix}.{name}" if prefix else str(name)
        node = config._get_node(name)
        if isinstance(node, DictConfig) and not node._is_none() and not node._is_interpolation():
            found += leaves(node, path)
        found.append(path)
    return found


def _suggest(key: str, known: Sequence[str]) -> str:
    """Return the nearest whole key, else keys elsewhere that end in the same name."""
    hint = nearest(key, known)
    name = key.rpartition(".")[2]
    same = [k for k in known if k.rpartition(".")[2] == name]
    if same and not any(k in hint for k in same):
        hint += f" Keys of that name: {', '.join(same[:4])}"
    return hint
