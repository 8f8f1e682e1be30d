"""Delivery: the proof that the model's server answers with the weights that were trained.

After every transfer of weights the server scores a fixed probe, and samples a few tokens after it. Both results must
agree with the learner. If the server reports which tensors it uses, they must equal the learner's bit for bit.

    probe (recorded tokens) → asking (the server) → judging, verdict (comparison with the learner)
    → record (metrics, report)
"""

from __future__ import annotations

from agentrig.delivery.judging import Learner
from agentrig.delivery.probe import Probe
from agentrig.delivery.proof import Delivery

__all__ = ["Delivery", "Learner", "Probe"]
