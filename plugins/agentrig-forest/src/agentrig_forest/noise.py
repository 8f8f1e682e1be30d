"""How much rounding changes a model's log-probabilities: scored again with noise of a rounding step in each layer.

Where a model is undecided between two ways to go on, or its attention is sharp, a difference in the last place grows a
hundredfold until it reaches the logits. No formula of depth and size knows that; a measurement does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

SEEDS = (1, 2, 3)
"""A probe is scored with the noise of each."""


def decoder_blocks(model: Any) -> list[Any]:
    """Return the blocks of a causal language model: the longest list of modules in it."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return list(max(lists, key=len, default=()))


def with_noise(
    model: Any, score: Callable[[], list[float]], dtype: str, *, seeds: Sequence[int] = SEEDS
) -> list[list[float]]:
    """Return what `score` returns while each number of each linear layer's and block's output is slightly changed.

    Args:
        model: A causal language model, which `score` computes with.
        dtype: `float32`, `bfloat16` …: each number changes by up to one rounding step of it.
        seeds: Of the noise; `score` is called once with each.
    """
    step = torch.finfo(getattr(torch, dtype)).eps
    places = [*decoder_blocks(model), *(module for module in model.modules() if isinstance(module, torch.nn.Linear))]

    def hook(seed: int) -> Any:
        def changed(module: Any, given: Any, output: Any) -> Any:
            hidden = output[0] if isinstance(output, tuple) else output
            random = torch.Generator(device=hidden.device).manual_seed(seed)
            noise = torch.rand(hidden.shape, generator=random, device=hidden.device, dtype=torch.float32) * 2 - 1
            found = (hidden.float() * (1 + step * noise)).to(hidden.dtype)
            return (found, *output[1:]) if isinstance(output, tuple) else found

        return changed

    found = []
    for seed in seeds:
        hooks = [place.register_forward_hook(hook(seed + i)) for i, place in enumerate(places)]
        try:
            found.append(score())
        finally:
            for one in hooks:
                one.remove()
    return found
