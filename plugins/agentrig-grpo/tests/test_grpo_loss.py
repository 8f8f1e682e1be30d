from __future__ import annotations

import math
import random

import pytest
import torch
from agentrig_grpo.loss import sample_weights, token_losses


def numbers(n=40, seed=0):
    rng = torch.Generator().manual_seed(seed)
    new, old, ref = (torch.randn(n, generator=rng, dtype=torch.float64) * 0.4 - 2 for _ in range(3))
    return new, old, ref, torch.randn(n, generator=rng, dtype=torch.float64)


def by_hand(new, old, advantage, low, high, ref, kl):
    ratio = math.exp(new - old)
    loss = -min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
    return loss + kl * (math.exp(ref - new) - (ref - new) - 1)


@pytest.mark.parametrize("kl", [0.0, 0.3])
def test_the_loss_of_each_token_follows_the_formula(kl):
    new, old, ref, advantages = numbers()
    out = token_losses(new, old, advantages, clip_low=0.2, clip_high=0.28, reference=ref, kl_loss_coef=kl)
    for i in range(len(new)):
        expected = by_hand(float(new[i]), float(old[i]), float(advantages[i]), 0.2, 0.28, float(ref[i]), kl)
        assert float(out.loss[i]) == pytest.approx(expected, abs=1e-12)
        ratio, up = math.exp(new[i] - old[i]), advantages[i] > 0
        assert bool(out.clipped[i]) == bool((ratio > 1.28 and up) or (ratio < 0.8 and not up))
    assert out.clipped.any()
    assert not out.clipped.all()


def test_the_gradient_is_that_of_finite_differences():
    new, old, ref, advantages = numbers(seed=3)
    new.requires_grad_()

    def total(x):
        return token_losses(
            x, old, advantages, clip_low=0.2, clip_high=0.28, reference=ref, kl_loss_coef=0.1
        ).loss.sum()

    (gradient,) = torch.autograd.grad(total(new), new)
    step = 1e-6
    for i in range(len(new)):
        shift = torch.zeros_like(new)
        shift[i] = step
        with torch.no_grad():
            slope = (total(new + shift) - total(new - shift)) / (2 * step)
        assert float(gradient[i]) == pytest.approx(float(slope), abs=1e-6)


def test_on_policy_the_gradient_is_the_policy_gradient():
    new, _, _, advantages = numbers(seed=4)
    new.requires_grad_()
    loss = token_losses(new, new.detach(), advantages, clip_low=0.2, clip_high=0.2).loss.sum()
    torch.testing.assert_close(torch.autograd.grad(loss, new)[0], -advantages)


def test_token_weights_are_equal_and_sum_to_one():
    assert sample_weights([3, 5, 2], [0, 0, 1], "token-mean") == [0.1] * 3


def test_a_rollout_with_many_calls_does_not_outweigh_the_others():
    rng = random.Random(0)
    lengths = [rng.randrange(1, 30) for _ in range(12)]
    rollouts = [0] * 10 + [1, 2]
    weights = sample_weights(lengths, rollouts, "seq-mean-token-mean")
    share = {r: sum(w * n for w, n, o in zip(weights, lengths, rollouts, strict=True) if o == r) for r in range(3)}
    assert share == pytest.approx({0: 1 / 3, 1: 1 / 3, 2: 1 / 3})
    assert len(set(weights[:10])) == 1, "within a rollout all tokens weigh the same"
