"""The plainest way to compute with a model: transformers' own classes, and autograd."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from agentrig.audit.record import Call
from agentrig.audit.sketch import LARGEST
from agentrig.audit.verdicts import CannotLook

if TYPE_CHECKING:
    import torch

FACTOR = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<side>[AB])\.(?P<adapter>[^.]+)\.weight")
"""How peft names the two factors of an adapter of a linear layer."""

AT_ONCE = 4096
"""Tokens that are computed side by side."""


class Unknown(Exception):
    """The trained tensors have names that the auditor can't place in the plain model."""


@attrs.frozen
class Precision:
    """How a model is computed with.

    Attributes:
        dtype: Of its weights and arithmetic.
        rounded: What the weights are rounded to first; None for nothing.
        cast: Whether the forward pass runs under bf16 autocast.
        device: Where.
    """

    dtype: torch.dtype
    rounded: torch.dtype | None = None
    cast: bool = False
    device: str = "cpu"


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
        model = model.to(precision.device, dtype).eval()
        own = dict(model.named_parameters())
        with torch.no_grad():
            for name, tensor in self.trained.items():
                factor = FACTOR.fullmatch(name)
                if factor is None and name not in own:
                    raise Unknown(name)
                if factor is None:
                    own[name].copy_(tensor)
                elif factor["side"] == "B":
                    weight = own[f"{factor['layer']}.weight"]
                    first = self.trained[name.replace(".lora_B.", ".lora_A.")].to(weight)
                    change = self.scaling * tensor.to(weight) @ first
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
                found[name] = torch.zeros(tensor.shape, dtype=_wide(own[weight]), device=own[weight].device)
                continue
            grad = grad.to(_wide(grad), copy=True)  # a sum of many batches would round away in bf16
            if factor is None:
                found[name] = grad
                continue
            side, other = ("B", "A") if factor["side"] == "B" else ("A", "B")
            partner = self.trained[name.replace(f".lora_{side}.", f".lora_{other}.")].to(grad)
            rows = tensor.shape[0] if side == "B" else partner.shape[0]  # of B @ A; GPT-2's layers are transposed
            grad = grad if grad.shape[0] == rows else grad.T
            found[name] = self.scaling * (grad @ partner.T if side == "B" else partner.T @ grad)
        return found


def _wide(tensor: torch.Tensor) -> torch.dtype:
    import torch

    return torch.float32 if tensor.dtype.itemsize < 4 else tensor.dtype


def size(directory: Path) -> int:
    """Return about how many parameters a model has, by the size of its files."""
    config = json.loads((directory / "config.json").read_text("utf-8"))
    width = 2 if "16" in str(config.get("dtype") or config.get("torch_dtype")) else 4
    return max(1, sum(file.stat().st_size for file in directory.glob("*.safetensors")) // width)


def place(parameters: int, bytes_each: int) -> str:
    """Return the device that a model of so many parameters is computed with: the GPU if it has room.

    Args:
        parameters: Of the model.
        bytes_each: What the computation needs of memory for each of them.

    Raises:
        CannotLook: A GPU has too little memory, and the model is too large for the CPU.
    """
    import torch

    free = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0
    if 1.5 * parameters * bytes_each < free:
        return "cuda"
    if parameters <= LARGEST:
        return "cpu"
    need, has = f"{1.5 * parameters * bytes_each / 2**30:.1f} GiB", f"the GPU has {free / 2**30:.1f} free"
    raise CannotLook(f"the model has {parameters:,} parameters: it needs {need}, and {has if free else 'a GPU'}")


def batches(calls: Sequence[Call]) -> list[list[Call]]:
    """Return calls in batches whose prompts have one length, of at most `AT_ONCE` tokens."""
    found: list[list[Call]] = []
    longest = 0
    for call in sorted(calls, key=lambda call: (len(call.prompt), tuple(call.prompt))):
        longest = max(longest, len(call.reply))
        same = bool(found) and len(found[-1][0].prompt) == len(call.prompt)
        if same and (len(found[-1]) + 1) * (len(call.prompt) + longest) <= AT_ONCE:
            found[-1].append(call)
        else:
            found.append([call])
            longest = len(call.reply)
    return found


def logits(model: Any, calls: Sequence[Call], temperature: float) -> list[torch.Tensor]:
    """Return the logits of each call's reply over the temperature, [reply, vocabulary] each, at least fp32.

    The calls' prompts have one length. Each is computed once, and its replies from its keys and values, filled up at
    the right: no token of a causal model sees what comes after it.
    """
    import torch
    from torch.nn.utils.rnn import pad_sequence

    rows = {prompt: row for row, prompt in enumerate(dict.fromkeys(tuple(call.prompt) for call in calls))}
    own = torch.tensor([rows[tuple(call.prompt)] for call in calls], device=model.device)
    begun = model(input_ids=torch.tensor(list(rows), device=model.device), use_cache=True, logits_to_keep=1)
    first, cache = begun.logits[own], begun.past_key_values
    cache.batch_select_indices(own)
    replies = [torch.tensor(call.reply[:-1], dtype=torch.int64, device=model.device) for call in calls]
    rest = pad_sequence(replies, batch_first=True)
    if rest.shape[1]:
        first = torch.cat([first, model(input_ids=rest, past_key_values=cache).logits], 1)
    found = (first.float() if first.dtype.itemsize < 4 else first) / (temperature or 1.0)
    return [row[: len(call.reply)] for row, call in zip(found, calls, strict=True)]


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
