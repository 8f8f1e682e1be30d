"""Delivery: the proof that the model's server answers with the weights that were trained.

After every transfer of weights the server scores a fixed probe, and samples a few tokens after it. Both results must
agree with the learner. If the server reports which tensors it uses, they must equal the learner's bit for bit.

    digests (what is sent) → asking (what comes back) → verdict (the comparison) → proof (when, and the figures)
"""

from __future__ import annotations

from agentrig.delivery.proof import Delivery
from agentrig.delivery.verdict import Learner

__all__ = ["Delivery", "Learner"]
