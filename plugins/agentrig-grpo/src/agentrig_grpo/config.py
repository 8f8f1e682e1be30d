"""Settings of `grpo` and its server. Free of torch."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import attrs

from agentrig import setting
from agentrig.learners import LoopSettings, StepSettings

GSPO_CLIP = 0.1
"""The most that the ratio of a whole reply may rise above 1. It is a mean over tokens: the paper's limit is 4e-4."""


@attrs.frozen(kw_only=True, slots=False)  # a class can't have two bases with slots
class TrainingConfig(StepSettings):
    """Settings of the learner, and of the loop around it, whatever it learns from."""

    model: str = setting("mini", help="a local Hugging Face directory, a shipped model, or OWNER/NAME of the hub")
    optimizer: str = setting(
        "adamw",
        help="AdamW with its two moments in fp32, or in 8 bits (agentrig-grpo[8bit]), which saves 6 bytes a weight",
        choices=("adamw", "adamw8bit"),
    )
    moments: str = setting(
        "auto",
        help="where AdamW's two moments are: on the learner's device, or in host memory, from which they pass through "
        "the device in parts; the weights are the same. auto: on the host where they would not fit otherwise",
        choices=("auto", "device", "host"),
    )
    lr: float = setting(1e-6, help="learning rate of AdamW", gt=0)
    warmup_steps: int = setting(0, help="updates over which the learning rate rises from 0", ge=0)
    lr_scheduler_type: str = setting(
        "constant",
        help="the learning rate after its warm-up: `linear` lowers it with each step, almost to 0 in the last",
        choices=("constant", "linear"),
    )
    beta1: float = setting(0.9, help="AdamW's decay of the mean gradient", ge=0, lt=1)
    beta2: float = setting(0.95, help="AdamW's decay of the mean squared gradient", ge=0, lt=1)
    weight_decay: float = setting(0.0, help="AdamW's weight decay", ge=0)
    max_grad_norm: float = setting(1.0, help="the gradient is clipped to this L2 norm", gt=0, le=math.inf)
    kl_loss_coef: float = setting(0.0, help="weight of the KL loss to the starting model; 0 for none", ge=0)
    loss_agg_mode: str = setting(
        "token-mean",
        help="loss aggregation: mean over all tokens, or over each rollout's tokens and then over rollouts",
        choices=("token-mean", "seq-mean-token-mean"),
    )
    ppo_epochs: int = setting(1, help="passes over a step's rollouts", ge=1, le=1000)
    mini_batches: int = setting(1, help="updates in one pass, each on its share of the groups", ge=1, le=1000)
    tokens_per_batch: Literal["auto"] | int = setting(
        "auto",
        help="tokens in one forward pass; gradients add up over passes. `auto`: as many as the device has memory for, "
        "up to 49152, and on a CPU 8192",
        ge=64,
        le=1 << 24,
    )
    dtype: str = setting("auto", help="what is computed in; weights stay fp32", choices=("auto", "float32", "bfloat16"))
    gradient_checkpointing: Literal["auto", True, False] = setting(
        "auto", help='compute activations twice to save memory; "auto" where they would not fit otherwise'
    )
    lora_rank: int = setting(
        0, help="train adapters of this rank instead of all weights; 0 for all weights", ge=0, le=4096
    )
    lora_alpha: int = setting(16, help="adapters are scaled by this over their rank", ge=1)
    lora_targets: str = setting("all-linear", help="modules that get adapters, with commas between")
    lora_base: str = setting(
        "auto",
        help="whose copy of the frozen weights the learner computes with: its own, or the server's, which then gets "
        "adapters as adapters and can't sleep; auto for the server's where both would not fit",
        choices=("auto", "own", "server"),
    )
    max_length: int = setting(
        0, help="context of the server in tokens, at most the model's; 0 for the model's own", ge=0, le=1 << 24
    )

    def __attrs_post_init__(self) -> None:
        if self.moments == "host" and self.optimizer != "adamw":
            raise ValueError(
                'moments = "host" is for optimizer = "adamw": bitsandbytes keeps the moments of adamw8bit on the '
                "device. Leave one of them out"
            )
        if self.lora_base == "server" and (self.server_sleep is True or not self.lora_rank):
            raise ValueError(
                'lora_base = "server" is for adapters (lora_rank = 16) without server_sleep = true: the learner reads '
                "the server's weights during an update. Set lora_rank, and leave server_sleep out"
            )


@attrs.frozen(kw_only=True)
class LearnerConfig(TrainingConfig, LoopSettings):
    """Settings of the learner, and of a loop that samples: those of each algorithm with this learner."""

    clip_low: float = setting(0.2, help="how far the ratio may fall below 1", gt=0, lt=1)
    clip_high: float = setting(0.28, help="how far the ratio may rise above 1", gt=0, le=math.inf)
    loss: str = setting(
        "clip",
        help="the loss: ratios of tokens, clipped (clip), with a bounded weight (cispo) or a soft gate (sapo); or the "
        "clipped ratio of a whole reply (gspo)",
        choices=("clip", "gspo", "cispo", "sapo"),
    )
    rollout_is_threshold: float = setting(
        2.0, help="with max_staleness = 1, importance weights of sampled tokens are truncated here", ge=1, le=math.inf
    )

    def __attrs_post_init__(self) -> None:
        LoopSettings.__attrs_post_init__(self)
        TrainingConfig.__attrs_post_init__(self)
        if self.loss == "gspo" and self.clip_high > GSPO_CLIP:
            raise ValueError(
                f"loss = gspo clips the mean ratio of a reply, where clip_high = {self.clip_high:g} does nothing: "
                "set clip_low = 3e-4 and clip_high = 4e-4, as its paper does"
            )
        if self.loss == "gspo" and self.loss_agg_mode == "token-mean":
            raise ValueError('loss = gspo is a mean over rollouts: set loss_agg_mode = "seq-mean-token-mean"')
        if self.loss == "gspo" and self.max_staleness:
            raise ValueError(
                "loss = gspo and max_staleness = 1 exclude each other: stale tokens have weights of their own, and "
                "gspo has one for a whole reply"
            )
        fields = attrs.fields_dict(LearnerConfig)
        if self.loss == "sapo" and any(getattr(self, k) != fields[k].default for k in ("clip_low", "clip_high")):
            raise ValueError("loss = sapo has no clip limits: leave clip_low and clip_high out")


@attrs.frozen(kw_only=True)
class GrpoConfig(LearnerConfig):
    """Settings of `grpo`: it has no others."""


@attrs.frozen(kw_only=True)
class SftConfig(TrainingConfig):
    """Settings of `sft`. What it does not let you set is fixed, for the learner that reads it: nothing is sampled."""

    demonstrations: str = setting(
        "tasks",
        help="what is learned: `tasks`, the training tasks as the agent, the task set or the gold demonstrates them; a "
        "run directory, the rollouts that its reward accepted; or a JSONL file of chats, each chat's last reply",
    )
    task_sampling: ClassVar[str] = "uniform"
    group_size: ClassVar[int] = 1
    temperature: ClassVar[float] = 1.0
    top_p: ClassVar[float] = 1.0
    max_staleness: ClassVar[int] = 0
    loss: ClassVar[str] = "cross-entropy"
    clip_low: ClassVar[float] = 0.2  # these three have no effect: there is no ratio
    clip_high: ClassVar[float] = 0.28
    rollout_is_threshold: ClassVar[float] = 2.0


@attrs.frozen(kw_only=True)
class EmbeddedConfig:
    """Settings of the server `embedded`."""

    batch: int = setting(64, help="most requests that it samples at once", ge=1, le=4096)
    threads: int = setting(
        0,
        help="its torch threads on a CPU; 0 for half of hardware.threads",
        ge=0,
        le=1024,
    )
    host: str = setting("127.0.0.1", help="address that it listens on")
    port: int = setting(0, help="port that it listens on; 0 for a free one", ge=0, le=65535)
    kv_cache_mb: int = setting(
        0,
        help="MiB for keys and values of requests that run; others wait. 0 for what the run's memory plan gives it, "
        "else for a quarter of the device's",
        ge=0,
        le=1 << 24,
    )
    prompt_cache_mb: int = setting(256, help="MiB for prompts that are kept for reuse", ge=0, le=1 << 24)
