"""Links `gradient` and `weights`: an audited step's updates, computed again from its recorded calls.

The step is repeated twice, in the learner's number of bits and in more. What the two differ by is what rounding does to
this step: a bound that is measured where it is used. Each formula is written from its paper.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from agentrig.audit.adamw import adamw, learning_rate
from agentrig.audit.model import Weights, logprobs
from agentrig.audit.record import Call, Record
from agentrig.audit.scores import expected
from agentrig.audit.sketch import Sketch, projections
from agentrig.audit.verdicts import Verdict, fault, ok, some, unseen

if TYPE_CHECKING:
    import torch

MARGIN = 16.0
"""How many times the measured difference of two precisions a gradient may differ. The learner adds in another order and
shares tokens between calls; the measured difference is one sample of what that does, and the largest of some hundred
tensors is compared."""

FLOOR = 1e-6
"""Of the norm of the whole gradient: what a tensor may differ by where nothing was measured. A sum of n numbers in fp32
rounds by about 6e-8 times the root of n, for up to a few hundred products in a row."""

HALF = 2.0**-6
"""Of a tensor's own gradient, where the learner computes in bf16: what it may differ by besides. Each of the two
operands of some four products in a row is rounded by 2^-9, adapters among them, which the repetition merges in fp32."""

SIGMAS = 6.0
"""A sum of an error's elements with random signs is larger than six times its norm with a probability below 4e-8
(Hoeffding)."""

LOOKED = 2
"""Updates of a step whose gradients are computed again: in the second, ratios are not 1 any more, and it begins with
weights and moments that the first has made."""

Key = tuple[str, str]


@attrs.define(eq=False)
class Repeat:
    """A step in one precision: the weights as they go, and what was seen on the way.

    Attributes:
        weights: The trained tensors and where they are; they change from update to update.
        reference: The starting model of a KL loss; None without one.
        dtype: Of weights and arithmetic.
        rounded: What the weights are rounded to before they are computed with; None for nothing.
        cast: Whether the forward pass runs under bf16 autocast.
        moments: By trained tensor, AdamW's two moments; zeros if it has none yet.
        begun: The log-probabilities before the first update, by call.
        norms: The norm of the gradient of each update before clipping.
        kl: The estimates of the KL divergence of all tokens.
    """

    weights: Weights
    reference: Any
    dtype: torch.dtype
    rounded: torch.dtype | None = None
    cast: bool = False
    moments: dict[str, tuple[torch.Tensor, torch.Tensor]] = attrs.field(factory=dict)
    begun: dict[Key, torch.Tensor] = attrs.field(factory=dict)
    norms: list[float] = attrs.field(factory=list)
    kl: list[float] = attrs.field(factory=list)

    def begin(self, calls: Sequence[Call], settings: Mapping[str, Any]) -> None:
        """Compute the log-probabilities under the weights that the step begins with, where the loss needs them."""
        import torch

        needed = [call for call in calls if settings["max_staleness"] or call.logprobs is None]
        if not needed:
            return
        model = self.weights.load(self.dtype, rounded=self.rounded)
        for call in needed:
            with torch.no_grad(), torch.autocast(model.device.type, torch.bfloat16, enabled=self.cast):
                self.begun[call.rollout, call.span] = logprobs(model, call, settings["temperature"])

    def gradient(
        self, calls: Sequence[Call], advantages: Mapping[str, float], settings: Mapping[str, Any]
    ) -> dict[str, torch.Tensor]:
        """Return the clipped gradient of one update's loss, by trained tensor.

        The loss of a token is PPO's clipped surrogate (arXiv:1707.06347, equation 7) with DAPO's upper bound
        (arXiv:2503.14476, equation 8). With stale rollouts it is that of decoupled PPO (arXiv:2110.00641): the ratio is
        to the policy before the step, times that policy's ratio to the one that sampled, truncated. The KL term is
        Schulman's k3 (arXiv:2402.03300, equation 4). A token has the weight 1 / tokens of the update (DAPO), or
        1 / (rollouts * tokens of its rollout) (GRPO, equation 3); calls with advantage 0 count in both.
        """
        import torch

        model = self.weights.load(self.dtype, rounded=self.rounded)
        lengths: Counter[str] = Counter()
        for call in calls:
            lengths[call.rollout] += len(call.reply)
        by_rollout = settings["loss_agg_mode"] == "seq-mean-token-mean"
        low, high = 1 - settings["clip_low"], 1 + settings["clip_high"]
        kl_coef, stale, temperature = settings["kl_loss_coef"], settings["max_staleness"], settings["temperature"]
        total: dict[str, torch.Tensor] = {}
        for call in calls:
            advantage = advantages[call.rollout]
            if not advantage and not kl_coef:
                continue
            with torch.autocast(model.device.type, torch.bfloat16, enabled=self.cast):
                now = logprobs(model, call, temperature)
            given, key = call.logprobs, (call.rollout, call.span)
            sampled = self.begun[key] if given is None else torch.tensor(given, dtype=now.dtype, device=now.device)
            begun = self.begun[key] if stale else sampled
            ratio = torch.exp(now - begun)
            gain = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
            if stale:
                gain = gain * torch.exp(begun - sampled).clamp(max=settings["rollout_is_threshold"])
            loss = -gain
            if kl_coef:
                with torch.no_grad(), torch.autocast(model.device.type, torch.bfloat16, enabled=self.cast):
                    reference = logprobs(self.reference, call, temperature)
                k3 = torch.exp(reference - now) - (reference - now) - 1
                self.kl += k3.tolist()
                loss = loss + kl_coef * k3
            weight = 1 / (len(lengths) * lengths[call.rollout]) if by_rollout else 1 / sum(lengths.values())
            (loss.sum() * weight).backward()  # type: ignore[no-untyped-call]
            for name, p in model.named_parameters():
                if p.grad is not None:  # added in at least 32 bits, or a sum of many calls would round away
                    more = p.grad.float() if p.grad.dtype.itemsize < 4 else p.grad
                    total[name] = total[name].add_(more) if name in total else more
                    p.grad = None
        found = self.weights.gradients(model, total)
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in found.values()))
        self.norms.append(norm)
        clip = min(1.0, settings["max_grad_norm"] / (norm + 1e-6))
        return {name: g.mul_(clip) for name, g in found.items()}

    def step(
        self, gradients: Mapping[str, torch.Tensor], *, rate: float, made: int, settings: Mapping[str, Any]
    ) -> None:
        """Make AdamW's step (arXiv:1711.05101, algorithm 2) with all elements."""
        import torch

        beta1, beta2 = settings["beta1"], settings["beta2"]
        new = {}
        for name, gradient in gradients.items():
            weight = self.weights.trained[name].to(gradient.dtype)
            none = torch.zeros_like(weight)
            mean, square = self.moments.get(name, (none, none))
            mean = beta1 * mean.to(gradient.dtype) + (1 - beta1) * gradient
            square = beta2 * square.to(gradient.dtype) + (1 - beta2) * gradient.square()
            self.moments[name] = mean, square
            root = (square / (1 - beta2 ** (made + 1))).sqrt() + 1e-8
            new[name] = weight * (1 - rate * settings["weight_decay"]) - rate * mean / (1 - beta1 ** (made + 1)) / root
        self.weights = attrs.evolve(self.weights, trained=new)


def gradient(
    record: Record, step: int, sketch: Sketch, exact: Repeat, rough: Repeat, *, made: int, moments: bool
) -> Iterator[Verdict]:
    """Compare the gradients that the optimizer got with those of the whole step's loss.

    Args:
        record: The run.
        step: The step.
        sketch: What the learner left.
        exact: The step to be repeated in more bits.
        rough: The same in the learner's bits.
        made: How many updates the run had made before.
        moments: Whether AdamW's moments before the step are known; else only the first update can be looked at.
    """
    settings, figures = record.settings, record.lines.get(step, {}).get("algorithm", {})
    if not math.isfinite(figures.get("grad_norm", 0.0)):
        yield unseen("gradient", "an update was skipped, because its gradient was not finite")
        return
    calls = {(call.rollout, call.span): call for row in record.rows("train", step) for call in row.calls}
    advantages, taken = expected(record, step), set(record.trained(step))
    wrong: list[str] = []
    times: Counter[Key] = Counter(tuple(call) for update in sketch.updates for call in update["calls"])
    strange = [key for key in times if key not in calls or key[0] not in advantages]
    if strange:
        yield fault("gradient", f"{len(strange)} calls were trained that the step does not have", causes="the learner")
        return
    epochs = settings["ppo_epochs"]
    needed = {key for key in taken | set(times) if advantages.get(key[0]) or settings["kl_loss_coef"]}
    odd = [f"call {span} of rollout {rollout}: {times[rollout, span]}" for rollout, span in sorted(needed)
           if times[rollout, span] != epochs]  # fmt: skip
    if odd:
        yield fault("gradient", f"{len(odd)} calls are not in {epochs} updates: {some(odd)}", causes="mini-batches")
    looked = sketch.updates[: LOOKED if moments else 1]
    every = [calls[tuple(key)] for key in dict.fromkeys(tuple(key) for one in looked for key in one["calls"])]
    for repeat in (exact, rough):
        repeat.begin(every, settings)
    worst, half = 0.0, rough.cast or rough.dtype.itemsize < 4
    for number, update in enumerate(looked):
        batch = [calls[tuple(key)] for key in update["calls"]]
        right, near = (repeat.gradient(batch, advantages, settings) for repeat in (exact, rough))
        whole = math.sqrt(sum(float(g.double().square().sum()) for g in right.values()))
        norm, bound = (
            exact.norms[-1],
            MARGIN * abs(exact.norms[-1] - rough.norms[-1]) + (HALF if half else 1e-4) * exact.norms[-1] + 1e-9,
        )
        if not abs(update["norm"] - norm) <= bound:
            wrong.append(
                f"update {number + 1}: norm {update['norm']:.6g} before clipping instead of {norm:.6g}, the bound is "
                f"{bound:.2g}"
            )
        silent = []
        for name, seen in update["tensors"].items():
            wanted = projections(right[name], name)
            spread = float((right[name].double() - near[name].double()).norm())
            bound = MARGIN * spread + FLOOR * whole + (HALF * wanted[0] if half else 0.0) + 1e-30
            found = seen["gradient"] or [0.0] * len(wanted)
            share = max(
                abs(a - b) / (bound * (SIGMAS if k else 1.0))
                for k, (a, b) in enumerate(zip(found, wanted, strict=True))
            )
            worst = max(worst, share)
            if share > 1 and not found[0]:
                silent.append(name)
            elif not share <= 1:
                times_off = found[0] / wanted[0] if wanted[0] else math.inf
                sign = sum(a * b for a, b in zip(found[1:], wanted[1:], strict=True))
                wrong.append(
                    f"update {number + 1}, {name}: norm {found[0]:.6g} instead of {wanted[0]:.6g}, "
                    f"{times_off:.3g} times{' and of the other sign' if sign < 0 else ''}, the bound is {bound:.2g}"
                )
        if silent:  # first: where something is detached, gradients before it are other ones too
            wrong.insert(0, f"update {number + 1}: no gradient reaches {len(silent)} tensors: {', '.join(silent[:3])}")
        rate = learning_rate(settings, step=step, update=made + number + 1)
        if number + 1 < len(looked):
            for repeat, own in ((exact, right), (rough, near)):
                repeat.step(own, rate=rate, made=made + number, settings=settings)
    if wrong:
        detail = f"gradients are not those of the step's loss: {some(wrong)}. The bound is {MARGIN:g} times "
        detail += "what two precisions differ by in this step"
        causes = "token weights, the loss, a pass that is lost or counted twice, a layer that is detached or changed"
        yield fault("gradient", detail, causes=causes, ratio=worst)
    if len(looked) == len(sketch.updates):
        yield from _kl(figures, exact, rough)
    tensors = len(sketch.updates[0]["tensors"])
    share = f"{len(looked)} of {len(sketch.updates)} updates, {len(times)} calls, {tensors} tensors"
    yield ok("gradient", share, ratio=worst)


def _kl(figures: Mapping[str, Any], exact: Repeat, rough: Repeat) -> Iterator[Verdict]:
    """Compare the stated KL divergence to the starting model."""
    if not exact.kl or "kl_reference" not in figures:
        return
    found, wanted, other = figures["kl_reference"], *(sum(each.kl) / len(each.kl) for each in (exact, rough))
    # An estimate of a KL near 0 is a difference of numbers near 1, which round by 1.2e-7 each.
    bound = MARGIN * abs(wanted - other) + 1e-4 * abs(wanted) + 2.4e-7
    if not abs(found - wanted) <= bound:
        detail = f"the step states the KL divergence {found:.6g} to its reference, and to the starting model it is "
        causes = "a reference that is not the starting model"
        yield fault("gradient", f"{detail}{wanted:.6g}, bound {bound:.2g}", causes=causes)


def weights(record: Record, step: int, sketch: Sketch, before: Sketch | None, *, made: int) -> Iterator[Verdict]:
    """Compare what the optimizer did to some elements of every tensor with AdamW's step; see `adamw` for the bound.

    Args:
        record: The run.
        step: The step.
        sketch: What the learner left.
        before: That of the step before, if it was audited.
        made: How many updates the run had made before.
    """
    import torch

    settings, wrong, worst, elements = record.settings, [], 0.0, 0
    eight = settings["optimizer"] == "adamw8bit"
    state: dict[str, Any] = {}  # by tensor: weights and moments that the next update must begin with
    if before is not None and before.updates:
        rates = learning_rate(settings, step=step - 1, update=made)
        for name, seen in before.updates[-1]["tensors"].items():
            state[name] = seen["after"], _step(seen, rates, settings)
    for number, update in enumerate(sketch.updates):
        rate = learning_rate(settings, step=step, update=made + number + 1)
        most = max((seen["made"] for seen in update["tensors"].values()), default=0)
        if most != made + number:
            wrong.append(f"update {made + number + 1} of the run: the optimizer has made {most:.0f}")
        for name, seen in update["tensors"].items():
            place, should = f"update {made + number + 1}, {name}", _step(seen, rate, settings)
            change = np.array(seen["after"]) - np.array(seen["weights"])
            elements += len(change)
            if seen["gradients"] is None:
                wanted, bound = np.zeros_like(change), np.full_like(change, 1e-37)
            else:
                wanted, bound = should.change, should.bound
                if seen["made"] > made + number:
                    wrong.append(
                        f"{place}: the optimizer has made {seen['made']:.0f} updates instead of {made + number}"
                    )
            off = np.abs(change - wanted) / bound
            at = int(np.nanargmax(off)) if not np.isnan(off).all() else 0
            worst = max(worst, float(off[at]))
            if not off[at] <= 1:
                wrong.append(f"{place} changed by {change[at]:.4g} instead of {wanted[at]:.4g}, bound {bound[at]:.2g}")
            if name in state:
                last, was = state[name]
                if last != seen["weights"]:
                    wrong.append(f"{place} begins with other weights than the update before ended with")
                mean = np.array(seen["means"] or [0.0] * len(change))
                if not eight and not (np.abs(mean - was.mean) <= was.mean_bound).all():
                    wrong.append(f"{place} begins with another mean gradient than the update before made")
            if seen["copies"] and torch.tensor(seen["after"]).to(torch.bfloat16).tolist() != seen["copies"]:
                wrong.append(f"{place}: the model does not compute with the new weights in bf16")
            state[name] = seen["after"], should
    if wrong:
        detail = f"{some(wrong)}. The bound is that of fp32's rounding in AdamW's step, at learning rate {rate:.4g}"
        causes = "the schedule, the optimizer or its state, a tensor that is not in it, weights that were replaced"
        yield fault("weights", detail, causes=causes, ratio=worst)
    elif not sketch.updates:
        yield ok("weights", "the step made no update")
    else:
        yield ok("weights", f"{len(sketch.updates)} updates, {elements} elements", ratio=worst)


def _step(seen: Mapping[str, Any], rate: float, settings: Mapping[str, Any]) -> Any:
    none = [0.0] * len(seen["at"])
    given = (np.array(seen[name] or none) for name in ("weights", "gradients", "means", "squares"))
    return adamw(*given, made=seen["made"], rate=rate, settings=settings)
