"""The named losses, against numbers that are computed by hand from the papers' formulas."""

from __future__ import annotations

import copy
import math
import random
from typing import Any

import attrs
import pytest
import torch
from agentrig_grpo.config import GrpoConfig
from agentrig_grpo.learner import Learner
from agentrig_grpo.loss import LOSSES, token_losses
from recorded_steps import mini, sampled_by
from rollouts import rollout

from agentrig import Triplet
from agentrig.credit import opd
from agentrig.errors import ConfigError
from agentrig.learners import TrainSample
from agentrig.plan import resolve
from agentrig.run.loop import samples_of
from agentrig.testing.tiny_model import make_model

HALF = 1 / (1 + math.exp(-0.5))
"""sigmoid(0.5), for the ratio 1.5 and an advantage above 0."""

LOW = 1 / (1 + math.exp(0.525))
"""sigmoid(-1.05 * 0.5), for the ratio 0.5 and an advantage below 0."""

GOLDEN: dict[str, list[tuple[float, float, float, float]]] = {
    "clip": [(1.5, 1.0, -1.28, 0.0), (1.5, -1.0, 1.5, 1.5), (0.5, 1.0, -0.5, -0.5), (0.5, -1.0, 0.8, 0.0)],
    "cispo": [  # the log-probability is -2
        (1.5, 1.0, 2.56, -1.28), (1.5, -1.0, -2.56, 1.28), (0.5, 1.0, 1.6, -0.8), (1.1, -2.0, -4.4, 2.2),
    ],
    "sapo": [  # at the ratio 1: -4 sigmoid(0) = -2, and the gradient of a plain policy gradient
        (1.0, 1.0, -2.0, -1.0),
        (1.0, -1.0, 2 / 1.05, 1.0),
        (1.5, 1.0, -4 * HALF, -4 * HALF * (1 - HALF) * 1.5),
        (0.5, -1.0, 4 / 1.05 * LOW, 4 * LOW * (1 - LOW) * 0.5),
    ],
}  # fmt: skip
"""Ratio, advantage, loss, and gradient by the log-probability, with the limits 0.8 and 1.28."""


def losses(kind: str, ratios: list[float], advantages: list[float], **more: Any) -> tuple[Any, list[float]]:
    """Return the losses of tokens with the log-probability -2, and their gradients."""
    now = torch.full((len(ratios),), -2.0, dtype=torch.float64, requires_grad=True)
    sampled = now.detach() - torch.log(torch.tensor(ratios, dtype=torch.float64))
    limits = {"clip_low": 0.2, "clip_high": 0.28, **more}
    out = token_losses(now, sampled, torch.tensor(advantages, dtype=torch.float64), kind=kind, **limits)
    (gradient,) = torch.autograd.grad(out.loss.sum(), now)
    return out, gradient.tolist()


@pytest.mark.parametrize("kind", GOLDEN)
def test_the_formulas_of_the_papers(kind: str) -> None:
    ratios, advantages, wanted, slopes = (list(each) for each in zip(*GOLDEN[kind], strict=True))
    out, gradient = losses(kind, ratios, advantages)
    assert out.loss.tolist() == pytest.approx(wanted)
    assert gradient == pytest.approx(slopes, abs=1e-7)


def test_the_ratio_of_a_reply_is_the_geometric_mean_of_its_tokens() -> None:
    """Ratios 1.21 and 1 have the mean 1.1; 4 and 1 have 2, which is clipped for a better reply, not for a worse one."""
    calls = torch.tensor([0, 0, 1, 1, 2, 2])
    out, gradient = losses("gspo", [1.21, 1.0, 4.0, 1.0, 4.0, 1.0], [1.0] * 4 + [-1.0] * 2, calls=calls)
    assert out.loss.tolist() == pytest.approx([-1.1, -1.1, -1.28, -1.28, 2.0, 2.0])
    assert gradient == pytest.approx([-1.1, -1.1, 0.0, 0.0, 2.0, 2.0])
    assert out.clipped.tolist() == [False, False, True, True, False, False]


def test_what_clipped_means_with_each_loss() -> None:
    assert losses("clip", [1.5, 1.5, 1.0], [1.0, -1.0, 1.0])[0].clipped.tolist() == [True, False, False]
    assert losses("cispo", [1.5, 1.5, 1.0], [1.0, -1.0, 1.0])[0].clipped.tolist() == [True, True, False]
    out, gradient = losses("sapo", [1.5, 1e9], [1.0, 1.0])
    assert out.clipped.tolist() == [False, True]
    assert gradient[1] == 0.0


@pytest.mark.parametrize("kind", LOSSES)
def test_extreme_ratios_give_finite_losses_of_worse_replies_only_if_the_paper_does(kind: str) -> None:
    calls = torch.arange(2)
    out, gradient = losses(kind, [1e30, 1e-30], [1.0, 1.0], calls=calls)
    assert all(map(math.isfinite, [*out.loss.tolist(), *gradient]))


@pytest.mark.parametrize("kind", ["clip", "cispo", "sapo"])
def test_stale_tokens_are_weighted_with_every_loss(kind: str) -> None:
    now = torch.full((1,), -2.0, requires_grad=True)
    begun, sampled = torch.tensor([-2.1]), torch.tensor([-2.6])
    more: Any = {"kind": kind, "clip_low": 0.2, "clip_high": 0.28}
    stale = token_losses(now, sampled, torch.ones(1), proximal=begun, rollout_is_threshold=1.5, **more)
    fresh = token_losses(now, begun, torch.ones(1), **more)
    assert stale.loss.tolist() == pytest.approx([1.5 * value for value in fresh.loss.tolist()])


def test_a_worth_for_each_token_is_that_of_the_call_where_all_are_equal() -> None:
    samples = sampled_by(mini(), 1)
    spread = [attrs.evolve(s, advantage=[float(str(s.advantage))] * len(s.response_ids)) for s in samples]
    one, other = (learner_of().update(made, step=1) for made in (samples, spread))
    assert {k: v for k, v in one.items() if k != "learner_tokens_per_s"} == {
        k: v for k, v in other.items() if k != "learner_tokens_per_s"
    }


@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_tokens_that_are_worth_nothing_are_not_trained_but_count_in_the_mean(kl: float) -> None:
    samples = [attrs.evolve(s, advantage=[1.0, *[0.0] * (len(s.response_ids) - 1)]) for s in sampled_by(mini(), 1)]
    learner = learner_of(kl_loss_coef=kl)
    figures = learner.update(samples, step=1)
    tokens = sum(len(s.response_ids) for s in samples)
    assert learner.used == [(len(s.response_ids) if kl else 1, "") for s in samples]
    assert figures["loss"] == pytest.approx(-len(samples) / tokens, abs=1e-5)


def test_what_a_teacher_says_brings_the_policy_closer_to_it() -> None:
    """The reverse KL divergence over all tokens after a prompt, of which the credit sees samples only."""
    student, teacher = make_model(seed=1), make_model(seed=5)
    with torch.no_grad():
        teacher.lm_head.weight.mul_(3)
    prompt = list(range(5, 15))

    def logs(model: Any) -> torch.Tensor:
        with torch.no_grad():
            return torch.log_softmax(model(torch.tensor([prompt])).logits[0, -1].float(), -1)

    def divergence() -> float:
        own = logs(learner.model)
        return float((own.exp() * (own - logs(teacher))).sum())

    config = GrpoConfig(model="mini", lr=3e-3, clip_low=0.9, clip_high=10.0)
    learner, chance = Learner(student, config, dtype="float32", seed=0), torch.Generator().manual_seed(3)
    before = divergence()
    for step in range(1, 16):
        own, said = logs(learner.model), logs(teacher)
        tokens = torch.multinomial(own.exp(), 64, replacement=True, generator=chance).tolist()
        triplets = [
            Triplet(prompt_ids=prompt, response_ids=[t], logprobs=[float(own[t])], span_id=f"c{i}")
            for i, t in enumerate(tokens)
        ]
        group = [rollout(0.0, triplets=triplets)]
        heard = {("r", f"c{i}"): [float(said[t])] for i, t in enumerate(tokens)}
        samples, _ = samples_of(lambda groups, heard=heard: opd(groups, heard), group)
        learner.update(samples, step=step)
    assert before > 1
    assert divergence() < before / 2


GSPO: dict[str, Any] = {
    "loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "loss_agg_mode": "seq-mean-token-mean",
}  # fmt: skip


def learner_of(**settings: Any) -> Learner:
    config = GrpoConfig(model="mini", **{"lr": 1e-3, **settings})
    return Learner(copy.deepcopy(mini()), config, dtype="float32", seed=0)


@pytest.mark.parametrize("settings", [{"loss": "cispo"}, {"loss": "sapo"}, GSPO], ids=lambda s: s["loss"])
def test_a_loss_is_the_same_however_the_tokens_are_packed(settings: dict[str, Any]) -> None:
    samples, found = sampled_by(mini(), 1), []
    rng = random.Random(3)
    off = [attrs.evolve(s, logprobs=[p + rng.gauss(0, 0.3) for p in s.logprobs or ()]) for s in samples]
    for tokens in (64, 4096):
        learner = learner_of(tokens_per_batch=tokens, **settings)
        figures = learner.update(off, step=1)
        found.append((figures["loss"], figures["grad_norm"]))
        assert [reason for _, reason in learner.used] == [""] * 12
        assert [n for n, _ in learner.used] == [len(s.response_ids) for s in off]
    assert found[0] == pytest.approx(found[1], rel=1e-4)
    plain = learner_of(loss_agg_mode=settings.get("loss_agg_mode", "token-mean")).update(off, step=1)
    assert plain["grad_norm"] != pytest.approx(found[0][1], rel=1e-3), "it is another loss"


@pytest.mark.parametrize("kind", ["cispo", "sapo"])
def test_at_the_ratio_one_every_loss_has_the_gradient_of_the_policy(kind: str) -> None:
    samples = [attrs.evolve(s, logprobs=None) for s in sampled_by(mini(), 2)]
    norms = [learner_of(loss=loss).update(samples, step=1)["grad_norm"] for loss in ("clip", kind)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


def test_a_ratio_of_a_whole_rollout_is_refused_with_several_calls() -> None:
    single: list[TrainSample] = sampled_by(mini(), 1)
    several = [attrs.evolve(s, rollout=i // 2) for i, s in enumerate(single)]
    with pytest.raises(ConfigError, match=r"gspo has one ratio for a whole rollout, and 6 rollouts .* several trained"):
        learner_of(**GSPO).update(several, step=1)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"loss": "gspo", "loss_agg_mode": "seq-mean-token-mean"}, "set clip_low = 3e-4 and clip_high = 4e-4"),
        ({**GSPO, "loss_agg_mode": "token-mean"}, "is a mean over rollouts"),
        ({**GSPO, "max_staleness": 1}, "exclude each other"),
        ({"loss": "sapo", "clip_high": 0.4}, "has no clip limits"),
        ({"loss": "ppo"}, "must be in"),
        ({"los": "clip"}, 'Did you mean "loss"'),
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], why: str) -> None:
    words = [f"algorithm.{key}={value}" for key, value in settings.items()]
    with pytest.raises(ConfigError, match=why):
        resolve("mini", overrides=words)
