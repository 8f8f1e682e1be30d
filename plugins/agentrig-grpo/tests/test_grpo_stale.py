"""Updates on rollouts of weights one version back: the correction and its figures."""

from __future__ import annotations

import copy
import math

import attrs
import pytest
import torch
from agentrig_grpo.algorithm import Grpo
from agentrig_grpo.config import GrpoConfig
from agentrig_grpo.learner import Learner
from agentrig_grpo.loss import sample_weights, token_losses
from agentrig_grpo.memory import need_of
from recorded_steps import sampled_by

from agentrig.errors import RunStopped
from agentrig.plan import resolve


def numbers(seed):
    rng = torch.Generator().manual_seed(seed)
    now, begun, sampled = (torch.randn(60, generator=rng, dtype=torch.float64) * 0.5 - 2 for _ in range(3))
    return now, begun, sampled, torch.randn(60, generator=rng, dtype=torch.float64)


def test_the_loss_of_stale_tokens_follows_decoupled_ppo() -> None:
    now, begun, sampled, advantages = numbers(1)
    now.requires_grad_()
    limits = {"clip_low": 0.2, "clip_high": 0.28, "rollout_is_threshold": 1.5}
    out = token_losses(now, sampled, advantages, proximal=begun, **limits)
    (gradient,) = torch.autograd.grad(out.loss.sum(), now)
    truncated = 0
    for i, advantage in enumerate(advantages.tolist()):
        ratio = math.exp(now[i].item() - begun[i].item())
        weight = math.exp(begun[i].item() - sampled[i].item())
        truncated += weight > 1.5
        clipped = min(max(ratio, 0.8), 1.28)
        wanted = -min(weight, 1.5) * min(ratio * advantage, clipped * advantage)
        assert out.loss[i].item() == pytest.approx(wanted, abs=1e-12)
        assert out.clipped[i].item() == (clipped * advantage < ratio * advantage), "the clip is about this step alone"
        slope = 0.0 if out.clipped[i] else -min(weight, 1.5) * ratio * advantage
        assert gradient[i].item() == pytest.approx(slope, abs=1e-12), "no gradient goes through the weight"
        assert out.rollout_is[i].item() == pytest.approx(weight)
    assert 5 < truncated < 55
    assert out.clipped.any()
    assert not out.clipped.all()


def learner_of(model, **settings):
    settings = {"lr": 3e-3, "tokens_per_batch": 64, "max_staleness": 1, **settings}
    return Learner(model, GrpoConfig(**settings), dtype="float32", seed=0)


def overlapped(learner, steps=3):
    """Learn as a run does: the samples of step 1 are fresh, the others of the weights before the update before."""
    fresh, lines = sampled_by(learner.model, 1), []
    for step in range(1, steps + 1):
        ahead = sampled_by(learner.model, step + 1)  # the server still has what the learner has
        lines.append(learner.update(fresh, step=step))
        fresh = ahead
    return lines


KINDS = {
    "one update": {},
    "several updates": {"ppo_epochs": 2, "mini_batches": 2, "clip_low": 0.02, "clip_high": 0.02},
    "a low threshold": {"rollout_is_threshold": 1.001},
    "lora with kl": {"lora_rank": 2, "kl_loss_coef": 0.1},
}


@pytest.mark.parametrize("kind", KINDS)
def test_stale_updates_and_their_figures_are_about_one_thing_each(kind, make_model) -> None:
    learner = learner_of(make_model(), **KINDS[kind])
    lines = overlapped(learner)
    assert lines[0]["rollout_is_max"] == pytest.approx(1.0, abs=1e-4), "the first step's rollouts are fresh"
    assert lines[-1]["rollout_is_max"] > 1.005, "an update has moved the policy"
    assert lines[-1]["sampled_difference"] > 1e-3
    assert lines[-1]["kl"] > 1e-6, "between the policy that sampled and the new one"
    if kind == "several updates":
        assert lines[-1]["clip_fraction"] > 0
        assert lines[-1]["ratio_max"] > 1.001
    elif kind != "lora with kl":
        assert all(line["clip_fraction"] == 0 for line in lines), "one update: nothing has changed within the step"
        assert all(line["ratio_max"] == pytest.approx(1.0, abs=1e-6) for line in lines)
    high = lines[-1]["rollout_is_ratio_fraction_high"]
    if kind == "one update":
        assert high == 0
    elif kind == "a low threshold":
        assert 0.2 < high < 0.8


def test_the_gradient_of_stale_calls_is_that_of_the_formula_one_call_at_a_time(make_model) -> None:
    learner = learner_of(make_model(), rollout_is_threshold=1.001, max_grad_norm=1e9)
    overlapped(learner, steps=1)
    plain = copy.deepcopy(learner.model)
    older = make_model()  # the weights that sampled
    samples = sampled_by(older, 2)
    weights = sample_weights([len(s.response_ids) for s in samples], [s.rollout for s in samples], "token-mean")
    total = torch.zeros(())
    for sample, share in zip(samples, weights, strict=True):
        n, ids = len(sample.prompt_ids), torch.tensor([[*sample.prompt_ids, *sample.response_ids]])
        found = torch.log_softmax(plain(ids).logits[0, n - 1 : -1].float(), -1)
        now = found.gather(1, torch.tensor(sample.response_ids)[:, None])[:, 0]
        weight = torch.exp(now.detach() - torch.tensor(sample.logprobs)).clamp(max=1.001)
        total = total - (share * sample.advantage * weight * now).sum()
    total.backward()
    norm = torch.stack([p.grad.norm() for p in plain.parameters() if p.grad is not None]).norm()
    line = learner.update(samples, step=2)
    assert line["grad_norm"] == pytest.approx(float(norm), rel=1e-5)


def test_stale_calls_without_log_probabilities_are_refused(make_model) -> None:
    learner = learner_of(make_model())
    samples = [attrs.evolve(s, logprobs=None) for s in sampled_by(learner.model, 1)]
    with pytest.raises(RunStopped, match=r"step 1: 12 of 12 calls have no log-probabilities\. With max_staleness = 1"):
        learner.update(samples, step=1)


def test_a_server_that_sleeps_during_updates_cannot_sample_then() -> None:
    with pytest.raises(Exception, match="max_staleness = 1 and server_sleep = true exclude each other: the server"):
        resolve("mini", overrides=["algorithm.max_staleness=1", "algorithm.server_sleep=true"])


def test_the_memory_of_an_update_counts_the_weights_that_sampled(model_dir) -> None:
    settings = {"model": str(model_dir)}
    more = {"tokens": 256, "dtype": "float32", "device": "cpu", "attention": "sdpa", "chunk": 1 << 20}
    now, stale = (need_of(model_dir, GrpoConfig(**settings, max_staleness=n), **more) for n in (0, 1))
    assert stale.peak - now.peak == stale.earlier == stale.change > 0
    assert "weights one version back" in stale.describe()
    assert "weights one version back" not in now.describe()
    assert Grpo(GrpoConfig(**settings)).config.max_staleness == 0
