"""What a verl configuration needs from one device, for the doctor's memory estimate; does not import verl."""

from __future__ import annotations

from agentrig.hardware.memory import Workload
from agentrig_verl import schema
from agentrig_verl.schema import ACTOR
from agentrig_verl.settings import VerlConfig

LORA_SHARE = 0.01
"""Share of the weights that adapters of a usual rank add; rank 32 on all linear layers of 1.5B is 2%."""


def workload(config: VerlConfig) -> Workload | None:
    """Return the workload of a configuration; None when no model is set."""
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
