"""`agl.VERL(config)` as the algorithm `verl` of agentrig-verl, with the same configuration, or as another algorithm."""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Collection, Mapping
from typing import Any

import attrs

from agentrig.errors import AgentrigError, ConfigError
from agentrig.plugins.specs import AlgorithmSpec

log = logging.getLogger(__name__)

MODEL = "actor_rollout_ref.model.path"
PLUGIN = "agentrig_verl"

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"

KEYS: Mapping[str, str] = {
    MODEL: "model",
    "actor_rollout_ref.model.lora_rank": "lora_rank",
    "actor_rollout_ref.model.lora_alpha": "lora_alpha",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "gradient_checkpointing",
    "data.train_batch_size": "tasks_per_step",
    "data.max_response_length": "max_tokens",
    f"{ROLLOUT}.n": "group_size",
    f"{ROLLOUT}.temperature": "temperature",
    f"{ROLLOUT}.top_p": "top_p",
    f"{ROLLOUT}.val_kwargs.temperature": "val_temperature",
    f"{ACTOR}.optim.lr": "lr",
    f"{ACTOR}.optim.lr_warmup_steps": "warmup_steps",
    f"{ACTOR}.optim.weight_decay": "weight_decay",
    f"{ACTOR}.grad_clip": "max_grad_norm",
    f"{ACTOR}.clip_ratio_low": "clip_low",
    f"{ACTOR}.clip_ratio_high": "clip_high",
    f"{ACTOR}.ppo_epochs": "ppo_epochs",
    f"{ACTOR}.loss_agg_mode": "loss_agg_mode",
    f"{ACTOR}.kl_loss_coef": "kl_loss_coef",
    "trainer.test_freq": "validate_every",
    "trainer.save_freq": "save_every",
    "trainer.total_training_steps": "steps",
}
"""A key of verl, and the same setting of agentrig's algorithms."""

DIVIDED = "algorithm.norm_adv_by_std_in_grpo"

DEFAULTS: Mapping[str, Any] = {DIVIDED: True, f"{ACTOR}.optim.weight_decay": 0.01}
"""verl's own values, where agentrig's algorithms have others."""

NEUTRAL: Mapping[str, Any] = {
    "algorithm.adv_estimator": "grpo",
    "algorithm.use_kl_in_reward": False,
    f"{ACTOR}.entropy_coeff": 0,
    "trainer.critic_warmup": 0,
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 1,
    "trainer.val_before_train": True,
}
"""Values that describe what agentrig's algorithms do anyway."""

ROWS = ("data.train_files", "data.val_files")
"""Files of tasks: a script gives their rows to `Trainer.fit` itself, and those are used."""


def is_verl(source: Any) -> bool:
    """Return whether something is an `agl.VERL`, with its configuration."""
    return not isinstance(source, type) and hasattr(source, "agentrig_keeps")


def verl_spec(verl: Any, *, name: str, summary: str) -> AlgorithmSpec:
    """Return the spec of `verl` with the configuration as its defaults; a run sets other values by key.

    Keys that agentrig replaces by a part of its own are left out; the log says which, and why.
    """
    if verl.trainer_cls is not None or verl.daemon_cls is not None:
        raise AgentrigError(
            "agl.VERL: trainer_cls and daemon_cls are parts of Agent Lightning's trainer, which agentrig-verl "
            "replaces: leave them out, or write an algorithm of your own (docs/algorithms.md)"
        )
    try:
        plugin: Any = importlib.import_module(PLUGIN)
        schema: Any = importlib.import_module(f"{PLUGIN}.schema")
    except ModuleNotFoundError as error:
        raise AgentrigError(
            "agl.VERL(config) runs on agentrig-verl, which is not installed: pip install agentrig-verl"
        ) from error
    spec: AlgorithmSpec = next(iter(plugin.register_algorithms()))
    keys = dict(schema.flatten(verl.config))
    model = str(keys.pop(MODEL, ""))
    for key in [key for key in keys if key.startswith("agentlightning.") or schema.ignored(key) is not None]:
        why = schema.ignored(key) or "it belongs to Agent Lightning's own trainer"
        log.info("%s leaves out %s = %r: %s", name, key, keys.pop(key), why)
    divided = keys.pop(DIVIDED, True)
    config = _with_defaults(spec.config, schema, model, keys)
    return attrs.evolve(spec, name=name, summary=summary, config=config, credit="grpo" if divided else "dr-grpo")


def keys_for(config_class: type, config: Mapping[str, Any], *, rows: int) -> tuple[dict[str, Any], list[str]]:
    """Return verl's configuration as another algorithm's keys, and `key = value` of what that has no key for.

    verl's epochs over `rows` become steps.
    """
    given = {**DEFAULTS, **_flat(config)}
    estimator = given.get("algorithm.adv_estimator", "gae")
    if estimator != "grpo":
        raise ConfigError(
            f"this script trains by algorithm.adv_estimator = {estimator!r} of verl, not by grpo: run it without "
            "--algorithm on a GPU, or set adv_estimator to grpo in the script"
        )
    batch = int(given.get("data.train_batch_size", 1024))
    given.setdefault("trainer.total_training_steps", int(given.pop("trainer.total_epochs", 30)) * max(1, rows // batch))
    if not given.pop(f"{ACTOR}.use_kl_loss", False):
        given.pop(f"{ACTOR}.kl_loss_coef", None)
    if "data.train_batch_size" in given and f"{ACTOR}.ppo_mini_batch_size" in given:
        given["mini_batches"] = max(1, batch // int(given.pop(f"{ACTOR}.ppo_mini_batch_size")))
    if "data.max_prompt_length" in given and "data.max_response_length" in given:
        given["max_length"] = int(given.pop("data.max_prompt_length")) + int(given["data.max_response_length"])
    for often in ("trainer.test_freq", "trainer.save_freq"):  # not positive: never, but a checkpoint at the end stays
        if given.get(often, 1) < 1:
            given[often] = 0 if often == "trainer.test_freq" else given["trainer.total_training_steps"]
    known = attrs.fields_dict(config_class)
    keys, absent = {}, []
    for key, value in given.items():
        name = KEYS.get(key, key)
        if name in known:
            keys[name] = value
        elif key not in (*DEFAULTS, *ROWS) and (key not in NEUTRAL or NEUTRAL[key] != value):
            absent.append(f"{key} = {value!r}")
    return keys, absent


def in_words_of_script(message: str, keys: Collection[str], chosen: Collection[str]) -> str:
    """Return an error about settings of another algorithm in the names that the script gives them.

    Those of `keys` that somebody has chosen beside the script keep their names.
    """
    own = {name: key for key, name in KEYS.items()}
    own["max_length"] = "data.max_prompt_length + data.max_response_length"
    for name in set(keys) & own.keys() - set(chosen):
        message = re.sub(rf"\[algorithm\] (?:.*: '{name}'|{name}) ", f"{own[name]} ", message)
    return message


def credit_for(config: Mapping[str, Any]) -> str:
    """Return the credit that has the advantages of verl's configuration: `grpo`, or `dr-grpo` without the division."""
    return "grpo" if {**DEFAULTS, **_flat(config)}[DIVIDED] else "dr-grpo"


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables as one, with dotted keys."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def _with_defaults(base: Any, schema: Any, model: str, keys: Mapping[str, Any]) -> type:
    """Return the config class with other defaults; keys of a run are added to those of the configuration."""
    fields = attrs.fields_dict(attrs.resolve_types(base))

    def merged(given: Mapping[str, Any]) -> dict[str, Any]:
        return {**keys, **schema.flatten(given)}

    changed: dict[str, Any] = {
        "model": attrs.field(default=model, type=str, metadata=fields["model"].metadata),
        "verl": attrs.field(
            factory=dict,
            type=fields["verl"].type,
            metadata=fields["verl"].metadata,
            converter=merged,
            validator=fields["verl"].validator,
        ),
    }
    made: type = attrs.make_class("VerlConfig", changed, bases=(base,), frozen=True, kw_only=True, slots=True)
    return made
