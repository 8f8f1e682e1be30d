"""The bound of AdamW's step holds for the fused kernels, and no fault of interest is within it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from agentrig.audit.adamw import adamw

SETTINGS = {"beta1": 0.9, "beta2": 0.95, "weight_decay": 0.0}
ELEMENTS = 1568
"""lora_B of a model of 1.5B parameters: eight elements of each of 196 tensors."""


def gradients(rng: np.random.Generator, size: int) -> np.ndarray:
    """Return gradients as LoRA in bf16 has them: few bits, of all sizes, and some that cancel the mean exactly."""
    found = rng.standard_normal(size) * 10.0 ** rng.uniform(-9, -3, size)
    return torch.tensor(found, dtype=torch.bfloat16).double().numpy()


def as32(*values: Any) -> tuple[Any, ...]:
    return tuple(np.float32(v) for v in values)


def weighted(mean: Any, square: Any, weight: Any, gradient: Any, *, made: int, rate: float, s: Any) -> Any:
    """The arithmetic of a fused kernel in fp32: products and a sum; betas as doubles where torch's have doubles."""
    b1, b2 = as32(s["beta1"], s["beta2"])
    mean = b1 * mean + (np.float32(1) - b1) * gradient
    square = b2 * square + (np.float32(1) - b2) * gradient * gradient
    c1, c2 = as32(1 - np.float64(b1) ** (made + 1), 1 - np.float64(b2) ** (made + 1))
    denominator = np.sqrt(square) / np.sqrt(c2) + np.float32(1e-8)
    weight = weight - np.float32(rate) * np.float32(s["weight_decay"]) * weight
    return mean, square, weight - np.float32(rate) / c1 * (mean / denominator)


def lerped(mean: Any, square: Any, weight: Any, gradient: Any, *, made: int, rate: float, s: Any) -> Any:
    """The same with a linear interpolation for the mean, as torch's kernels have it."""
    (w1,) = as32(1 - s["beta1"])
    mean = mean + w1 * (gradient - mean)
    b2, w2 = as32(s["beta2"], 1 - s["beta2"])
    square = b2 * square + w2 * (gradient * gradient)
    c1, c2 = as32(1 - s["beta1"] ** (made + 1), np.sqrt(1 - s["beta2"] ** (made + 1)))
    weight = weight * (np.float32(1) - np.float32(rate * s["weight_decay"]))
    return mean, square, weight - (np.float32(rate) / c1) * mean / (np.sqrt(square) / c2 + np.float32(1e-8))


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [weighted, lerped])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_no_false_stop_in_10000_updates_of_lora_in_bf16(kernel: Any, decay: float) -> None:
    rng, settings, rate = np.random.default_rng(0), {**SETTINGS, "weight_decay": decay}, 1e-6
    weight, mean, square = (np.zeros(ELEMENTS, np.float32) for _ in range(3))  # lora_B begins with zeros
    largest, cancelled = 0.0, 0
    for update in range(10_000):
        gradient = gradients(rng, ELEMENTS).astype(np.float32)
        if update % 3 == 1:  # 0.9 m + 0.1 g is nothing but rounding
            gradient[::7] = (-9 * mean[::7]).astype(np.float32)
        step = adamw(*(x.astype(np.float64) for x in (weight, gradient, mean, square)), made=update, rate=rate,
                     settings=settings)  # fmt: skip
        after = kernel(mean, square, weight, gradient, made=update, rate=rate, s=settings)
        off = np.abs(after[2].astype(np.float64) - weight.astype(np.float64) - step.change)
        largest = max(largest, float((off / step.bound).max()))
        cancelled += int((off > 1e-2 * np.abs(step.change) + 2.4e-7 * np.abs(weight)).sum())  # the bound of before
        assert (np.abs(after[0] - step.mean) <= step.mean_bound).all()
        mean, square, weight = after
    assert cancelled > 0, "the simulation has the case that ended healthy runs"
    assert 0.01 < largest < 1, largest


@pytest.mark.slow
def test_torch_is_within_the_bound() -> None:
    rng, rate = np.random.default_rng(1), 1e-6
    p = torch.nn.Parameter(torch.zeros(ELEMENTS))
    optimizer = torch.optim.AdamW([p], lr=rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    largest = 0.0
    for update in range(2000):
        state = optimizer.state.get(p) or {"exp_avg": torch.zeros(ELEMENTS), "exp_avg_sq": torch.zeros(ELEMENTS)}
        p.grad = torch.tensor(gradients(rng, ELEMENTS), dtype=torch.float32)
        before = [t.detach().double().numpy().copy() for t in (p, p.grad, state["exp_avg"], state["exp_avg_sq"])]
        step = adamw(*before, made=update, rate=rate, settings=SETTINGS)
        optimizer.step()
        largest = max(
            largest, float((np.abs(p.detach().double().numpy() - before[0] - step.change) / step.bound).max())
        )
    assert 0.01 < largest < 1, largest


@pytest.mark.parametrize("made", [0, 1, 100])
@pytest.mark.parametrize("rate", [1e-3, 1e-5])
def test_another_rate_beta_or_state_is_beyond_the_bound(made: int, rate: float) -> None:
    rng = np.random.default_rng(2)
    weight, gradient, mean = (rng.standard_normal(64) * size for size in (0.02, 1e-4, 1e-4))
    square = np.full(64, 1e-8)
    right = adamw(weight, gradient, mean, square, made=made, rate=rate, settings=SETTINGS)
    for other in (
        adamw(weight, gradient, mean, square, made=made, rate=rate / 1000, settings=SETTINGS),
        adamw(weight, gradient, mean, square, made=made, rate=rate * 1.01, settings=SETTINGS),
        adamw(weight, gradient, 0 * mean, square, made=made, rate=rate, settings=SETTINGS),
        adamw(weight, -gradient, mean, square, made=made, rate=rate, settings=SETTINGS),
        adamw(weight, gradient, mean, square, made=made, rate=rate, settings={**SETTINGS, "weight_decay": 0.1}),
    ):
        assert (np.abs(other.change - right.change) > right.bound).mean() > 0.9
