"""The figures of an update: sums over its tokens, which stay on the device until a mini-batch has been computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import attrs
import torch  # noqa: TID253  (imported with the learner only)

from agentrig_grpo.loss import TokenLoss


@attrs.define
class Figures:
    """Sums over the tokens of a step's updates."""

    tokens: int = 0
    """Response tokens that the gradient came from."""
    computed: int = 0
    traced: int = 0
    repeated: int = 0
    """Of the computed tokens, those that another pass of the same mini-batch computed too."""
    longest: int = 0
    """Tokens of the largest pass."""
    ratio_max: float = 0.0
    rollout_is_max: float = 0.0
    sums: Counter[str] = attrs.field(factory=Counter)
    recorded: bool = True
    """Whether all samples came with log-probabilities."""
    sampled_difference: float | None = None
    """Before the first update: the mean difference of the recorded log-probabilities and the learner's."""
    norms: list[float] = attrs.field(factory=list)
    """Of the gradient before clipping, one for each update that was tried."""
    updates: int = 0
    before: list[torch.Tensor] = attrs.field(factory=list)
    """The trained weights before the first update."""

    def add(self, parts: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Add the figures of an update's passes, by one transfer from the device."""
        names = list(parts[0])
        table = torch.stack([torch.stack([part[name].float() for name in names]) for part in parts]).tolist()
        for row in table:
            found = dict(zip(names, row, strict=True))
            self.ratio_max = max(self.ratio_max, found.pop("ratio_max"))
            self.rollout_is_max = max(self.rollout_is_max, found.pop("rollout_is_max", 0.0))
            self.sums.update(found)
        if self.recorded and not self.norms:
            self.sampled_difference = self.sums["gap"] / self.tokens

    def metrics(self) -> dict[str, float]:
        """Return the means and sums; without an update that was tried only counts, because there is nothing to measure.

        `entropy` is in nats, `kl` and `kl_k1` are the k3 and k1 estimates of behaviour against policy, `trained_tokens`
        the response tokens that the gradient came from, `computed_tokens` those through the model, `traced_tokens`
        what they would be if no two calls shared any, `repeated_tokens` those computed again because a group did not
        fit into one pass, `sampled_difference` the mean difference of the recorded log-probabilities and those of the
        first update, in nats, if all calls have recorded ones. With `max_staleness = 1` the ratio and the clip are
        those against the weights that the step began with (`token_losses`); `rollout_is_max` is before importance
        weights are truncated, and `rollout_is_ratio_fraction_high` the share of tokens whose weight was.
        """
        found = {
            "updates": float(self.updates),
            "trained_tokens": float(self.tokens),
            "computed_tokens": float(self.computed),
            "traced_tokens": float(self.traced),
            "repeated_tokens": float(self.repeated),
        }
        if not self.norms:
            return found
        n, sums, tried = self.tokens, self.sums, len(self.norms)
        found |= {
            "loss": sums["loss"] / tried,
            "clip_fraction": sums["clipped"] / n,
            "ratio_mean": sums["ratio"] / n,
            "ratio_max": self.ratio_max,
            "entropy": sums["entropy"] / n,
            "kl": sums["kl"] / n,
            "kl_k1": sums["kl_k1"] / n,
            "grad_norm": sum(self.norms) / tried,
        }
        if self.sampled_difference is not None:
            found["sampled_difference"] = self.sampled_difference
        if "kl_reference" in sums:
            found["kl_reference"] = sums["kl_reference"] / n
        if "rollout_is" in sums:
            found["rollout_is_mean"] = sums["rollout_is"] / n
            found["rollout_is_max"] = self.rollout_is_max
            found["rollout_is_ratio_fraction_high"] = sums["truncated"] / n
        return found


def of_pass(loss: torch.Tensor, out: TokenLoss, entropy: torch.Tensor, threshold: float) -> dict[str, torch.Tensor]:
    """Return a pass's figures, which stay on the device so that it never waits.

    Args:
        entropy: Of each token's distribution, nats.
        threshold: Where the importance weights of stale tokens are truncated.
    """
    # From the policy that sampled to the current one.
    whole = out.ratio if out.rollout_is is None else out.ratio * out.rollout_is
    log_ratio = whole.log()
    found = {
        "loss": loss.detach(),
        "ratio": out.ratio.sum(),
        "ratio_max": out.ratio.max(),
        "clipped": out.clipped.sum(),
        "entropy": entropy.sum(),
        "kl": (whole - 1 - log_ratio).sum(),
        "kl_k1": -log_ratio.sum(),
        "gap": log_ratio.abs().sum(),
    }
    if out.kl_reference is not None:
        found["kl_reference"] = out.kl_reference.sum()
    if out.rollout_is is not None:
        found["rollout_is"], found["rollout_is_max"] = out.rollout_is.sum(), out.rollout_is.max()
        found["truncated"] = (out.rollout_is > threshold).sum()
    return found
