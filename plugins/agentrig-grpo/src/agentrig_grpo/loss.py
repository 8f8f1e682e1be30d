"""The clipped policy-gradient loss, per token, and the weights that aggregate it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import attrs
import torch  # noqa: TID253  (imported with the learner only)


@attrs.frozen(eq=False)
class TokenLoss:
    """The loss of each token and what it was made of, fp32 [T] each; only `loss` carries a gradient.

    Attributes:
        loss: The loss.
        ratio: The ratio that is clipped.
        clipped: Whether its gradient ended at the clip.
        kl_reference: The estimate of the KL divergence to the reference policy; None without one.
        rollout_is: The importance weight of a stale token, before it is truncated; None where none are stale.
    """

    loss: torch.Tensor
    ratio: torch.Tensor
    clipped: torch.Tensor
    kl_reference: torch.Tensor | None
    rollout_is: torch.Tensor | None = None


def token_losses(
    logprobs: torch.Tensor,
    behaviour: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    reference: torch.Tensor | None = None,
    kl_loss_coef: float = 0.0,
    proximal: torch.Tensor | None = None,
    rollout_is_threshold: float = math.inf,
) -> TokenLoss:
    """Return the loss of each response token.

    With r = pi(token) / pi_behaviour(token) and the rollout's advantage A:

        - min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)  +  kl_loss_coef k3

    the clipped surrogate of PPO (arXiv:1707.06347, equation 7) with DAPO's separate upper bound
    (arXiv:2503.14476, equation 8) and, when there is a reference policy, the estimate
    k3 = pi_ref / pi - log(pi_ref / pi) - 1 of KL(pi, pi_ref) (John Schulman, "Approximating KL
    divergence", 2020; DeepSeekMath, arXiv:2402.03300, equation 4).

    With `proximal`, the weights that sampled are older than those that the step began with. Then the objective is that
    of decoupled PPO (Hilton et al., arXiv:2110.00641; for language models AReaL, arXiv:2505.24298): r is
    pi(token) / pi_proximal(token), so the clip bounds the step's own change of the policy, and the first term is
    multiplied by

        min(pi_proximal(token) / pi_behaviour(token), rollout_is_threshold)

    which corrects for the policy that sampled. It is truncated, as in IMPALA (arXiv:1802.01561), where AReaL
    leaves such tokens out: every sampled token stays in the gradient. It carries none itself.

    Args:
        logprobs: Log-probabilities under the policy that is trained, [T], with a gradient.
        behaviour: Log-probabilities under the policy that sampled, [T].
        advantages: Of each token's rollout, [T].
        clip_low: How far the ratio may fall below 1 before its gradient ends.
        clip_high: How far it may rise above 1.
        reference: Log-probabilities under the frozen reference policy, [T].
        kl_loss_coef: Weight of the KL term.
        proximal: Log-probabilities under the weights that the step began with, [T], without a gradient; None if these
            are the weights that sampled.
        rollout_is_threshold: The largest importance weight of a token.
    """
    ratio = torch.exp(logprobs - (behaviour if proximal is None else proximal))
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    plain, cut = ratio * advantages, bounded * advantages
    loss = -torch.minimum(plain, cut)
    rollout_is = None
    if proximal is not None:
        rollout_is = torch.exp(proximal - behaviour)
        loss = loss * rollout_is.clamp(max=rollout_is_threshold)
    kl = None
    if reference is not None and kl_loss_coef:
        difference = reference - logprobs
        k3 = torch.exp(difference) - difference - 1
        loss = loss + kl_loss_coef * k3
        kl = k3.detach()
    return TokenLoss(loss, ratio.detach(), (cut < plain).detach(), kl, rollout_is)


def tokens_in_loss(logprobs: torch.Tensor, out: TokenLoss, advantages: torch.Tensor) -> torch.Tensor:
    """Return which tokens contribute to the gradient, after `backward`, [T].

    The gradient by a token's loss is the token's actual weight in the total loss. It is 0 if a mask or a factor removed
    the token there. The gradient by its log-probability is 0 if a mask or a factor removed it inside the loss. It is
    also 0 if the ratio is clipped or 0, or the importance weight of a stale token is 0, which counts as trained. With
    advantage 0 only the KL loss has a gradient, which is 0 as long as the policy equals the reference.

    Args:
        logprobs: The tokens' log-probabilities; they and `out.loss` retain their gradients.
        out: The tokens' loss.
        advantages: The advantage of each token's call, [T].
    """
    if out.loss.grad is None or logprobs.grad is None:  # no gradient came from these tokens
        return torch.zeros_like(advantages, dtype=torch.bool)
    policy = (logprobs.grad != 0) | (out.clipped != 0) | (out.ratio == 0)
    if out.rollout_is is not None:
        policy = policy | (out.rollout_is == 0)
    return (out.loss.grad != 0) & torch.where(advantages != 0, policy, out.kl_reference is not None)


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
