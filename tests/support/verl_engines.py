"""verl's own engine and the one with shared tokens around the same tiny model, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

VOCABULARY = 32


def make_model(folder: Path, kind: str = "qwen2", **changes: Any) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind, vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=256, initializer_range=0.3, **changes,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


@contextmanager
def on_the_cpu(group: Path, *, rank: int = 0, ranks: int = 1) -> Iterator[None]:
    """Start a process group, and let verl run on the CPU: it has no platform for it, but asks for nothing more."""
    import agentrig_verl.trainer  # noqa: F401  (imported first, so that verl does not see the platform below)
    import pytest
    from verl.plugin.platform import platform_manager

    cpu: Any = SimpleNamespace(
        device_name="cpu", vendor_name="nvidia", current_device=lambda: "cpu", device_module=torch.cpu,
        visible_devices_envvar=lambda: "CUDA_VISIBLE_DEVICES", communication_backend_name=lambda: "gloo",
    )  # fmt: skip
    torch.distributed.init_process_group("gloo", init_method=f"file://{group}", rank=rank, world_size=ranks)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(platform_manager, "_current_platform", cpu)
            patch.setenv("VERL_DISABLE_FLASH_ATTN_CE", "1")
            patch.setenv("VERL_ENGINE_DEVICE", "cuda")  # which engines a worker finds in verl's registry
            yield
    finally:
        torch.distributed.destroy_process_group()


def make_engine(
    folder: Path, *, forest: bool, lora_rank: int = 0, attention: str | None = "sdpa", strategy: str = "fsdp2"
) -> Any:
    """Return an engine in fp32; without `attention` with verl's own choice, and its packed rows."""
    from agentrig_verl.engine import ForestEngine
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    model = HFModelConfig(
        path=str(folder), load_tokenizer=False, lora_rank=lora_rank,
        override_config={"attn_implementation": attention} if attention else {},
    )  # fmt: skip
    made = (ForestEngine if forest else FSDPEngineWithLMHead)(
        model,
        FSDPEngineConfig(strategy=strategy, mixed_precision={"param_dtype": "fp32"}, use_torch_compile=False),
        FSDPOptimizerConfig(lr=1e-3, total_training_steps=1),
        CheckpointConfig(),
    )
    torch.manual_seed(1)  # of new adapters
    made.initialize()
    return made


def make_worker(cls: Any, folder: Path) -> Any:
    """Return a worker of verl, or a subclass of it, with its engine and PPO's loss."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import (
        FSDPActorConfig,
        FSDPEngineConfig,
        FSDPOptimizerConfig,
        HFModelConfig,
        TrainingWorkerConfig,
    )
    from verl.workers.utils.losses import ppo_loss

    worker = cls(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=HFModelConfig(
                path=str(folder), load_tokenizer=False, override_config={"attn_implementation": "sdpa"}
            ),
            engine_config=FSDPEngineConfig(
                strategy="fsdp2", mixed_precision={"param_dtype": "fp32"}, use_torch_compile=False
            ),
            optimizer_config=FSDPOptimizerConfig(lr=1e-3, total_training_steps=1),
            checkpoint_config=CheckpointConfig(save_contents=["model", "optimizer", "extra", "hf_model"]),
        )
    )
    worker.reset()
    worker.flops_counter = None  # verl knows no CPU's
    worker.set_loss_fn(partial(ppo_loss, config=FSDPActorConfig(strategy="fsdp2", rollout_n=1, use_dynamic_bsz=True)))
    return worker


def batch_of(
    rows: Sequence[tuple[Sequence[int], Sequence[int], Sequence[int]]], *, tokens: int = 130, **more: Any
) -> Any:
    """Return what verl's trainer hands to its engine for an update.

    Args:
        rows: Prompt, response and the response's mask.
        tokens: The budget of a micro-batch.
        more: Of verl's settings.
    """
    from verl.utils import tensordict_utils

    chance = torch.Generator().manual_seed(5)
    fields = []
    for i, (prompt, response, mask) in enumerate(rows):
        ids = torch.tensor([*prompt, *response])
        masks = torch.tensor(list(mask))
        fields.append({
            "prompts": torch.tensor(list(prompt)), "responses": torch.tensor(list(response)), "input_ids": ids,
            "position_ids": torch.arange(len(ids)), "response_mask": masks, "loss_mask": masks,
            "advantages": masks * torch.randn(1, generator=chance), "uid": str(i),
            "old_log_probs": masks * -3 * torch.rand(len(masks), generator=chance),
            "ref_log_prob": masks * -3 * torch.rand(len(masks), generator=chance),
        })  # fmt: skip
    columns: dict[str, Any] = {name: [row[name] for row in fields] for name in fields[0]}
    ragged = {  # as from TransferQueue, also when all rows have the same length
        name: torch.nested.as_nested_tensor(values, layout=torch.jagged) if name != "uid" else values
        for name, values in columns.items()
    }
    data = tensordict_utils.get_tensordict(ragged)
    settings = {
        "use_remove_padding": False, "use_dynamic_bsz": True, "max_token_len_per_gpu": tokens, "temperature": 0.9,
        "calculate_entropy": True, "global_batch_size": len(rows), **more,
    }  # fmt: skip
    tensordict_utils.assign_non_tensor(data, **settings)
    return data


def update(
    engine: Any, data: Any, *, mode: str = "token-mean", entropy: float = 0.0, kl: bool = True
) -> tuple[float, dict[str, Any]]:
    """Return verl's loss, and its gradients."""
    from verl.workers.config import FSDPActorConfig
    from verl.workers.utils.losses import ppo_loss

    config = FSDPActorConfig(
        strategy="fsdp2", rollout_n=1, use_dynamic_bsz=True, loss_agg_mode=mode, entropy_coeff=entropy,
        use_kl_loss=kl, kl_loss_coef=0.1,
    )  # fmt: skip
    with engine.train_mode(zero_grad_on_exit=False):
        engine.optimizer_zero_grad()
        output = engine.forward_backward_batch(data, partial(ppo_loss, config=config))
    gradients = {n: p.grad.full_tensor().clone() for n, p in engine.module.named_parameters() if p.grad is not None}
    return sum(output["loss"]), gradients


def logprobs(engine: Any, data: Any) -> dict[str, Any]:
    """Return log-probabilities and entropies, a list of rows each."""
    with engine.eval_mode():
        found = engine.infer_batch(data)["model_output"]
    return {name: list(values.unbind()) for name, values in found.items()}
