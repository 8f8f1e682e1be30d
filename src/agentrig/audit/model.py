"""The plainest way to compute with a model: transformers' own classes, one call at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from agentrig.audit.record import Call

if TYPE_CHECKING:
    import torch

FACTOR = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<side>[AB])\.(?P<adapter>[^.]+)\.weight")
"""How peft names the two factors of an adapter of a linear layer."""


class Unknown(Exception):
    """The trained tensors have names that the auditor can't place in the plain model."""


@attrs.frozen(kw_only=True, eq=False)
class Weights:
    """What a model computes with: the starting model, and what training has made of it.

    Attributes:
        directory: Of the starting model.
        trained: Name to trained tensor: the model's own, or the factors of adapters; empty for the starting model.
        scaling: Alpha over rank of the adapters.
    """

    directory: Path
    trained: Mapping[str, torch.Tensor]
    scaling: float = 1.0

    def load(self, dtype: torch.dtype, *, rounded: torch.dtype | None = None) -> Any:
        """Return the plain model, adapters merged by hand: W + scaling * B @ A (LoRA, arXiv:2106.09685).

        Args:
            dtype: Of its weights and arithmetic.
            rounded: Round the weights to this dtype first.

        Raises:
            Unknown: A trained tensor is not the model's.
        """
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()  # type: ignore[no-untyped-call]
        model: Any = AutoModelForCausalLM.from_pretrained(
            str(self.directory), dtype=torch.float32, local_files_only=True, attn_implementation="eager"
        )
        model = model.to(dtype).eval()
        own = dict(model.named_parameters())
        with torch.no_grad():
            for name, tensor in self.trained.items():
                factor = FACTOR.fullmatch(name)
                if factor is None and name not in own:
                    raise Unknown(name)
                if factor is None:
                    own[name].copy_(tensor)
                elif factor["side"] == "B":
                    first = self.trained[name.replace(".lora_B.", ".lora_A.")].to(dtype)
                    change = self.scaling * tensor.to(dtype) @ first
                    weight = own[f"{factor['layer']}.weight"]
                    weight += change if weight.shape == change.shape else change.T  # GPT-2's layers are transposed
            if rounded is not None:
                for parameter in model.parameters():
                    parameter.copy_(parameter.to(rounded))
        return model

    def gradients(self, model: Any, plain: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the gradient of each trained tensor from those of the plain model's weights, by the chain rule."""
        import torch

        own = dict(model.named_parameters())
        found = {}
        for name, tensor in self.trained.items():
            factor = FACTOR.fullmatch(name)
            weight = name if factor is None else f"{factor['layer']}.weight"
            grad = plain.get(weight)
            if grad is None:
                like = own[weight].dtype
                found[name] = torch.zeros(tensor.shape, dtype=torch.float32 if like.itemsize < 4 else like)
                continue
            if factor is None:
                found[name] = grad.clone()
                continue
            side, other = ("B", "A") if factor["side"] == "B" else ("A", "B")
            partner = self.trained[name.replace(f".lora_{side}.", f".lora_{other}.")].to(grad.dtype)
            rows = tensor.shape[0] if side == "B" else partner.shape[0]  # of B @ A; GPT-2's layers are transposed
            grad = grad if grad.shape[0] == rows else grad.T
            found[name] = self.scaling * (grad @ partner.T if side == "B" else partner.T @ grad)
        return found


def logits(model: Any, call: Call, temperature: float) -> torch.Tensor:
    """Return the logits of each token of a reply over the temperature, [reply, vocabulary], at least fp32."""
    import torch

    ids = torch.tensor([[*call.prompt, *call.reply][:-1]], device=model.device)
    found: torch.Tensor = model(input_ids=ids, use_cache=False).logits[0, len(call.prompt) - 1 :]
    return (found.float() if found.dtype.itemsize < 4 else found) / (temperature or 1.0)


def logprobs(model: Any, call: Call, temperature: float) -> torch.Tensor:
    """Return the log-probability of each token of a reply, [reply]."""
    import torch

    found = torch.log_softmax(logits(model, call, temperature), -1)
    return found.gather(-1, torch.tensor(call.reply, device=found.device)[:, None])[:, 0]


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Leave the random state of torch as it was: the run goes on after an audit as it would have without."""
    import torch

    kept = torch.random.get_rng_state()
    try:
        yield
    finally:
        torch.random.set_rng_state(kept)
