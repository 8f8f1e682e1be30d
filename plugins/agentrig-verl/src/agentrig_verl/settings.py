"""The keys of the algorithm `verl`, and what a configuration asks of one device; imports no verl."""

from __future__ import annotations

from typing import Any, Literal

import attrs

from agentrig import setting
from agentrig.errors import ConfigError
from agentrig.hardware.memory import Workload
from agentrig.refusals import Learning
from agentrig_verl import schema, symbols
from agentrig_verl.schema import ACTOR, ROLLOUT


def _known_to_verl(_config: Any, _field: Any, value: dict[str, Any]) -> None:
    """Check the keys against verl's schema, if verl is installed; a run checks them again.

    An unsupported verl is not asked: errors about its other keys would hide the real cause, which the doctor and a
    run report.
    """
    if not schema.installed() or symbols.lacking():
        return
    try:
        schema.compose(value)
    except ConfigError as error:
        raise ValueError(str(error).removeprefix("[algorithm] ")) from None


@attrs.frozen(kw_only=True)
class VerlConfig:
    """Settings of `verl`; verl's own keys are in the table `verl`, under verl's names."""

    model: str = setting("", help="the starting model: a Hugging Face directory (no download) or a name on the Hub")
    engine: Literal["auto", "forest", "verl"] = setting(
        "auto",
        help="what trains: forest computes tokens that calls share once, verl is verl's own engine, auto: forest where "
        "it is exact",
        choices=("auto", "forest", "verl"),
    )
    merge: bool = setting(True, help="train calls that extend an earlier call's tokens as one sequence")
    runners: str = setting(
        "auto",
        help="where runners run: ray (actors over the cluster's CPUs), local (processes here), auto: ray on a cluster",
        choices=("auto", "ray", "local"),
    )
    runner_cpus: float = setting(0.5, help="CPUs that a runner requests from Ray", ge=0)
    worker_logs: bool = setting(False, help="print what verl's workers and vLLM print")
    verl: dict[str, Any] = setting(
        dict, help="verl's own keys, for example actor_rollout_ref.actor.optim.lr = 1e-6", validator=_known_to_verl
    )


def learning(config: VerlConfig) -> Learning:
    """Return how verl learns what a credit says; verl's own values where the run sets none."""
    flat = schema.flatten(config.verl)
    loss = str(flat.get(f"{ACTOR}.policy_loss.loss_mode") or "vanilla")
    return Learning(
        loss="clip" if loss == "vanilla" else loss,
        temperature=float(flat.get(f"{ROLLOUT}.temperature", 1.0)),
        top_p=float(flat.get(f"{ROLLOUT}.top_p", 1.0)),
        max_tokens=int(flat.get("data.max_response_length") or 512),
        own_loop=True,
    )


LORA_SHARE = 0.01
"""Share of the weights that adapters of a usual rank add; rank 32 on all linear layers of 1.5B is 2%."""


def workload(config: VerlConfig) -> Workload | None:
    """Return what the doctor's memory estimate needs of a configuration; None when no model is set."""
    if not config.model:
        return None
    flat = schema.flatten(config.verl)
    context = int(flat.get("data.max_prompt_length") or 512) + int(flat.get("data.max_response_length") or 512)
    micro_batch = int(flat.get(f"{ACTOR}.ppo_micro_batch_size_per_gpu") or 1)
    if flat.get(f"{ACTOR}.use_dynamic_bsz"):
        # verl then fills a micro-batch up to a number of tokens.
        tokens = int(flat.get(f"{ACTOR}.ppo_max_token_len_per_gpu") or 16384)
        micro_batch = max(1, tokens // context)
    nodes = int(flat.get("trainer.nnodes") or 1)
    return Workload(
        model=config.model,
        micro_batch=micro_batch,
        context=context,
        trained=LORA_SHARE if flat.get("actor_rollout_ref.model.lora_rank") else 1.0,
        shards=nodes * int(flat.get("trainer.n_gpus_per_node") or 1),
        nodes=nodes,
    )
