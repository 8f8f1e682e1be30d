"""Delivery: the proof that the model's server answers with the weights that were trained.

After every transfer of weights the server scores a fixed probe, and samples a few tokens after it. Both must agree
with the learner. Where the server says which tensors it computes with, they must be the learner's bit by bit.

    probe (tokens of the run's own) → asking (the server) → judging, verdict (against the learner)
    → record (metrics, report)
"""

from __future__ import annotations

from agentrig.delivery.judging import Learner
from agentrig.delivery.probe import Probe
from agentrig.delivery.proof import Delivery

__all__ = ["Delivery", "Learner", "Probe"]
