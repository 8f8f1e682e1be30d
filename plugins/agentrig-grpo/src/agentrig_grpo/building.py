"""What the learner trains: a model with adapters and 16-bit copies, its reference, without dropout."""

from __future__ import annotations

import copy
from typing import Any

import attrs
import torch  # noqa: TID253  (imported with the learner only)
from agentrig_forest.kernels import fuse_norms
from agentrig_forest.scoring import prepare

from agentrig_grpo import lora
from agentrig_grpo.config import LearnerConfig
from agentrig_grpo.masters import Masters, round_weights, rounds_exactly


@attrs.frozen(kw_only=True, eq=False)
class Built:
    """A model that is ready to be trained.

    Attributes:
        model: It, perhaps wrapped by adapters.
        share: Whether tokens that calls share are computed once.
        reference: The frozen starting model of a KL loss; None without one, and where adapters can be turned off.
        masters: The fp32 weights of 16-bit copies; None where the model's own weights are trained.
        trained: Name to trained parameter.
    """

    model: Any
    share: bool
    reference: Any
    masters: Masters | None
    trained: dict[str, torch.nn.Parameter]


def build(
    model: Any,
    config: LearnerConfig,
    *,
    bf16: bool,
    seed: int,
    recomputed: int | None,
    frozen_exact: bool | None = None,
) -> Built:
    """Prepare a model for training.

    Args:
        model: A Hugging Face causal language model on its device, in fp32; for adapters perhaps in bfloat16.
        bf16: Whether to compute in bfloat16.
        seed: Of new adapters.
        recomputed: How many layers compute their activations twice; None for what `gradient_checkpointing` says.
        frozen_exact: Whether rounding to bfloat16 changes no number of the given model; None to compare.
    """
    if recomputed is None and config.gradient_checkpointing is not True:  # "auto" was decided before (fitting.py)
        recomputed = 0
    share = prepare(model)
    reference = None
    if config.lora_rank:
        torch.manual_seed(seed)
        model = lora.wrap(model, rank=config.lora_rank, alpha=config.lora_alpha, targets=config.lora_targets)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
    elif config.kl_loss_coef:
        reference = copy.deepcopy(model).requires_grad_(False).eval()
        if bf16 and share:
            round_weights(reference, torch.bfloat16)
    masters = None
    if bf16 and share and (not config.lora_rank or _exact(model, given=frozen_exact)):
        masters = Masters(model, torch.bfloat16)
    if masters is not None and model.device.type == "cuda":
        fuse_norms(model)
        if config.lora_rank:
            lora.fuse(model)
    trained = masters.trained if masters else {name: p for name, p in model.named_parameters() if p.requires_grad}
    recompute(model, recomputed)
    for module in model.modules():
        _without_dropout(module)
    return Built(model=model, share=share, reference=reference, masters=masters, trained=trained)


def _exact(model: Any, *, given: bool | None) -> bool:
    """Return whether the frozen weights are the same in 16 bits, and make all fp32 if not.

    They are where the model's files have them in bfloat16, as most models do. Others keep their fp32 weights, and the
    model computes under autocast: what is served is the merge of these, rounded once.
    """
    if (
        rounds_exactly((p for p in model.parameters() if not p.requires_grad), torch.bfloat16)
        if given is None
        else given
    ):
        return True
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.float()  # `Module.float` cannot change the fake tensors of an estimate
    return False


def recompute(model: Any, layers: int | None) -> None:
    """Let the first layers of a model, or all for None, compute their activations twice, and the others once."""
    if layers != 0:
        # transformers 5.2x renamed it, and warns about the former name.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    for layer in checkpointed(model)[layers:] if layers is not None else ():
        layer.gradient_checkpointing = False  # type: ignore[assignment]
    # Checkpointing needs training mode. Dropout stays off: the ratio needs the same function that sampled.
    model.train(layers != 0)


def checkpointed(model: Any) -> list[torch.nn.Module]:
    """Return the layers of a model that compute their activations twice, in their order."""
    found = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]
    return [m for m in found if not any(inner in found for inner in m.modules() if inner is not m)]


def _without_dropout(module: torch.nn.Module) -> None:
    """Turn dropout off, in training mode too.

    Models read the share from a Dropout module (GPT-2's attention) or from a number of their own (`dropout`,
    `attention_dropout`, …) as well as calling such modules.
    """
    if isinstance(module, torch.nn.modules.dropout._DropoutNd):
        module.p = 0.0
    for name, value in list(vars(module).items()):
        if "drop" in name and isinstance(value, float):
            setattr(module, name, 0.0)
