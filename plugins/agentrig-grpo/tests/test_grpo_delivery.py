"""The learner's side of the proof of delivery: how large a difference rounding explains."""

from __future__ import annotations

import math
from pathlib import Path

import attrs
import pytest
import torch
from agentrig_grpo.config import GrpoConfig
from agentrig_grpo.learner import Learner

from agentrig.delivery import Delivery
from agentrig.delivery.asking import Answer
from agentrig.delivery.exported import check_export, sign
from agentrig.delivery.verdict import Expected, compare, difference, measured, rounding
from agentrig.errors import AgentrigError, RunStopped


@pytest.mark.parametrize("sharpness", [1, 60])
def test_the_bound_knows_what_the_models_attention_makes_of_rounding(make_model, sharpness):
    """With sharp attention, answers token by token differ from the learner by more than the formula says."""
    model = make_model(hidden=64)
    with torch.no_grad():
        for block in model.model.layers:
            block.self_attn.q_proj.weight.mul_(sharpness)
            block.self_attn.k_proj.weight.mul_(sharpness)
    learner = Learner(model, GrpoConfig(), dtype="float32", seed=0)
    ids = torch.randint(0, 300, (1, 200), generator=torch.Generator().manual_seed(0))
    ours = learner.logprobs(ids[0].tolist())
    theirs, cache = [], None
    with torch.no_grad():
        for i in range(199):  # as the server: one token after the other, with the cache of those before
            out = model(ids[:, i : i + 1], past_key_values=cache, use_cache=True)
            theirs.append(float(out.logits[0, 0].log_softmax(-1)[ids[0, i + 1]]))
            cache = out.past_key_values
    gap, formula = difference(ours, theirs), rounding(ours, learner.layers)
    bound = formula + 2 * measured(learner, ids[0].tolist(), "float32")[0]
    assert gap < bound / 2
    assert (gap > formula) == (sharpness > 1)
    assert bound < (4 if sharpness == 1 else 1000) * formula


@pytest.fixture
def expected(make_model) -> Expected:
    """What a learner answers of which one weight is NaN: no difference would be outside of what was measured."""
    model = make_model()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[3, 3] = math.nan
    learner, ids = Learner(model, GrpoConfig(), dtype="float32", seed=0), list(range(20, 40))
    logprobs = learner.logprobs(ids)
    bound = rounding(logprobs, learner.layers) + 2 * measured(learner, ids, "float32")[0]
    assert not math.isfinite(bound)
    return Expected(version=1, ids=ids, logprobs=logprobs, digests={}, dtype="float32", bound=bound)


@pytest.mark.parametrize("bound", [math.inf, math.nan])
def test_a_bound_that_is_not_finite_holds_nothing(expected: Expected, bound: float) -> None:
    expected = attrs.evolve(expected, bound=bound)
    answer = Answer(version=1, logprobs=[-1.0] * (len(expected.ids) - 1), tokens=(5,), sampled=(-1.0,))
    wrong, _ = compare(expected, None, [answer], {}, temperature=1.0, right=lambda tokens: [-1.0])
    assert "the learner's own log-probabilities are not finite: its weights hold NaN or infinity" in wrong
    assert any("differ from the learner's by up to inf" in line for line in wrong), wrong


def test_the_message_says_which_tokens_differ() -> None:
    """All tokens from one place on point to the positions or the keys and values before it, all tokens to a weight."""
    ours = [-1.0] * 6
    expected = Expected(version=1, ids=range(7), logprobs=ours, digests={}, dtype="float32", bound=1e-4)
    answer = Answer(version=1, logprobs=(*ours[:2], -1.5, -1.00001, -1.2, -1.0), tokens=(5,), sampled=(-1.0,))
    (line,), gap = compare(expected, None, [answer], {}, temperature=1.0, right=lambda tokens: [-1.0])
    assert gap == 0.5
    assert line.endswith("by up to 0.5 (bound 0.0001), 2 of them by more than the bound, first that of token 4")


def test_recorded_calls_are_not_compared_with_an_infinite_bound(expected: Expected, tmp_path: Path) -> None:
    delivery = Delivery(tmp_path)
    delivery._expected = attrs.evolve(expected, bound=math.inf)
    with pytest.raises(RunStopped, match="what is trained is not what was sampled"):
        delivery.sampled(step=2, difference=5.0, dtype="float32")


def test_an_export_is_not_compared_with_an_infinite_bound(expected: Expected, make_model, tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path / "model")
    sign(tmp_path / "checkpoint", attrs.evolve(expected, logprobs=[-1.0] * (len(expected.ids) - 1)))
    with pytest.raises(AgentrigError, match="is not the model that was trained"):
        check_export(tmp_path / "model", tmp_path / "checkpoint")
