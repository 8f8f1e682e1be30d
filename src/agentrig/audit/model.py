"""The plainest way to compute with a model: transformers' own classes, each call in full, and autograd."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from agentrig.audit.record import Call

if TYPE_CHECKING:
    import torch

FACTOR = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<side>[AB])\.(?P<adapter>[^.]+)\.weight")
"""How peft names the two factors of an adapter of a linear layer."""

SIDE_BY_SIDE = 8
"""Calls that are computed side by side."""

LOGITS = 1 << 27
"""The most logits of calls that are computed side by side; a single call may have more."""


class Unknown(Exception):
    """The trained tensors have names that the auditor can't place in the plain model."""


@attrs.frozen
class Precision:
    """How a model is computed with.

    Attributes:
        dtype: Of its weights and arithmetic.
        rounded: What the weights are rounded to first; None for nothing.
        cast: Whether the forward pass runs under bf16 autocast.
    """

    dtype: torch.dtype
    rounded: torch.dtype | None = None
    cast: bool = False


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

    def load(self, precision: Precision) -> Any:
        """Return the plain model, adapters merged by hand: W + scaling * B @ A (LoRA, arXiv:2106.09685).

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
        dtype, rounded = precision.dtype, precision.rounded
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


def batches(calls: Sequence[Call], vocabulary: int) -> list[list[Call]]:
    """Return calls in batches of like lengths, each of at most `SIDE_BY_SIDE` calls and `LOGITS` logits."""
    found: list[list[Call]] = []
    for call in sorted(calls, key=lambda one: len(one.prompt) + len(one.reply)):
        size = (len(call.prompt) + len(call.reply)) * vocabulary
        last = found[-1] if found else []
        if not last or len(last) == SIDE_BY_SIDE or (len(last) + 1) * size > LOGITS:
            found.append([])
        found[-1].append(call)
    return found


def logits(model: Any, calls: Sequence[Call], temperature: float) -> list[torch.Tensor]:
    """Return the logits of each call's reply over the temperature, [reply, vocabulary] each, at least fp32.

    Calls are computed side by side and filled up at the right: no token of a causal model sees what comes after it.
    """
    import torch
    from torch.nn.utils.rnn import pad_sequence

    ids = [torch.tensor([*call.prompt, *call.reply][:-1], device=model.device) for call in calls]
    found: torch.Tensor = model(input_ids=pad_sequence(ids, batch_first=True), use_cache=False).logits
    found = (found.float() if found.dtype.itemsize < 4 else found) / (temperature or 1.0)
    return [row[len(c.prompt) - 1 : len(c.prompt) + len(c.reply) - 1] for row, c in zip(found, calls, strict=True)]


def logprobs(model: Any, calls: Sequence[Call], temperature: float) -> torch.Tensor:
    """Return the log-probability of each token of the replies, one call after the other, [tokens]."""
    import torch

    found = torch.log_softmax(torch.cat(logits(model, calls, temperature)), -1)
    replies = torch.tensor([token for call in calls for token in call.reply], device=found.device)
    return found.gather(-1, replies[:, None])[:, 0]


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Leave the random state of torch as it was: the run goes on after an audit as it would have without."""
    import torch

    kept = torch.random.get_rng_state()
    try:
        yield
    finally:
        torch.random.set_rng_state(kept)
