"""The policy-gradient losses, per token, what they need of samples, and the weights that aggregate them.

`algorithm.loss` selects one by name.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, chain
from typing import Literal

import attrs
import torch  # noqa: TID253  (imported with the learner only)
from agentrig_forest.sequences import Batch

from agentrig.learners import TrainSample


@attrs.frozen(eq=False)
class TokenLoss:
    """The loss of each token and what it was made of, fp32 [T] each; only `loss` carries a gradient.

    Attributes:
        loss: The loss.
        ratio: The ratio to the policy that sampled, or that the step began with.
        clipped: Whether the ratio was clipped, or its gradient ended.
        kl_reference: The estimate of the KL divergence to the reference policy; None without one.
        rollout_is: The importance weight of a stale token, before it is truncated; None where none are stale.
    """

    loss: torch.Tensor
    ratio: torch.Tensor
    clipped: torch.Tensor
    kl_reference: torch.Tensor | None
    rollout_is: torch.Tensor | None = None


@attrs.frozen(eq=False, kw_only=True)
class Tokens:
    """What a loss is computed from, [T] each.

    Attributes:
        logprobs: Log-probabilities under the policy that is trained, with a gradient.
        ratio: Their ratio to those of the policy that sampled, or that the step began with; with a gradient.
        advantages: Of each token's call.
        low: The lower clip limit of a ratio.
        high: The upper one.
        calls: Which call each token belongs to; all tokens of a call are there.
    """

    logprobs: torch.Tensor
    ratio: torch.Tensor
    advantages: torch.Tensor
    low: float
    high: float
    calls: torch.Tensor | None = None


Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""The loss of each token, the ratio, and whether it was clipped."""


def clip(tokens: Tokens) -> Parts:
    """Return PPO's clipped surrogate: - min(r A, bounded A), with a token's ratio r, and r between the clip limits.

    See arXiv:1707.06347, equation 7; the separate upper bound is DAPO's (arXiv:2503.14476, equation 8).
    """
    plain, cut = tokens.ratio * tokens.advantages, tokens.ratio.clamp(tokens.low, tokens.high) * tokens.advantages
    return -torch.minimum(plain, cut), tokens.ratio, cut < plain


def gspo(tokens: Tokens) -> Parts:
    """Return the same with the ratio of a whole reply y in the place of r, as GSPO does:

        s = (pi(y) / pi_old(y))^(1 / |y|)    the geometric mean of its tokens' ratios

    (arXiv:2507.18071). The value of each token is that of s. Its gradient is the token's part of the gradient of s, as
    in the paper's GSPO-token with equal advantages.
    """  # noqa: D415
    assert tokens.calls is not None
    n = int(tokens.calls.max()) + 1 if len(tokens.calls) else 0
    logs = torch.log(tokens.ratio.detach())
    totals = torch.zeros(n, dtype=logs.dtype, device=logs.device).index_add(0, tokens.calls, logs)
    lengths = torch.bincount(tokens.calls, minlength=n).clamp(min=1)
    ratio = torch.exp(totals / lengths)[tokens.calls] * torch.exp(tokens.logprobs - tokens.logprobs.detach())
    return clip(attrs.evolve(tokens, ratio=ratio))


def cispo(tokens: Tokens) -> Parts:
    """Return - bounded A log pi, where the ratio r between the clip limits has no gradient.

    CISPO (MiniMax-M1, arXiv:2506.13585): every token keeps a gradient, and only its weight is
    bounded. The paper uses no lower limit; clip_low near 1 does that.
    """
    ratio = tokens.ratio.detach()
    weight = ratio.clamp(tokens.low, tokens.high)
    return -weight * tokens.advantages * tokens.logprobs, tokens.ratio, weight != ratio


SAPO_POSITIVE, SAPO_NEGATIVE = 1.0, 1.05
"""The paper's temperatures of SAPO's gate for advantages above 0, and for the others."""


def sapo(tokens: Tokens) -> Parts:
    """Return - 4 / t sigmoid(t (r - 1)) A, with t = 1 for A > 0 and t = 1.05 for others: a gate in place of a clip.

    Soft adaptive policy optimization (arXiv:2511.20347). It has no clip limits. Far from 1 the gate
    is flat: such a token counts as clipped.
    """
    t = torch.where(tokens.advantages > 0, SAPO_POSITIVE, SAPO_NEGATIVE)
    gate = torch.sigmoid(t * (tokens.ratio - 1))
    return -4 / t * gate * tokens.advantages, tokens.ratio, gate * (1 - gate) == 0


CROSS_ENTROPY = "cross-entropy"


def cross_entropy(tokens: Tokens) -> Parts:
    """Return - A log pi: with A = 1 the cross-entropy of a token that was demonstrated. Nothing was sampled: no ratio.

    The learner's own log-probabilities are those of the policy before, so the ratio is 1.
    """
    return -tokens.advantages * tokens.logprobs, tokens.ratio, torch.zeros_like(tokens.ratio, dtype=torch.bool)


LOSSES: Mapping[str, Callable[[Tokens], Parts]] = {
    **{"clip": clip, "gspo": gspo, "cispo": cispo, "sapo": sapo},
    CROSS_ENTROPY: cross_entropy,
}
"""The losses by their names. The last one is that of `sft`, which no setting selects."""


def token_losses(
    logprobs: torch.Tensor,
    behaviour: torch.Tensor,
    advantages: torch.Tensor,
    *,
    kind: str = "clip",
    calls: torch.Tensor | None = None,
    clip_low: float,
    clip_high: float,
    reference: torch.Tensor | None = None,
    kl_loss_coef: float = 0.0,
    proximal: torch.Tensor | None = None,
    rollout_is_threshold: float = math.inf,
) -> TokenLoss:
    """Return the loss of each response token.

    It is that of `LOSSES[kind]`, with the ratio pi(token) / pi_behaviour(token), plus kl_loss_coef k3 when there is a
    reference policy: the estimate k3 = pi_ref / pi - log(pi_ref / pi) - 1 of KL(pi, pi_ref) (John Schulman,
    "Approximating KL divergence", 2020; DeepSeekMath, arXiv:2402.03300, equation 4).

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
        kind: The loss, a name in `LOSSES`.
        calls: Which call each token belongs to, [T]; needed by `gspo` only.
        clip_low: How far the ratio may fall below 1 before its gradient ends.
        clip_high: How far it may rise above 1.
        reference: Log-probabilities under the frozen reference policy, [T].
        kl_loss_coef: Weight of the KL term.
        proximal: Log-probabilities under the weights that the step began with, [T], without a gradient; None if these
            are the weights that sampled.
        rollout_is_threshold: The largest importance weight of a token.
    """
    loss, ratio, clipped = LOSSES[kind](
        Tokens(
            logprobs=logprobs,
            ratio=torch.exp(logprobs - (behaviour if proximal is None else proximal)),
            advantages=advantages,
            low=1 - clip_low,
            high=1 + clip_high,
            calls=calls,
        )
    )
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
    return TokenLoss(loss, ratio.detach(), clipped.detach(), kl, rollout_is)


def tokens_in_loss(logprobs: torch.Tensor, out: TokenLoss, advantages: torch.Tensor) -> torch.Tensor:
    """Return which tokens contribute to the gradient, after `backward`, [T].

    The gradient by a token's loss is the token's actual weight in the total loss. It is 0 if a mask or a factor removed
    the token there. The gradient by its log-probability is 0 if a mask or a factor removed it inside the loss. It is
    also 0 if the ratio is clipped or 0, or the importance weight of a stale token is 0, which counts as trained. With
    advantage 0 only the KL loss has a gradient, which is 0 as long as the policy equals the reference.

    Args:
        logprobs: The tokens' log-probabilities; they and `out.loss` retain their gradients.
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
    """
    if aggregation == "token-mean":
        return [1 / sum(lengths)] * len(lengths)
    tokens: Counter[int] = Counter()
    for length, rollout in zip(lengths, rollouts, strict=True):
        tokens[rollout] += length
    return [1 / (len(tokens) * tokens[rollout]) for rollout in rollouts]


@attrs.frozen(eq=False)
class LossInputs:
    """What the loss needs of some samples, by sample and place, on the device.

    Attributes:
        offsets: Where each sample's tokens begin, and the last end, [samples + 1].
        behaviour: Log-probabilities, fp32 [tokens]; None if some sample has none.
        proximal: Those under the weights that the step began with, fp32 [tokens]; None if some sample has none.
        advantages: fp32 [tokens].
        weights: Of a token of each sample in the loss, fp32 [samples].
    """

    offsets: torch.Tensor
    behaviour: torch.Tensor | None
    proximal: torch.Tensor | None
    advantages: torch.Tensor
    weights: torch.Tensor

    @classmethod
    def of(cls, samples: Sequence[TrainSample], weights: Sequence[float], device: torch.device) -> LossInputs:
        """Return those of some samples.

        Raises:
            ValueError: A sample has not one log-probability, or advantage, for each response token.
        """
        lengths = [len(s.response_ids) for s in samples]

        def numbers(values: Sequence[float]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)

        def flat(rows: Sequence[Sequence[float] | None]) -> torch.Tensor | None:
            given = [row for row in rows if row is not None]
            for row, length in zip(rows, lengths, strict=True):
                if row is not None and len(row) != length:
                    raise ValueError(f"{len(row)} numbers for {length} response tokens")
            return numbers(list(chain.from_iterable(given))) if len(given) == len(rows) else None

        advantages = flat([s.advantages for s in samples])
        assert advantages is not None
        return cls(
            torch.tensor([0, *accumulate(lengths)], device=device),
            flat([s.logprobs for s in samples]),
            flat([s.proximal for s in samples]),
            advantages,
            numbers(weights),
        )

    def places(self, batch: Batch) -> torch.Tensor:
        """Return where the response tokens of a batch are among those of all samples, [T]."""
        return self.offsets[batch.sample] + batch.place

    def look_up(self, batch: Batch) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
        """Return the behaviour log-probability, advantage and weight of each response token of a batch, [T]."""
        places = self.places(batch)
        behaviour = None if self.behaviour is None else self.behaviour[places]
        return behaviour, self.advantages[places], self.weights[batch.sample]
