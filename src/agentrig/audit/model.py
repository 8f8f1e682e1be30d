"""The plainest way to compute with a model: transformers' own classes, and autograd."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from agentrig.audit.record import Call
from agentrig.audit.sketch import LARGEST
from agentrig.audit.verdicts import CannotLook
from agentrig.hardware.cpu import choose_vector_kernels

if TYPE_CHECKING:
    import torch

FACTOR = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<side>[AB])\.(?P<adapter>[^.]+)\.weight")
"""How peft names the two factors of an adapter of a linear layer."""

AT_ONCE = 4096
"""Tokens that are computed side by side. They may look back on so many rows of keys and values four times."""

MEASURED = 4096
"""Tokens of a step's calls, prompts too, that are computed in the second precision too, whole batches of them."""

SLACK = 128
"""Tokens of padding that cost less than a batch more."""


@attrs.frozen
class Precision:
    """How a model is computed with: the dtype of its weights and arithmetic, and the device.

    Weights may be `rounded` to another dtype first, and with `cast` the forward pass runs under bf16 autocast.
    """

    dtype: torch.dtype
    rounded: torch.dtype | None = None
    cast: bool = False
    device: str = "cpu"


@attrs.frozen(kw_only=True, eq=False)
class Weights:
    """What a model computes with: a directory's weights, and by name those of its tensors that training has changed.

    These are the model's own, or the factors of adapters; `scaling` is alpha over rank.
    """

    directory: Path
    trained: Mapping[str, torch.Tensor]
    scaling: float = 1.0

    def load(self, precision: Precision) -> Any:
        """Return the plain model; with adapters its weights are W + scaling * B @ A (LoRA, arXiv:2106.09685)."""
        import torch
        from torch.nn.utils import parametrize
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        scaling = self.scaling

        class Merged(torch.nn.Module):
            def __init__(self, first: torch.Tensor, second: torch.Tensor, turned: bool) -> None:
                super().__init__()
                self.A, self.B, self.turned = torch.nn.Parameter(first), torch.nn.Parameter(second), turned

            def forward(self, weight: torch.Tensor) -> torch.Tensor:
                with torch.autocast(weight.device.type, enabled=False):
                    change = scaling * self.B @ self.A
                    return weight + (change.T if self.turned else change)

        disable_progress_bar()  # type: ignore[no-untyped-call]
        choose_vector_kernels()
        model: Any = AutoModelForCausalLM.from_pretrained(
            str(self.directory), dtype=torch.float32, local_files_only=True, attn_implementation="eager"
        )
        model = model.to(precision.device, precision.dtype).eval()
        own = dict(model.named_parameters())
        with torch.no_grad():
            for name, tensor in self.trained.items():
                factor = FACTOR.fullmatch(name)
                if factor is None and name not in own:
                    raise CannotLook(f"{name} is no tensor of the plain model")
                if factor is None:
                    own[name].copy_(tensor)
                elif factor["side"] == "B":
                    layer = model.get_submodule(factor["layer"])
                    first = self.trained[name.replace(".lora_B.", ".lora_A.")]
                    turned = type(layer).__name__ == "Conv1D"  # GPT-2's, whose weights are transposed
                    pair = [one.to(layer.weight, copy=True) for one in (first, tensor)]
                    merged = Merged(pair[0], pair[1], turned)
                    parametrize.register_parametrization(layer, "weight", merged)
                    if precision.rounded is not None:
                        parametrize.remove_parametrizations(layer, "weight")
            if precision.rounded is not None:
                for parameter in model.parameters():
                    parameter.copy_(parameter.to(precision.rounded))
        return model

    def parameters(self, model: Any) -> list[torch.Tensor]:
        """Return the parameter of a loaded model that each trained tensor is."""
        found = []
        for name in self.trained:
            factor = FACTOR.fullmatch(name)
            place = factor and f"{factor['layer']}.parametrizations.weight.0.{factor['side']}"
            found.append(model.get_parameter(place or name))
        return found


def structure(directory: Path) -> Any:
    """Return a directory's model without its weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        config = AutoConfig.from_pretrained(str(directory), local_files_only=True)
        return AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]


def place(directory: Path, bytes_each: int, *, on_cpu: bool) -> str:
    """Return the device that a model is computed with: the GPU if it has room for so many bytes for each parameter.

    Args:
        on_cpu: Whether the run trained on the CPU: then it takes nothing of a GPU.

    Raises:
        CannotLook: A GPU has too little memory, and the model is too large for the CPU.
    """
    import torch

    config = json.loads((directory / "config.json").read_text("utf-8"))
    width = 2 if "16" in str(config.get("dtype") or config.get("torch_dtype")) else 4
    parameters = max(1, sum(file.stat().st_size for file in directory.glob("*.safetensors")) // width)
    free = 0
    if torch.cuda.is_available() and not on_cpu:
        free, total = torch.cuda.mem_get_info()
        allowed = int(total * torch.cuda.get_per_process_memory_fraction())
        free = max(0, min(free, allowed - torch.cuda.memory_reserved()))
    if 1.5 * parameters * bytes_each < free:
        return "cuda"
    if parameters <= LARGEST:
        return "cpu"
    need, has = f"{1.5 * parameters * bytes_each / 2**30:.1f} GiB", f"the GPU has {free / 2**30:.1f} free"
    raise CannotLook(f"the model has {parameters:,} parameters: it needs {need}, and {has if free else 'a GPU'}")


def tokens(calls: Sequence[Call]) -> int:
    """Return how many tokens calls have, prompts and replies."""
    return sum(len(call.prompt) + len(call.reply) for call in calls)


def batches(calls: Sequence[Call], seed: int) -> list[list[Call]]:
    """Return calls in batches whose prompts begin alike, in an order by chance; `logits` computes what they share once.

    A call joins the batch before it if that costs no more tokens than a batch of its own, or hardly more.
    """
    found: list[list[Call]] = []
    for call in sorted(calls, key=lambda call: tuple(call.prompt)):
        together = [*(found[-1] if found else ()), call]
        apart = _computed(found[-1]) + _computed([call]) if found else 0
        fits = len(together) * max(tokens([each]) for each in together) <= 4 * AT_ONCE
        if found and fits and _computed(together) <= min(apart + SLACK, AT_ONCE):
            found[-1] = together
        else:
            found.append([call])
    random.Random(seed).shuffle(found)
    return found


def _computed(batch: Sequence[Call]) -> int:
    """Return how many tokens a batch takes, whose prompts are in order: what all share once, and the rest of each."""
    shared = _shared([batch[0], batch[-1]])
    return shared + len(batch) * (max(tokens([call]) for call in batch) - 1 - shared)


def _shared(calls: Sequence[Call]) -> int:
    """Return how many tokens all prompts begin with; each call keeps one, whose logits are those of its first token."""
    prompts = [tuple(call.prompt) for call in calls]
    pairs = zip(min(prompts), max(prompts), strict=False)  # what these two share, all those between them share
    return next((at for at, (a, b) in enumerate(pairs) if a != b or at == min(map(len, prompts)) - 1))


def logits(model: Any, calls: Sequence[Call], temperature: float) -> list[torch.Tensor]:
    """Return the logits of each call's reply over the temperature, [reply, vocabulary] each, at least fp32.

    What all prompts begin with is computed once, and the rest of each call from its keys and values, filled up at the
    right: no token of a causal model sees what comes after it.
    """
    import torch
    from torch.nn.utils.rnn import pad_sequence

    shared, cache, device = _shared(calls), None, model.device
    if shared:
        begin = torch.tensor([list(calls[0].prompt[:shared])], device=device)
        cache = model(input_ids=begin, use_cache=True, logits_to_keep=1).past_key_values
        cache.batch_select_indices(torch.zeros(len(calls), dtype=torch.int64, device=device))
    rest = [torch.tensor([*call.prompt[shared:], *call.reply[:-1]], device=device) for call in calls]
    rows = pad_sequence(rest, batch_first=True)
    asked = min(len(call.prompt) for call in calls) - shared - 1  # logits before this place are no reply's
    scores = model(input_ids=rows, past_key_values=cache, logits_to_keep=rows.shape[1] - asked).logits
    found = at_least_fp32(scores) / (temperature or 1.0)
    begins = [len(call.prompt) - shared - 1 - asked for call in calls]
    return [row[at : at + len(call.reply)] for row, at, call in zip(found, begins, calls, strict=True)]


def logprobs(model: Any, calls: Sequence[Call], temperature: float) -> torch.Tensor:
    """Return the log-probability of each token of the replies, one call after the other, [tokens]."""
    import torch

    found = torch.log_softmax(torch.cat(logits(model, calls, temperature)), -1)
    replies = torch.tensor([token for call in calls for token in call.reply], device=found.device)
    return found.gather(-1, replies[:, None])[:, 0]


def at_least_fp32(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in its own precision, one of 16 bits in fp32: a sum of many would round away."""
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor
