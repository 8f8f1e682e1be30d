"""The clipped policy-gradient loss, per token, and the weights that aggregate it."""

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
    kl_loss_coef: float = 0.0,
) -> TokenLoss:
    """Return the loss of each response token.

    With r = pi(token) / pi_behaviour(token) and the rollout's advantage A:

        - min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)  +  kl_loss_coef k3

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
        kl_loss_coef: Weight of the KL term.
    """
    ratio = torch.exp(logprobs - behaviour)
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    plain, cut = ratio * advantages, bounded * advantages
    loss = -torch.minimum(plain, cut)
    kl = None
    if reference is not None and kl_loss_coef:
        difference = reference - logprobs
        k3 = torch.exp(difference) - difference - 1
        loss = loss + kl_loss_coef * k3
        kl = k3.detach()
    return TokenLoss(loss, ratio.detach(), (cut < plain).detach(), kl)


def sample_weights(
    lengths: Sequence[int], rollouts: Sequence[int], aggregation: Literal["token-mean", "seq-mean-token-mean"]
) -> list[float]:
    """Return the weight of one token of each sample; the loss is the weighted sum over tokens.

    `token-mean`: each token has the weight 1 / (number of tokens), as in DAPO (arXiv:2503.14476,
    equation 8). `seq-mean-token-mean`: each rollout has the same weight, and so has each token within it:
    1 / (rollouts × tokens of the rollout), as in GRPO (arXiv:2402.03300, equation 3). All trained
    calls of a rollout count as one sequence.

    Args:
        lengths: Response tokens of each sample.
        rollouts: Which rollout each sample belongs to.
        aggregation: One of the two.
    """
    if aggregation == "token-mean":
        return [1 / sum(lengths)] * len(lengths)
    tokens: Counter[int] = Counter()
    for length, rollout in zip(lengths, rollouts, strict=True):
        tokens[rollout] += length
    return [1 / (len(tokens) * tokens[rollout]) for rollout in rollouts]
