"""Low-rank adapters through peft (LoRA, arXiv:2106.09685)."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch  # noqa: TID253  (imported with the learner only)

from agentrig.errors import AgentrigError, ConfigError, nearest


def wrap(model: Any, *, rank: int, alpha: int, targets: str) -> Any:
    """Return the model with trainable adapters and everything else frozen.

    Args:
        model: A Hugging Face causal language model.
        rank: Of the two factors of each adapter.
        alpha: The adapters' output is scaled by alpha / rank.
        targets: `all-linear`, or names of the modules to adapt, with commas between.

    Raises:
        ConfigError: A target is no module of the model, is no linear layer or embedding, or shares its weights with
            another layer.
    """
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora import LoraLayer

    modules: Any = targets if targets == "all-linear" else _modules(model, targets)
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=modules, lora_dropout=0.0, task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        # peft reads a property of transformers 5 by its former name.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        # Tied weights are checked below.
        warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`", UserWarning)
        wrapped: Any = get_peft_model(model, config)
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    shared = {key.removesuffix(".weight") for key in (*tied, *(tied.values() if isinstance(tied, dict) else ()))}
    for name, module in wrapped.get_base_model().named_modules():
        if isinstance(module, LoraLayer) and name in shared:
            raise ConfigError(
                f"[algorithm] lora_targets has {name}, whose weights this model shares with another layer. Merging its "
                "adapter for the server would change both layers or neither"
            )
    return wrapped


def _modules(model: Any, targets: str) -> list[str]:
    """Return the targets after checking that each is in the model; peft only requires one match."""
    from transformers.pytorch_utils import Conv1D

    wanted = [target.strip() for target in targets.split(",")]
    fit = (torch.nn.Linear, torch.nn.Embedding, torch.nn.Conv1d, torch.nn.Conv2d, Conv1D)
    named = {name: module for name, module in model.named_modules() if name}
    known = list(dict.fromkeys(name.rsplit(".", 1)[-1] for name, module in named.items() if isinstance(module, fit)))
    for target in wanted:
        found = [module for name, module in named.items() if target and f".{name}".endswith(f".{target}")]
        if found and all(isinstance(module, fit) for module in found):
            continue
        wrong = f"is a {type(found[0]).__name__}, no linear layer or embedding" if found else "matches no module"
        raise ConfigError(
            f"[algorithm] lora_targets: {target!r} {wrong} of this model.{nearest(target, known)}\n"
            f"  modules that can be adapted: {', '.join(known)}; or write all-linear"
        )
    return wanted


def merged(model: Any) -> Any:
    """Return the plain model with the adapters merged; the wrapped one stays as it is.

    The copy shares every weight that no adapter changes: `safe_merge` makes a new tensor instead of adding in place.

    Raises:
        AgentrigError: A merged weight is not finite.
    """
    shared = {id(p): torch.nn.Parameter(p.detach(), requires_grad=False) for p in model.parameters()}
    try:
        return copy.deepcopy(model, shared).merge_and_unload(safe_merge=True)
    except ValueError as error:
        raise AgentrigError(f"the LoRA adapters cannot be merged: {error}. Try a lower algorithm.lr") from error
