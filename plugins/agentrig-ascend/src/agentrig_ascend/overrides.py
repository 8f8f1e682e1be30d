"""The changes to verl's configuration that an NPU needs, each with its reason and the versions it is for."""

from __future__ import annotations

from collections.abc import Sequence

from agentrig.hardware import Override

ALL = {"verl": ">=0.5,<1"}
OLD = {"verl": ">=0.5,<0.8"}
NEW = {"verl": ">=0.8,<1"}
LATEST = {"verl": ">=0.9,<1"}

ROLLOUT = "actor_rollout_ref.rollout"
ACTOR = "actor_rollout_ref.actor"

REFERENCE: Sequence[Override] = (
    Override(
        key="trainer.device",
        value="npu",
        reason="verl before 0.7 asks Ray for a GPU otherwise; later ones find out themselves",
        versions=ALL,
    ),
    Override(
        key=f"{ACTOR}.use_torch_compile",
        value=False,
        reason="torch.compile has no NPU backend without torchair",
        versions=OLD,
    ),
    Override(
        key=f"{ROLLOUT}.engine_kwargs.vllm.enable_auto_tool_choice",
        delete=True,
        reason="the reference's NPU profile serves without a tool parser",
        versions=ALL,
    ),
    Override(
        key=f"{ROLLOUT}.engine_kwargs.vllm.tool_call_parser",
        delete=True,
        reason="the reference's NPU profile serves without a tool parser",
        versions=ALL,
    ),
)
"""The reference's NPU profile against its CUDA one, as far as the hardware asks for it. The profile's other
three keys (logger, val_before_train, save_freq) are a recipe's business."""

SINCE: Sequence[Override] = (
    Override(
        key=f"{ACTOR}.fsdp_config.use_torch_compile",
        value=False,
        reason="since verl 0.8 the engine reads this key, and actor.use_torch_compile no longer reaches it",
        versions=NEW,
    ),
    Override(
        key="actor_rollout_ref.ref.fsdp_config.use_torch_compile",
        value=False,
        reason="as for the actor: since verl 0.8 the reference model's engine has its own key",
        versions=NEW,
    ),
    Override(
        key=f"{ACTOR}.strategy",
        value="fsdp2",
        soft=True,
        reason="verl 0.9's own NPU scripts train with fsdp2",
        versions=LATEST,
    ),
    Override(
        key=f"{ROLLOUT}.enable_chunked_prefill",
        value=False,
        soft=True,
        reason="verl 0.9's own NPU scripts turn it off",
        versions=LATEST,
    ),
)
"""What newer versions of verl need on top. Their scripts also give the rollout 0.6 of the memory: a recipe's choice."""
