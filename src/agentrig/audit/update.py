"""Links `gradient` and `weights`: an audited step's updates, computed again from its recorded calls.

Some batches of calls are computed in two numbers of bits. What the two differ by is what rounding does to this step: a
bound that is measured where it is used. Each formula is written from its paper.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from agentrig.audit.adamw import adamw, learning_rate
from agentrig.audit.model import Precision, Weights, batches, logprobs
from agentrig.audit.record import Call, Record
from agentrig.audit.sketch import Sketch, projections
from agentrig.audit.verdicts import CannotLook, Verdict, fault, ok, some, unseen

if TYPE_CHECKING:
    import torch

MEASURED = 32
"""Calls of an update that are computed in the second precision too, whole batches of them."""

MARGIN = 16.0
"""How many times what was measured a gradient may differ. Both computations round, the learner adds in another order
and shares tokens between calls, and the largest of some hundred tensors is compared. 30 healthy runs reached 0.38 of
the bound at most (tests/benchmarks/audited.md)."""

FLOOR = 1e-6
"""Of the norm of the whole gradient: what a tensor may differ by where nothing was measured. A sum of n numbers in fp32
rounds by about 6e-8 times the root of n, for up to a few hundred products in a row."""

HALF = 2.0**-6
"""Of a tensor's own gradient, where the learner computes in bf16: what it may differ by besides. Each of the two
operands of some four products in a row is rounded by 2^-9, adapters among them, which the repetition merges in fp32."""

AT_THE_CLIP = 4.0
"""A token whose ratio is at a clip limit, within what two precisions differ by, may be in the gradient or not.
The sum of such tokens' gradients with random signs estimates what any choice of them changes; four times it covers up
to 16 tokens that all fall on one side."""

SIGMAS = 6.0
"""A sum of an error's elements with random signs is larger than six times its norm with a probability below 4e-8
(Hoeffding)."""

Key = tuple[str, str]


@attrs.define(eq=False)
class Repeat:
    """The loss of a step's updates in one precision.

    Attributes:
        precision: How the models are computed with.
        settings: The run's section `[algorithm]`.
        advantages: By rollout.
        reference: The starting model of a KL loss; None without one.
        begun: The log-probabilities under the weights that the step begins with, by call, where the loss needs them.
        kl: The estimates of the KL divergence of each batch's tokens.
        kl_apart: What they differ by in the second precision, of each measured batch.
        now: The log-probabilities of the last batch.
        apart: The largest difference of log-probabilities in two precisions so far.
    """

    precision: Precision
    settings: Mapping[str, Any]
    advantages: Mapping[str, float]
    reference: Any = None
    begun: dict[Key, torch.Tensor] = attrs.field(factory=dict)
    kl: list[torch.Tensor] = attrs.field(factory=list)
    kl_apart: list[torch.Tensor] = attrs.field(factory=list)
    now: Any = None
    apart: float = 0.0

    def begin(self, model: Any, batch: Sequence[Call]) -> None:
        """Compute the log-probabilities before the step."""
        import torch

        with torch.no_grad():
            found = torch.split(self._logprobs(model, batch), [len(call.reply) for call in batch])
        self.begun |= {(call.rollout, call.span): each for call, each in zip(batch, found, strict=True)}

    def gradients(
        self, model: Any, batch: Sequence[Call], shares: Mapping[str, float], beside: Repeat | None = None
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Return the gradient of a batch's part of the loss, by tensor of the plain model.

        And that of its tokens at a clip limit (`AT_THE_CLIP`), each with a random sign; empty if there are none.

        The loss of a token is PPO's clipped surrogate (arXiv:1707.06347, equation 7) with DAPO's upper bound
        (arXiv:2503.14476, equation 8). With stale rollouts it is that of decoupled PPO (arXiv:2110.00641): the ratio is
        to the policy before the step, times that policy's ratio to the one that sampled, truncated. The KL term is
        Schulman's k3 (arXiv:2402.03300, equation 4).

        Args:
            model: The weights that the update begins with.
            batch: Some of its calls.
            shares: The weight of a token of each rollout.
            beside: The same in the second precision, which has computed this batch; None if it was not measured.
        """
        import torch

        settings = self.settings
        low, high, stale = 1 - settings["clip_low"], 1 + settings["clip_high"], settings["max_staleness"]
        now = self._logprobs(model, batch)
        self.now = now.detach()
        if beside is not None:
            self.apart = max(self.apart, float((self.now - beside.now.to(self.now)).abs().max()))

        def spread(values: Iterator[float]) -> torch.Tensor:
            times = torch.tensor([len(call.reply) for call in batch], device=now.device)
            return torch.tensor(list(values), dtype=now.dtype, device=now.device).repeat_interleave(times)

        advantage = spread(self.advantages[call.rollout] for call in batch)
        sampled = torch.cat(
            [
                self.begun[call.rollout, call.span] if call.logprobs is None else torch.tensor(call.logprobs).to(now)
                for call in batch
            ]
        )
        begun = torch.cat([self.begun[call.rollout, call.span] for call in batch]) if stale else sampled
        ratio = torch.exp(now - begun)
        correction = torch.exp(begun - sampled).clamp(max=settings["rollout_is_threshold"]) if stale else 1.0
        gain = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage) * correction
        limit = torch.where(advantage > 0, math.log(high), math.log(low))
        open_ = (advantage != 0) & ((self.now - begun - limit).abs() <= self.apart)
        loss = -gain
        if settings["kl_loss_coef"]:
            with torch.no_grad():
                reference = self._logprobs(self.reference, batch)
            apart = reference - now
            k3 = torch.exp(apart) - apart - 1
            self.kl.append(k3.detach())
            loss = loss + settings["kl_loss_coef"] * k3
        share = spread(shares[call.rollout] for call in batch)
        own = self._backward(model, (loss * share).sum(), again=bool(open_.any()))
        if not open_.any():
            return own, {}
        signs = torch.randint(0, 2, open_.shape).to(share) * 2 - 1
        return own, self._backward(model, (signs * ratio * advantage * correction * share)[open_].sum())

    def _backward(self, model: Any, loss: torch.Tensor, *, again: bool = False) -> dict[str, torch.Tensor]:
        model.zero_grad(set_to_none=True)
        loss.backward(retain_graph=again)  # type: ignore[no-untyped-call]
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    def _logprobs(self, model: Any, batch: Sequence[Call]) -> torch.Tensor:
        import torch

        with torch.autocast(model.device.type, torch.bfloat16, enabled=self.precision.cast):
            return logprobs(model, batch, self.settings["temperature"])


@attrs.define(eq=False)
class Gradient:
    """The gradient of one update, by trained tensor, and what rounding does to it.

    Attributes:
        total: The sum over the batches.
        squares: The sum of the squared norms of the batches' gradients.
        errors: The largest difference of two precisions in a measured batch, as a share of the batch's gradient.
        clips: The sum over the tokens at a clip limit, with random signs.
    """

    total: dict[str, torch.Tensor] = attrs.field(factory=dict)
    squares: dict[str, float] = attrs.field(factory=lambda: defaultdict(float))
    errors: dict[str, float] = attrs.field(factory=lambda: defaultdict(float))
    clips: dict[str, torch.Tensor] = attrs.field(factory=dict)

    def add(self, own: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor] | None) -> None:
        """Add a batch's gradient, and that in the second precision if the batch is measured."""
        for name, gradient in own.items():
            size = float(gradient.norm())
            if other is not None and size:
                off = float((gradient.to(other[name].dtype) - other[name]).norm())
                self.errors[name] = max(self.errors[name], off / size)
            self.squares[name] += size**2
            self.total[name] = self.total[name].add_(gradient) if name in self.total else gradient

    def bound(self, name: str) -> float:
        """What rounding may change: each batch by the measured share, independently, and the tokens at a limit."""
        clips = float(self.clips[name].norm()) if name in self.clips else 0.0
        return MARGIN * self.errors[name] * math.sqrt(self.squares[name]) + AT_THE_CLIP * clips


def gradient(
    record: Record,
    step: int,
    sketch: Sketch,
    begin: Mapping[int, Weights],
    main: Repeat,
    other: Repeat,
    *,
    budget_s: float,
) -> Iterator[Verdict]:
    """Compare the gradients that the optimizer got with those of the whole update's loss.

    Args:
        record: The run.
        step: The step.
        sketch: What the learner left.
        begin: By the place of an update in the step: the weights that it begins with.
        main: The loss in the precision in which all is computed.
        other: In that in which some batches are computed too.
        budget_s: What it may take; an update after the first is left out if it does not fit.

    Raises:
        CannotLook: One update would take longer.
    """
    end, looked = time.monotonic() + budget_s, 0
    settings, figures = record.settings, record.lines.get(step, {}).get("algorithm", {})
    if not math.isfinite(figures.get("grad_norm", 0.0)):
        yield unseen("gradient", "an update was skipped, because its gradient was not finite")
        return
    calls, advantages = record.calls(step), main.advantages
    wrong: list[str] = []
    times: Counter[Key] = Counter(tuple(call) for update in sketch.updates for call in update["calls"])
    strange = [key for key in times if key not in calls or key[0] not in advantages]
    if strange:
        yield fault("gradient", f"{len(strange)} calls were trained that the step does not have", causes="the learner")
        return
    epochs = settings["ppo_epochs"]
    needed = {key for key in record.trained(step).keys() | set(times) if advantages.get(key[0]) or main.reference}
    odd = [f"call {span} of rollout {rollout}: {times[rollout, span]}" for rollout, span in sorted(needed)
           if times[rollout, span] != epochs]  # fmt: skip
    if odd:
        yield fault("gradient", f"{len(odd)} calls are not in {epochs} updates: {some(odd)}", causes="mini-batches")
    worst, half = 0.0, other.precision.cast or other.precision.dtype.itemsize < 4
    for number, weights in begin.items():
        update = sketch.updates[number]
        batch = [calls[tuple(key)] for key in update["calls"]]
        try:
            found = _gradient(batch, weights, begin[0], main, other, seed=step, end=end)
        except CannotLook:
            if not looked:
                raise
            break
        looked += 1
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in found.total.values()))
        spread = math.sqrt(sum(found.bound(name) ** 2 for name in found.total))
        bound = spread + (HALF if half else 1e-4) * norm + 1e-9
        if not abs(update["norm"] - norm) <= bound:
            wrong.append(
                f"update {number + 1}: norm {update['norm']:.6g} before clipping instead of {norm:.6g}, the bound is "
                f"{bound:.2g}"
            )
        silent = []
        clip = min(1.0, settings["max_grad_norm"] / (norm + 1e-6))
        for name, seen in update["tensors"].items():
            wanted = projections(found.total[name] * clip, name)
            bound = clip * (found.bound(name) + FLOOR * norm) + (HALF * wanted[0] if half else 0.0) + 1e-30
            got = seen["gradient"] or [0.0] * len(wanted)
            share = max(
                abs(a - b) / (bound * (SIGMAS if k else 1.0)) for k, (a, b) in enumerate(zip(got, wanted, strict=True))
            )
            worst = max(worst, share)
            if share > 1 and not got[0]:
                silent.append(name)
            elif not share <= 1:
                times_off = got[0] / wanted[0] if wanted[0] else math.inf
                sign = sum(a * b for a, b in zip(got[1:], wanted[1:], strict=True))
                wrong.append(
                    f"update {number + 1}, {name}: norm {got[0]:.6g} instead of {wanted[0]:.6g}, "
                    f"{times_off:.3g} times{' and of the other sign' if sign < 0 else ''}, the bound is {bound:.2g}"
                )
        if silent:  # first: where something is detached, gradients before it are other ones too
            wrong.insert(0, f"update {number + 1}: no gradient reaches {len(silent)} tensors: {', '.join(silent[:3])}")
    if wrong:
        detail = f"gradients are not those of the step's loss: {some(wrong)}. The bound is {MARGIN:g} times "
        detail += "what two precisions differ by in this step"
        causes = "token weights, the loss, a pass that is lost or counted twice, a layer that is detached or changed"
        yield fault("gradient", detail, causes=causes, ratio=worst)
    if main.kl and looked == len(sketch.updates) and "kl_reference" in figures:
        yield from _kl(figures["kl_reference"], main)
    tensors = len(sketch.updates[0]["tensors"])
    share = f"{looked} of {len(sketch.updates)} updates, {len(times)} calls, {tensors} tensors"
    yield ok("gradient", share, ratio=worst)


def _gradient(
    calls: Sequence[Call], weights: Weights, start: Weights, main: Repeat, other: Repeat, *, seed: int, end: float
) -> Gradient:
    """Compute an update's gradient again.

    A token has the weight 1 / tokens of the update (DAPO), or 1 / (rollouts * tokens of its rollout) (GRPO, equation
    3); calls with advantage 0 count in both.

    Args:
        calls: All calls of the update.
        weights: What the update begins with.
        start: What the step begins with.
        main: The loss; its `begun` and `kl` are added to.
        other: The same in the second precision.
        seed: Chooses the batches that are measured.
        end: When it must have ended.

    Raises:
        CannotLook: By what its first batches took, it would end later.
    """
    settings, lengths = main.settings, Counter[str]()
    for call in calls:
        lengths[call.rollout] += len(call.reply)
    by_rollout = settings["loss_agg_mode"] == "seq-mean-token-mean"
    shares = {r: 1 / (len(lengths) * n) if by_rollout else 1 / lengths.total() for r, n in lengths.items()}
    active = [call for call in calls if main.advantages[call.rollout] or main.reference]
    models = [weights.load(repeat.precision) for repeat in (main, other)]
    parts = batches(active)
    random.Random(seed).shuffle(parts)
    found, measured = Gradient(), 0
    begun = [start.load(repeat.precision) for repeat in (main, other)] if settings["max_staleness"] else models
    begin, whole, computed = time.monotonic(), sum(map(_tokens, parts)), 0
    for part in parts:
        if measured >= MEASURED and begin + (time.monotonic() - begin) * whole / computed > end:
            seconds = (time.monotonic() - begin) * whole / computed
            raise CannotLook(f"computing the update again would take {seconds:.0f} s, longer than a step of this run")
        computed += _tokens(part)
        beside, second = (other if measured < MEASURED else None), None
        for k, repeat in ((1, beside), (0, main)):
            if repeat is not None and (settings["max_staleness"] or any(call.logprobs is None for call in part)):
                repeat.begin(begun[k], part)
        if beside is not None:
            second = weights.gradients(models[1], beside.gradients(models[1], part, shares)[0])
        own, clips = main.gradients(models[0], part, shares, beside)
        if main.reference and beside is not None:
            main.kl_apart.append(main.kl[-1] - other.kl[-1])
        found.add(weights.gradients(models[0], own), second)
        for name, gradient in weights.gradients(models[0], clips).items() if clips else ():
            found.clips[name] = found.clips[name].add_(gradient) if name in found.clips else gradient
        measured += len(part)
    return found


def _tokens(part: Sequence[Call]) -> int:
    return len(part[0].prompt) + sum(len(call.reply) for call in part)


def _kl(stated: float, main: Repeat) -> Iterator[Verdict]:
    """Compare the stated KL divergence to the starting model."""
    import torch

    wanted = float(torch.cat(main.kl).mean())
    apart = torch.cat(main.kl_apart)
    # An estimate of a KL near 0 is a difference of numbers near 1, which round by 1.2e-7 each.
    bound = MARGIN * float(apart.abs().mean()) + 1e-4 * abs(wanted) + 2.4e-7
    if not abs(stated - wanted) <= bound:
        detail = f"the step states the KL divergence {stated:.6g} to its reference, and to the starting model it is "
        causes = "a reference that is not the starting model"
        yield fault("gradient", f"{detail}{wanted:.6g}, bound {bound:.2g}", causes=causes)


def schedule(record: Record, step: int, *, made: int) -> Iterator[Verdict]:
    """Compare the stated learning rate of a step's last update with that of the settings.

    Args:
        record: The run.
        step: The step.
        made: How many updates the run had made before.
    """
    figures = record.lines[step]["algorithm"]
    if not figures.get("updates") or figures.get("lr") is None:
        return
    wanted = learning_rate(record.settings, step=step, update=made + int(figures["updates"]))
    if abs(figures["lr"] - wanted) > 1e-6 * wanted:
        detail = f"the last update of step {step} had the learning rate {figures['lr']:.6g} instead of {wanted:.6g}"
        yield fault("weights", detail, causes="the schedule of the learning rate")


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
