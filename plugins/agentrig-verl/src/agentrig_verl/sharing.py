"""Selects the engine: the one that computes shared tokens once if that is exact, otherwise verl's own."""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from agentrig.errors import ConfigError
from agentrig.findings import Finding, Situation
from agentrig.hardware import Hardware
from agentrig_verl import schema, symbols
from agentrig_verl.keys import keys_of
from agentrig_verl.planning import folder_of
from agentrig_verl.schema import ACTOR, MODEL
from agentrig_verl.settings import VerlConfig

ATTENTIONS = (None, "sdpa", "flash_attention_2", "flash_attention_3")
"""Values of `attn_implementation` that compute the same function as the forest's attention."""


def choose(engine: Literal["auto", "forest", "verl"], config: Any, *, device: str) -> tuple[bool, str]:
    """Choose the engine of a run.

    Returns:
        Whether shared tokens are computed once, and a sentence with the reason for the log and the report.

    Raises:
        ConfigError: `engine` is `forest`, which cannot train this run.
    """
    reasons = ["algorithm.engine is verl"] if engine == "verl" else list(obstacles(config, device=device))
    if not reasons:
        return True, "tokens that rows share are computed once (algorithm.engine=verl trains with verl's own engine)"
    if engine == "forest":
        raise ConfigError(
            f"[algorithm] verl: engine = forest cannot train this run: {'; '.join(reasons)}. Change that, or leave "
            "engine at auto"
        )
    return False, f"verl's own engine trains, and computes each row by itself: {'; '.join(reasons)}"


def check_engine(situation: Situation) -> Iterator[Finding]:
    """For `agentrig doctor`: which engine would train, and why? A model's configuration is not downloaded for this."""
    plan, hardware = situation.plan, situation.hardware
    if plan is None or hardware is None or not schema.installed() or symbols.lacking():
        return  # findings of their own
    settings = plan.configs["algorithm"]
    try:
        found = foreseen(settings, hardware)
        if found is None:
            evidence = f"decided when the run starts: {settings.model or 'the model'} is not on this machine yet"
            yield Finding.skipped("verl engine", evidence)
            return
        forest, why = found
    except ConfigError as error:
        yield Finding.problem("verl engine", str(error))
    else:
        yield Finding.ok("verl engine", f"{'forest' if forest else 'verl'} would train: {why}")


def foreseen(settings: VerlConfig, hardware: Hardware) -> tuple[bool, str] | None:
    """Return what `choose` will return for a run; None while the model is not on this machine.

    Raises:
        ConfigError: Keys that verl does not have, or an engine that cannot train the run.
    """
    folder = folder_of(settings.model)
    keys = keys_of(settings, hardware, plan=None)
    config = schema.compose(keys, trusted={f"{MODEL}.path": str(folder or settings.model)})
    if folder is None and settings.engine != "verl":
        return None
    return choose(settings.engine, config, device=hardware.torch_device)


def obstacles(config: Any, *, device: str) -> Iterator[str]:
    """Yield the reasons why a run cannot share tokens exactly, or why this is not tested."""
    actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
    if device != "cuda":
        yield f"the device is {device}; shared tokens are tested on cuda"
    elif importlib.util.find_spec("torch.nn.attention.varlen") is None:
        yield "this torch has no attention for sequences of different lengths (torch.nn.attention.varlen)"
    if actor.strategy not in ("fsdp", "fsdp2"):
        yield f"{ACTOR}.strategy is {actor.strategy}, not fsdp or fsdp2"
        return
    wanted: tuple[tuple[str, Any, Any], ...] = (
        (f"{ACTOR}.ulysses_sequence_parallel_size", actor.ulysses_sequence_parallel_size, 1),
        (f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size", actor.fsdp_config.ulysses_sequence_parallel_size, 1),
        (f"{ACTOR}.fsdp_config.wrap_policy.min_num_params", actor.fsdp_config.wrap_policy.get("min_num_params", 0), 0),
        (f"{ACTOR}.calculate_sum_pi_squared", actor.calculate_sum_pi_squared, False),
        (f"{ACTOR}.fsdp_config.full_determinism", actor.fsdp_config.full_determinism, False),
        (f"{ACTOR}.fsdp_config.qat.enable", actor.fsdp_config.qat.enable, False),
        (f"{MODEL}.use_liger", model.use_liger, False),
        (f"{MODEL}.use_fused_kernels", model.use_fused_kernels, False),
        (f"{MODEL}.tiled_mlp.enabled", model.tiled_mlp.enabled, False),
        (f"{MODEL}.mtp.enable", model.mtp.enable, False),
        (f"{MODEL}.enable_activation_offload", model.enable_activation_offload, False),
    )
    yield from (f"{key} is {value}" for key, value, plain in wanted if value != plain)
    attention = model.override_config.get("attn_implementation")
    if attention not in ATTENTIONS:
        yield f"{MODEL}.override_config.attn_implementation is {attention}"
    yield from of_model(model)


def of_model(model: Any) -> Iterator[str]:
    """Yield the reasons in verl's table `actor_rollout_ref.model` why tokens cannot be shared."""
    from agentrig_forest.scoring import SHARING
    from transformers import AutoConfig

    about = AutoConfig.from_pretrained(model.hf_config_path or model.path, trust_remote_code=model.trust_remote_code)
    about.update({k: v for k, v in model.override_config.items() if k != "attn_implementation"})
    if about.model_type not in SHARING:
        yield f"models of type {about.model_type} are not among {', '.join(sorted(SHARING))}"
    if getattr(about, "sliding_window", None) and getattr(about, "use_sliding_window", True):
        yield f"the model's attention sees {about.sliding_window} tokens only (sliding_window)"
    if getattr(about, "attention_dropout", 0.0):
        yield f"the model has dropout (attention_dropout = {about.attention_dropout})"


def by_rank(groups: Sequence[str], lengths: Sequence[int], ranks: int) -> list[int]:
    """Return an order of rows in which the rows of a rank, and those of a group, are adjacent.

    Each rank gets equally many rows. The longest groups are placed first, each on the rank with the fewest tokens that
    has room for it; a group without such a rank is split. A rank keeps the groups in their order.

    Args:
        lengths: Tokens of each row.
        ranks: How many ranks there are; they divide the number of rows.
    """
    room = len(groups) // ranks
    members: dict[str, list[int]] = defaultdict(list)
    for row, group in enumerate(groups):
        members[group].append(row)
    placed: list[list[int]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    todo = sorted(members.values(), key=lambda rows: -sum(lengths[i] for i in rows))
    for rows in todo:
        left = rows
        while left:
            free = [r for r in range(ranks) if len(placed[r]) + len(left) <= room]
            rank = min(free or [r for r in range(ranks) if len(placed[r]) < room], key=lambda r: tokens[r])
            now, left = left[: room - len(placed[rank])], left[room - len(placed[rank]) :]
            placed[rank] += now
            tokens[rank] += sum(lengths[i] for i in now)
    first = {row: rows[0] for rows in members.values() for row in rows}
    return [row for rows in placed for row in sorted(rows, key=lambda row: (first[row], row))]
