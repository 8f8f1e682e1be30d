"""The clipped policy-gradient loss, per token, and how tokens are weighed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

import attrs
import torch  # noqa: TID253  (imported with the learner only)


@attrs.frozen(eq=False)
class TokenLoss:
    """The loss of each token and what it was made of, fp32 [T] each; only `loss` carries a gradient."""

    loss: torch.Tensor
    ratio: torch.Tensor
    clipped: torch.Tensor
    kl_reference: torch.Tensor | None


def token_losses(
    logprobs: torch.Tensor,
    behaviour: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    reference: torch.Tensor | None = None,
    kl_coef: float = 0.0,
) -> TokenLoss:
    """Return the loss of each response token.

    With r = pi(token) / pi_behaviour(token) and the rollout's advantage A:

        - min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)  +  kl_coef k3

    the clipped surrogate of PPO (arXiv:1707.06347, equation 7) with DAPO's separate upper bound
    (arXiv:2503.14476, equation 8) and, when there is a reference policy, the estimate
    k3 = pi_ref / pi - log(pi_ref / pi) - 1 of KL(pi, pi_ref) (John Schulman, "Approximating KL
    divergence", 2020; DeepSeekMath, arXiv:2402.03300, equation 4).

    Args:
        logprobs: Log-probabilities under the policy that is trained, [T], with a gradient.
        behaviour: Log-probabilities under the policy that sampled, [T].
        advantages: Of each token's rollout, [T].
        clip_low: How far the ratio may fall below 1 before its gradient ends.
        clip_high: How far it may rise above 1.
        reference: Log-probabilities under the frozen reference policy, [T].
        kl_coef: Weight of the KL term.
    """
    ratio = torch.exp(logprobs - behaviour)
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    plain, cut = ratio * advantages, bounded * advantages
    loss = -torch.minimum(plain, cut)
    kl = None
    if reference is not None and kl_coef:
        difference = reference - logprobs
        k3 = torch.exp(difference) - difference - 1
        loss = loss + kl_coef * k3
        kl = k3.detach()
    return TokenLoss(loss, ratio.detach(), (cut < plain).detach(), kl)


def sample_weights(
    lengths: Sequence[int], rollouts: Sequence[int], aggregation: Literal["token", "sequence"]
) -> list[float]:
    """Return what one token of each sample weighs in the loss, which is the weighted sum over tokens.

    `token`: every token weighs the same, 1 / (number of tokens), DAPO's (arXiv:2503.14476,
    equation 8). `sequence`: every rollout weighs the same and so do the tokens within it,
    1 / (rollouts × tokens of the rollout), as in GRPO (arXiv:2402.03300, equation 3), with the
    trained calls of a rollout taken together as its one sequence.

    Args:
        lengths: Response tokens of each sample.
        rollouts: Which rollout each sample belongs to.
        aggregation: One of the two.
    """
    if aggregation == "token":
        return [1 / sum(lengths)] * len(lengths)
    tokens: Counter[int] = Counter()
    for length, rollout in zip(lengths, rollouts, strict=True):
        tokens[rollout] += length
    return [1 / (len(tokens) * tokens[rollout]) for rollout in rollouts]
