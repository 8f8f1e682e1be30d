"""Checks across keys: settings that contradict each other, losses that merging would change, loggers' logins."""

from __future__ import annotations

import contextlib
import importlib.util
import io
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from agentrig.credit import Credit, GroupConfig, grpo
from agentrig.errors import ConfigError, nearest
from agentrig.findings import Finding, Situation
from agentrig.hardware.tools import ask
from agentrig.trackers.logins import swanlab_ready, wandb_ready
from agentrig_verl import schema, symbols
from agentrig_verl.keys import keys_of, memory_plan
from agentrig_verl.schema import ACTOR, ROLLOUT
from agentrig_verl.sharing import foreseen


def check_symbols(situation: Situation) -> Iterator[Finding]:
    """For `agentrig doctor`: does the installed verl have everything that agentrig uses?"""
    if not schema.installed():
        return  # a finding of its own
    version = situation.versions.get("verl", "")
    missing = symbols.lacking()
    if missing:
        cure = f"install verl {symbols.SUPPORTED}, with the versions that docs/hardware.md names for it"
        yield Finding.problem("verl", f"agentrig cannot use verl {version}: it has no {', '.join(missing)}", cure=cure)
    else:
        yield Finding.ok("verl", f"verl {version} has everything that agentrig uses")


def check_settings(situation: Situation) -> Iterator[Finding]:
    """For `agentrig doctor`: are verl's settings consistent, and can its loggers start?"""
    if situation.plan is None or situation.hardware is None or not schema.installed() or symbols.lacking():
        return  # findings of their own
    config = situation.plan.configs["algorithm"]
    try:
        composed = schema.compose(keys_of(config, situation.hardware, plan=None))
        check(composed, merge=config.merge, credit=situation.plan.build("credit"))
        check_loggers(composed)
    except ConfigError as error:
        yield Finding.problem("verl settings", str(error))
    else:
        yield Finding.ok("verl settings", "verl accepts them, and its loggers can start")


def check_memory_plan(situation: Situation) -> Iterator[Finding]:
    """For `agentrig doctor`: which of verl's keys would a run choose, so that server and learner fit the device?"""
    plan, hardware = situation.plan, situation.hardware
    if plan is None or hardware is None or not schema.installed() or symbols.lacking():
        return  # findings of their own
    config = plan.configs["algorithm"]
    sizes = [device.memory for device in situation.probes[hardware.name].devices if device.memory]
    if not sizes and not hardware.memory_limit:
        why = f"{hardware.name} does not say its memory; hardware.memory_gib=24 computes for a device of 24 GiB"
        yield Finding.skipped("memory plan", why)
        return
    try:
        memory = min(sizes, default=hardware.memory_limit)
        forest, _ = foreseen(config, hardware) or (False, "")  # verl's own engine needs more
        calls = plan.runners.n * plan.runners.threads
        found = memory_plan(config, hardware, calls=calls, memory=memory, forest=forest)
        if found is None:
            why = f"the shape of {config.model or 'the model'} is not known, or it is not trained with FSDP"
            yield Finding.skipped("memory plan", why)
        else:
            yield Finding.ok("memory plan", f"about: {found.describe(found.choose())}")
    except ConfigError as error:
        yield Finding.of_error("memory plan", error)


ACCEPTS_VLLM = """
import importlib.metadata, json
import verl.third_party.vllm
print(json.dumps({"verl": importlib.metadata.version("verl"), "vllm": importlib.metadata.version("vllm")}))
"""


def check_verl_vllm(situation: Situation) -> Iterator[Finding]:
    """Does this verl accept this vLLM? Versions alone do not tell, so verl's own gate is imported."""
    if not {"verl", "vllm"} <= situation.versions.keys():
        return
    answer = ask(ACCEPTS_VLLM, environ=situation.environ)
    pair = f"verl {situation.versions['verl']} with vllm {situation.versions['vllm']}"
    if answer.ok:
        yield Finding.ok("verl-vllm", f"{pair}: verl imports it")
    else:
        cure = "install a pair of one tested stack (docs/hardware.md)"
        yield situation.failure("verl-vllm", pair, answer, cure=cure)


DEFAULT = partial(grpo, config=GroupConfig())
"""The credit of a run that names none."""


def check(config: Any, *, merge: bool = True, credit: Credit = DEFAULT) -> None:
    """Check combinations of keys.

    Args:
        config: verl's composed configuration.
        merge: Whether calls that extend one another become one sequence.
    """
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from verl.trainer.ppo import core_algos
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    actor, rollout, algorithm = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout, config.algorithm
    estimator, loss = algorithm.adv_estimator, actor.policy_loss.loss_mode
    for key, value, there in (
        ("algorithm.adv_estimator", estimator, core_algos.ADV_ESTIMATOR_REGISTRY),
        (f"{ACTOR}.policy_loss.loss_mode", loss, core_algos.POLICY_LOSS_REGISTRY),
    ):
        if value not in there:
            names = sorted(str(getattr(name, "value", name)) for name in there)
            raise ConfigError(
                f"[algorithm] verl has no {key} {value}.{nearest(value, names)} It has: {', '.join(names)}"
            )
    default = getattr(credit, "func", None) is DEFAULT.func and getattr(credit, "keywords", None) == DEFAULT.keywords
    name = getattr(getattr(credit, "func", None), "__name__", "")
    batch, gpus = config.data.train_batch_size, config.trainer.n_gpus_per_node * config.trainer.nnodes
    mode, sequences = config.trainer.v1.trainer_mode, by_sequence(config) if merge else None
    wrong: Sequence[tuple[Any, str]] = (
        (mode != "sync", f"trainer.v1.trainer_mode is {mode}; agentrig's rollouts are synchronous"),
        (not config.trainer.use_v1, "trainer.use_v1 = false selects verl's old trainer, which has no agent loop"),
        (rollout.name != "vllm", f"{ROLLOUT}.name must be vllm, whose endpoint returns token ids"),
        (
            actor.checkpoint.async_save,
            "checkpoint.async_save must be false: a checkpoint must be complete when the step ends",
        ),
        (
            need_critic(config),
            f"adv_estimator {estimator} needs a critic, which agentrig does not train; use grpo or another estimator "
            "without one",
        ),
        (
            estimator == "grpo" and rollout.n < 2,
            f"{ROLLOUT}.n must be 2 or more: grpo compares a task's rollouts",
        ),
        # verl itself checks these three only where passes are counted in rows.
        (
            actor.ppo_mini_batch_size > batch,
            f"{ACTOR}.ppo_mini_batch_size is {actor.ppo_mini_batch_size}, more than data.train_batch_size, {batch}",
        ),
        (batch * rollout.n % gpus, f"a step has {batch * rollout.n} rollouts, which {gpus} GPUs cannot share equally"),
        (actor.strategy == "megatron", f"{ACTOR}.strategy is megatron, whose keys are in another YAML; use fsdp"),
        (rollout.temperature <= 0, f"{ROLLOUT}.temperature must be above 0: greedy rollouts are equal"),
        (
            not default and estimator != "grpo",
            f"adv_estimator {estimator} takes verl's own advantages, so what [credit] says would not be used: leave "
            "one of them out",
        ),
        (
            not (algorithm.norm_adv_by_std_in_grpo or name == "dr_grpo"),
            "algorithm.norm_adv_by_std_in_grpo = false would change nothing: advantages come from [credit], whose "
            'use = "dr-grpo" does not divide by the deviation',
        ),
        (
            algorithm.use_kl_in_reward and estimator == "grpo",
            "algorithm.use_kl_in_reward would change nothing: with grpo, advantages come from the rollouts' rewards "
            f"alone; set {ACTOR}.use_kl_loss",
        ),
        (
            sequences,
            f"{sequences} works on whole sequences, so merging calls would change what is learned: set "
            "algorithm.merge=false, or leave it at verl's own",
        ),
        (rollout.val_kwargs.n != 1, "val_kwargs.n must be 1: validation runs the agent once on each task"),
    )
    for broken, why in wrong:
        if broken:
            raise ConfigError(f"[algorithm] verl: {why}")
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints that everything is fine
            validate_config(
                config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config)
            )
    except (AssertionError, ValueError, TypeError, HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"[algorithm] verl refuses this configuration: {error}") from error


MERGEABLE_LOSSES = frozenset({"vanilla", "dppo_kl", "gpg", "dro", "cispo"})
"""Policy losses of which merged and separate calls have been shown to have the same gradient (test_verl_loss.py)."""


def by_sequence(config: Any) -> str | None:
    """Return the setting, `key = value`, with which verl does not treat each token separately, or None.

    With such a setting, the loss of two merged calls differs from that of the same calls unmerged.
    """
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    correction = algorithm.rollout_correction
    found = {
        f"{ACTOR}.loss_agg_mode": (actor.loss_agg_mode, str(actor.loss_agg_mode).startswith("seq-")),
        f"{ACTOR}.policy_loss.loss_mode": (
            actor.policy_loss.loss_mode,
            actor.policy_loss.loss_mode not in MERGEABLE_LOSSES,
        ),
        "algorithm.adv_estimator": (algorithm.adv_estimator, algorithm.adv_estimator != "grpo"),
        "algorithm.rollout_correction.rollout_is": (correction.rollout_is, correction.rollout_is == "sequence"),
        "algorithm.rollout_correction.rollout_rs": (correction.rollout_rs, "seq_" in str(correction.rollout_rs)),
    }
    return next((f"{key} = {value}" for key, (value, does) in found.items() if does), None)


LOGGERS = frozenset({"tensorboard", "wandb", "swanlab", "mlflow", "clearml", "trackio"})
"""verl's loggers that are separate packages, with modules of that name."""


def check_loggers(config: Any) -> None:
    """Check that verl's loggers can start; verl itself makes them after the first measurement.

    Raises:
        ConfigError: verl has no such logger, its package is missing, or W&B or SwanLab has no login.
    """
    from verl.utils.tracking import Tracking

    names = [config.trainer.logger] if isinstance(config.trainer.logger, str) else list(config.trainer.logger)
    for name in names:
        if name not in Tracking.supported_backend:
            raise ConfigError(
                f'[algorithm] verl has no logger "{name}".{nearest(name, Tracking.supported_backend)} '
                f"It has: {', '.join(Tracking.supported_backend)}"
            )
        if name in LOGGERS and importlib.util.find_spec(name) is None:
            raise ConfigError(
                f'[algorithm] verl: the logger "{name}" of trainer.logger needs a package that is not installed: '
                f"pip install {name}, or set algorithm.verl.trainer.logger='[\"console\"]'"
            )
    for name, ready in (("wandb", wandb_ready), ("swanlab", swanlab_ready)):
        if name in names and not ready():
            raise ConfigError(
                f"[algorithm] verl: trainer.logger has {name}, which has no login here: set {name.upper()}_API_KEY (or "
                f"run `{name} login`), set {name.upper()}_MODE=offline, or set "
                "algorithm.verl.trainer.logger='[\"console\"]'"
            )
