"""The learner's side of the proof of delivery: how large a difference rounding explains."""

from __future__ import annotations

import pytest
import torch
from agentrig_grpo.config import GrpoConfig
from agentrig_grpo.learner import Learner

from agentrig.delivery.verdict import difference, measured, rounding


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
