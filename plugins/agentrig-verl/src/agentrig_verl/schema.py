"""verl's configuration, composed from verl's own YAML: a key that verl does not have is an error before Ray starts."""

from __future__ import annotations

import copy
import functools
import importlib.util
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrig.errors import ConfigError, nearest
from agentrig.settings import meant, type_words

MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"
ACTOR = "actor_rollout_ref.actor"

OPEN = frozenset(
    {
        "actor_rollout_ref.model.override_config",
        "actor_rollout_ref.rollout.engine_kwargs.vllm",
        "actor_rollout_ref.rollout.engine_kwargs.sglang",
        "actor_rollout_ref.rollout.engine_kwargs.trtllm",
        "actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs",
        "actor_rollout_ref.model.fused_kernel_options",
        "ray_kwargs.ray_init",
        "ray_kwargs.ray_init.runtime_env",
    }
)
"""Tables that verl passes to another library: they accept any key."""

IGNORED: Mapping[str, str] = {
    # Another part of agentrig does the work.
    "actor_rollout_ref.model.path": "set algorithm.model",
    "data.train_files": "the run's tasks are used: trainer.fit's, or [tasks]",
    "data.val_files": "the run's tasks are used: trainer.fit's, or [tasks]",
    "data.custom_cls.": "tasks come from agentrig; set [tasks]",
    "data.train_max_samples": "set run.train_tasks",
    "data.val_max_samples": "set run.validation_tasks",
    "data.val_batch_size": "validation goes through agentrig, which takes the whole split",
    "data.validation_shuffle": "validation goes through agentrig, which takes the whole split",
    "reward.custom_reward_function.": "set [reward]",
    "reward.reward_manager.": "set [reward]",
    "reward.reward_model.": "set [reward]",
    "reward.sandbox_fusion.": "set [reward]",
    "custom_reward_function.": "set [reward]",
    "reward_model.": "set [reward]",
    "sandbox_fusion.": "set [reward]",
    f"{ROLLOUT}.agent.num_workers": "agentrig's runners replace verl's; set runners.n",
    f"{ROLLOUT}.agent.default_agent_loop": "agentrig's runners replace verl's; set [agent]",
    f"{ROLLOUT}.agent.agent_loop_config_path": "agentrig's runners replace verl's; set [agent]",
    f"{ROLLOUT}.multi_turn.": "turns and tools are the agent's; set [agent]",
    f"{ROLLOUT}.trace.": "every call is in the run directory, as Parquet",
    f"{ROLLOUT}.router_config_path": "agentrig spreads rollouts over the servers itself",
    f"{ROLLOUT}.over_sample_rate": "every rollout is waited for; runners.deadline_s ends one that hangs",
    "trainer.rollout_data_dir": "every rollout is in the run directory, as Parquet",
    "trainer.validation_data_dir": "every rollout is in the run directory, as Parquet",
    "trainer.log_val_generations": "every rollout is in the run directory, as Parquet",
    "trainer.default_local_dir": "checkpoints go to the run directory",
    "trainer.max_actor_ckpt_to_keep": "the run directory keeps the last two checkpoints",
    "trainer.max_critic_ckpt_to_keep": "agentrig trains no critic",
    "trainer.resume_mode": "use agentrig train --resume",
    "trainer.resume_from_path": "use agentrig train --resume",
    "trainer.val_only": "use agentrig eval",
    # No text is made or cut by verl.
    "data.prompt_key": "prompts are the agent's",
    "data.reward_fn_key": "set [reward]",
    "data.tokenizer": "only vLLM tokenizes; set actor_rollout_ref.model.tokenizer_path",
    "data.truncation": "a prompt that is too long is a typed failure; see data.max_prompt_length",
    "data.filter_overlong_prompts": "an agent's prompts are not known before it runs",
    "data.filter_overlong_prompts_workers": "an agent's prompts are not known before it runs",
    "data.tool_config_path": "turns and tools are the agent's; set [agent]",
    "data.function_tool_path": "turns and tools are the agent's; set [agent]",
    "data.return_raw_input_ids": "prompts are the agent's",
    "data.return_raw_chat": "prompts are the agent's",
    "data.return_full_prompt": "prompts are the agent's",
    "data.image_key": "prompts are the agent's",
    "data.video_key": "prompts are the agent's",
    "data.audio_key": "prompts are the agent's",
    "data.image_patch_size": "prompts are the agent's",
    "data.return_multi_modal_inputs": "prompts are the agent's",
    "data.mm_processor_kwargs.": "prompts are the agent's",
    "data.apply_chat_template_kwargs.": "the agent's calls carry chat_template_kwargs, in extra_body",
    "actor_rollout_ref.model.custom_chat_template": "vLLM's endpoint takes the template of the model's tokenizer: put "
    "it there",
    f"{ROLLOUT}.prompt_length": "set data.max_prompt_length",
    f"{ROLLOUT}.response_length": "set data.max_response_length",
    f"{ROLLOUT}.skip_tokenizer_init": "verl 0.9's vLLM server always loads the tokenizer",
    f"{ROLLOUT}.do_sample": "temperature alone decides: 0 is greedy",
    f"{ROLLOUT}.val_kwargs.do_sample": "val_kwargs.temperature alone decides: 0 is greedy",
    # What verl 0.9's synchronous trainer with FSDP does not look at, or agentrig's rollouts do not carry.
    "actor_rollout_ref.actor.use_prefix_grouper": "verl ignores it since 0.8",
    "actor_rollout_ref.model.lora.rank": "verl's FSDP engine reads actor_rollout_ref.model.lora_rank",
    f"{ROLLOUT}.nnodes": "servers and trainer share the GPUs; set trainer.nnodes",
    f"{ROLLOUT}.n_gpus_per_node": "servers and trainer share the GPUs; set trainer.n_gpus_per_node",
    f"{ROLLOUT}.disaggregation.": "it belongs to SGLang",
    f"{ROLLOUT}.enable_rollout_routing_replay": "vLLM's endpoint does not return how experts were chosen",
    "algorithm.use_pf_ppo": "verl's trainer no longer looks at it",
    "algorithm.pf_ppo.": "verl's trainer no longer looks at it",
    "algorithm.filter_groups.": "it samples prompts one by one within a step; agentrig's steps are whole batches",
    "trainer.v1.sampler.sync_refill_failed_groups": "it draws prompts one by one within a step; agentrig's steps are "
    "whole batches",
    "data.gen_batch_size": "a step samples what it trains on; set data.train_batch_size",
    "trainer.critic_warmup": "agentrig trains no critic, and each step must train something",
    "trainer.esi_redundant_time": "verl's trainer no longer looks at it",
    "critic.": "agentrig trains no critic",
    "distillation.": "agentrig's rollouts ask no teacher",
    "skip.": "agentrig's rollouts are not verl's to skip",
}
"""Keys, and tables (with a dot at the end), that have no effect here or would break a step, and why.

Setting one to anything but verl's own value is an error that says so.
"""

COUNTS = (
    "data.train_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    f"{ROLLOUT}.n",
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    "actor_rollout_ref.actor.ppo_epochs",
    "trainer.total_epochs",
    "trainer.total_training_steps",
    "trainer.nnodes",
    "trainer.n_gpus_per_node",
)
"""Keys whose value is a whole number from 1: what verl's YAML has there does not tell it from a share."""


def package() -> Path:
    """Return the folder of the installed package `verl`, without importing it.

    Raises:
        ConfigError: verl is not installed.
    """
    spec = importlib.util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("verl is not installed here; docs/gpu.md names the command that builds the GPU environment")
    return Path(next(iter(spec.submodule_search_locations)))


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


@functools.cache
def _own(directory: Path) -> Any:
    """Return verl's own configuration, struct mode on; reading its some forty files takes half a second."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf

    GlobalHydra.instance().clear()
    with initialize_config_dir(str(directory), version_base=None):
        config = compose("ppo_trainer")
    OmegaConf.set_struct(config, True)
    return config


def compose(settings: Mapping[str, Any], *, trusted: Mapping[str, Any] | None = None) -> Any:
    """Compose verl's PPO configuration.

    Args:
        settings: Dotted or nested keys that a recipe, a run file or the command line sets.
        trusted: Dotted keys that this plugin sets itself, whatever `IGNORED` says.

    Returns:
        An OmegaConf `DictConfig`, struct mode on.

    Raises:
        ConfigError: A key that verl does not have, a value of another type, or a key that would be ignored or replaced.
    """
    from omegaconf import OmegaConf, open_dict

    config = copy.deepcopy(_own(package() / "trainer" / "config"))
    flat, trusted = flatten(settings), dict(trusted or {})
    for key, value in flat.items():
        if (reason := ignored(key)) and not (_has(config, key) and OmegaConf.select(config, key) == value):
            raise ConfigError(f"[algorithm] verl: {key} cannot be set here: {reason}")
        if key in trusted and flat[key] != trusted[key]:
            raise ConfigError(f"[algorithm] verl: agentrig itself sets {key}, to {trusted[key]!r}; leave it out")
    known: list[str] = []
    for key, value in {**flat, **trusted}.items():
        value = _check(config, key, value, known)
        if key in COUNTS and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ConfigError(f"[algorithm] verl: {key} = {value!r} must be a whole number from 1")
        with open_dict(config):
            OmegaConf.update(config, key, value, merge=True, force_add=True)
    return config


def ignored(key: str) -> str | None:
    """Return why a key cannot be set here (see `IGNORED`); None when it can."""
    return IGNORED.get(key) or next((why for k, why in IGNORED.items() if k[-1] == "." and key.startswith(k)), None)


def _has(config: Any, key: str) -> bool:
    """Whether verl's YAML gives the key a value of its own."""
    from omegaconf import OmegaConf

    parent, _, name = key.rpartition(".")
    table = OmegaConf.select(config, parent) if parent else config
    return OmegaConf.is_dict(table) and name in table


def _check(config: Any, key: str, value: Any, known: list[str]) -> Any:
    """Return the value, a number in text as a number; raise unless verl's YAML has the key and a value of its kind."""
    from omegaconf import DictConfig, OmegaConf

    if any(key.startswith(f"{table}.") for table in OPEN):
        return value
    parent_path, _, name = key.rpartition(".")
    parent = OmegaConf.select(config, parent_path) if parent_path else config
    if not isinstance(parent, DictConfig) or name not in list(parent.keys()):  # `in` is False for ???
        if not known:
            known.extend(k for k in leaves(config) if not ignored(k))
        raise ConfigError(f"[algorithm] verl has no key {key}.{_suggest(key, known)}")
    if OmegaConf.is_missing(parent, name) or OmegaConf.is_interpolation(parent, name):
        return value
    old = parent[name]
    if isinstance(old, DictConfig) and not isinstance(value, Mapping):
        raise ConfigError(f"[algorithm] verl: {key} is a table with the keys {', '.join(map(str, old))}")
    if old is not None and value is not None and not _fits(old, value):
        raise ConfigError(
            f"[algorithm] verl: {key} = {value!r} does not fit; verl's own value is {old!r} ({type_words(type(old))})"
            f"{meant(value, type(old), f'algorithm.verl.{key}')}"
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
