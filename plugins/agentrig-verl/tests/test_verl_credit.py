from __future__ import annotations

import pytest

from agentrig.credit import advantages


def test_advantages_of_single_calls_agree_with_verl(needs_verl):
    import numpy as np
    import torch
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

    values = [1.0, 0.0, 0.25, 1.0]
    theirs, _ = compute_grpo_outcome_advantage(
        torch.tensor(values)[:, None], torch.ones(4, 1), np.array(["g"] * 4, dtype=object)
    )
    assert advantages(values, [1] * 4) == pytest.approx(theirs[:, 0].tolist(), abs=1e-6)
