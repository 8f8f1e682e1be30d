"""verl's keys of a run: those of the run file, the hardware's changes, and values that verl's YAML leaves open."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from agentrig.errors import ConfigError
from agentrig.hardware import Hardware, apply_overrides, installed
from agentrig_verl import schema
from agentrig_verl.planning import VerlPlan, plan_of, planned
from agentrig_verl.schema import MODEL, ROLLOUT
from agentrig_verl.settings import VerlConfig

log = logging.getLogger(__name__)


def keys_of(config: VerlConfig, hardware: Hardware, *, plan: VerlPlan | None) -> dict[str, Any]:
    """Return verl's keys, dotted, of a run on that hardware, without those that connect verl to the run.

    Args:
        plan: What chooses the keys of the device's memory; None for values that do not depend on the device.
    """
    flat = changed(config, hardware)
    return _choose({**flat, **attention(flat, hardware), **planned(flat, plan)})


def memory_plan(
    config: VerlConfig, hardware: Hardware, *, calls: int = 0, memory: int | None = None, forest: bool = False
) -> VerlPlan | None:
    """Return the memory plan of a run, see `agentrig_verl.planning.plan_of`.

    Raises:
        ConfigError: The hardware's memory is limited, and nothing can be planned.
    """
    found = plan_of(changed(config, hardware), config.model, hardware, calls=calls, memory=memory, forest=forest)
    if found is None and hardware.memory_limit:
        raise ConfigError(
            f"[hardware] memory_gib: the sizes of {config.model or 'the model'} are not known, or it is not trained "
            f"with FSDP, so verl's keys cannot be planned. Leave it out, and set {ROLLOUT}.gpu_memory_utilization in "
            "[algorithm.verl]"
        )
    return found


def changed(config: VerlConfig, hardware: Hardware) -> dict[str, Any]:
    """Return verl's keys as the run sets them, with the hardware's changes."""
    versions = {**installed(("verl", "vllm", "torch", "torch_npu")), **hardware.host_versions()}
    return apply_overrides(schema.flatten(config.verl), hardware.overrides(versions))


def served_with(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `vllm serve` for verl's keys, so that evaluation serves the model as training does."""
    named = {
        "tokenizer": flat.get(f"{MODEL}.tokenizer_path"),
        "trust-remote-code": flat.get(f"{MODEL}.trust_remote_code"),
        "tensor-parallel-size": flat.get(f"{ROLLOUT}.tensor_model_parallel_size"),
    }
    prefix = f"{ROLLOUT}.engine_kwargs.vllm."
    passed = {k.removeprefix(prefix).replace("_", "-"): v for k, v in flat.items() if k.startswith(prefix)}
    return {k: v for k, v in {**named, **passed}.items() if v is not None and v is not False}


def _choose(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in what verl's YAML leaves open and this algorithm needs."""
    defaults = {"algorithm.adv_estimator": "grpo", f"{ROLLOUT}.name": "vllm", "trainer.n_gpus_per_node": 1}
    return {**defaults, **flat}


_said: set[str] = set()


def attention(flat: Mapping[str, Any], hardware: Hardware) -> dict[str, Any]:
    """Return verl's keys for the attention that works here; log the choice once if it is not flash-attn.

    By default verl requests flash_attention_2 from transformers; the hardware knows whether its kernels are
    installed. Without them sdpa is used on padded sequences: it has no varlen kernel for packed ones, which were
    slower (tests/benchmarks/verl_step.md). If the run file sets an attention, its `use_remove_padding` is kept too.
    """
    key = f"{MODEL}.override_config.attn_implementation"
    if key in flat:
        return {}
    chosen = hardware.best_attention()
    if chosen == "flash_attention_2":
        return {}
    if chosen not in _said:
        _said.add(chosen)
        log.warning("no flash attention is installed: verl's own engine uses %s attention on padded sequences", chosen)
    return {key: chosen, f"{MODEL}.use_remove_padding": False}
