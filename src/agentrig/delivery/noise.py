"""How much rounding changes a model's log-probabilities: scored again with noise of a rounding step in each block.

Where a model is undecided between two ways to go on, or its attention is sharp, a difference in the last place grows a
hundredfold until it reaches the logits. No formula of depth and size knows that; a measurement does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

SEEDS = (1, 2, 3)
"""A probe is scored with the noise of each."""


def decoder_blocks(model: Any) -> list[Any]:
    """Return the blocks of a causal language model: the longest list of modules in it."""
    import torch

    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return list(max(lists, key=len, default=()))


def with_noise(
    model: Any, score: Callable[[], list[float]], dtype: str, *, inside: bool = False, seeds: Sequence[int] = SEEDS
) -> list[list[float]]:
    """Return what `score` returns with the noise of each seed in the model; see `rounding_noise`."""
    found = []
    for seed in seeds:
        with rounding_noise(model, seed, dtype, inside=inside):
            found.append(score())
    return found


@contextmanager
def rounding_noise(model: Any, seed: int, dtype: str, *, inside: bool = False) -> Iterator[None]:
    """Change each number of each block's output by up to one rounding step of a dtype, as long as the context is open.

    Args:
        model: A causal language model.
        seed: Of the noise.
        dtype: `float32`, `bfloat16` …
        inside: Change the output of each linear layer too, so that it counts what attention makes of it.
    """
    import torch

    step = torch.finfo(getattr(torch, dtype)).eps

    def hook(block: int) -> Any:
        def changed(module: Any, given: Any, output: Any) -> Any:
            hidden = output[0] if isinstance(output, tuple) else output
            random = torch.Generator(device=hidden.device).manual_seed(seed + block)
            noise = torch.rand(hidden.shape, generator=random, device=hidden.device, dtype=torch.float32) * 2 - 1
            found = (hidden.float() * (1 + step * noise)).to(hidden.dtype)
            return (found, *output[1:]) if isinstance(output, tuple) else found

        return changed

    places = decoder_blocks(model)
    if inside:
        places += [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    hooks = [place.register_forward_hook(hook(i)) for i, place in enumerate(places)]
    try:
        yield
    finally:
        for one in hooks:
            one.remove()
