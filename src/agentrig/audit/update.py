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
from agentrig.audit.model import MEASURED, Precision, Weights, batches, logprobs, tokens
from agentrig.audit.record import Call, Record
from agentrig.audit.sketch import Sketch, projections
from agentrig.audit.verdicts import CannotLook, Verdict, fault, finite, ok, some

if TYPE_CHECKING:
    import torch

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


@attrs.frozen(kw_only=True, eq=False)
class Update:
    """What an update is made of.

    Attributes:
        settings: The run's section `[algorithm]`.
        calls: All its calls.
        advantages: By rollout.
        weights: What it begins with.
        begin: What the step begins with.
        reference: The starting model of a KL loss; None without one.
    """

    settings: Mapping[str, Any]
    calls: Sequence[Call]
    advantages: Mapping[str, float]
    weights: Weights
    begin: Weights
    reference: Weights | None = None

    def shares(self) -> dict[str, float]:
        """Return the weight of each rollout's tokens; calls with advantage 0 count too.

        1 / tokens of the update (DAPO), or 1 / (rollouts * tokens of its rollout) (GRPO, equation 3).
        """
        lengths = Counter[str]()
        for call in self.calls:
            lengths[call.rollout] += len(call.reply)
        by_rollout = self.settings["loss_agg_mode"] == "seq-mean-token-mean"
        return {r: 1 / (len(lengths) * n) if by_rollout else 1 / lengths.total() for r, n in lengths.items()}

    def loss(
        self,
        batch: Sequence[Call],
        found: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
        shares: Mapping[str, float],
        apart: float = 0.0,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Return a batch's part of the loss; of its tokens at a clip limit (`AT_THE_CLIP`); and the KL of each token.

        The loss of a token is PPO's clipped surrogate (arXiv:1707.06347, equation 7) with DAPO's upper bound
        (arXiv:2503.14476, equation 8). With stale rollouts it is that of decoupled PPO (arXiv:2110.00641): the ratio is
        to the policy before the step, times that policy's ratio to the one that sampled, truncated. The KL term is
        Schulman's k3 (arXiv:2402.03300, equation 4).

        Args:
            batch: Some of the calls.
            found: The log-probabilities of their tokens: see `Models.logprobs`.
            shares: See there.
            apart: What two precisions differ by in a log-probability.
        """
        import torch

        settings, (now, begun, reference) = self.settings, found
        low, high, stale = 1 - settings["clip_low"], 1 + settings["clip_high"], settings["max_staleness"]
        lengths = [len(call.reply) for call in batch]

        def spread(values: Iterator[float]) -> torch.Tensor:
            return torch.tensor(list(values)).to(now).repeat_interleave(torch.tensor(lengths, device=now.device))

        advantage = spread(self.advantages[call.rollout] for call in batch)
        share = spread(shares[call.rollout] for call in batch)
        sampled = torch.cat(
            [
                own if call.logprobs is None else torch.tensor(call.logprobs).to(now)
                for call, own in zip(batch, torch.split(begun, lengths), strict=True)
            ]
        )
        begun = begun if stale else sampled
        ratio = torch.exp(now - begun)
        correction = torch.exp(begun - sampled).clamp(max=settings["rollout_is_threshold"]) if stale else 1.0
        loss, k3 = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage) * correction, None
        if reference is not None:
            k3 = torch.exp(reference - now) - (reference - now) - 1
            loss = loss + settings["kl_loss_coef"] * k3
        limit = torch.where(advantage > 0, math.log(high), math.log(low))
        open_ = (advantage != 0) & ((now.detach() - begun - limit).abs() <= apart)
        signs = torch.randint(0, 2, open_.shape).to(share) * 2 - 1
        at_the_clip = (signs * ratio * advantage * correction * share)[open_].sum() if open_.any() else None
        return (loss * share).sum(), at_the_clip, None if k3 is None else k3.detach()


class Models:
    """The models of an update in one precision."""

    def __init__(self, update: Update, precision: Precision) -> None:
        self._precision, self._update = precision, update
        self._now = update.weights.load(precision)
        self._begun = self._now if update.begin is update.weights else update.begin.load(precision)
        self._reference = update.reference and update.reference.load(precision)

    def logprobs(self, batch: Sequence[Call]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return the log-probabilities of a batch's tokens: now, at the begin of the step, under the reference."""
        import torch

        settings = self._update.settings

        def of(model: Any) -> torch.Tensor:
            with torch.autocast(model.device.type, torch.bfloat16, enabled=self._precision.cast):
                return logprobs(model, batch, settings["temperature"])

        now = of(self._now)
        used = settings["max_staleness"] or any(call.logprobs is None for call in batch)
        with torch.no_grad():
            begun = of(self._begun) if used and self._begun is not self._now else now.detach()
            return now, begun, None if self._reference is None else of(self._reference)

    def gradients(self, loss: torch.Tensor, *, again: bool = False) -> dict[str, torch.Tensor]:
        """Return a loss's gradient by trained tensor; with `again` another one of the same graph follows."""
        self._now.zero_grad(set_to_none=True)
        loss.backward(retain_graph=again)  # type: ignore[no-untyped-call]
        plain = {name: p.grad for name, p in self._now.named_parameters() if p.grad is not None}
        return self._update.weights.gradients(self._now, plain)


@attrs.frozen(eq=False)
class Gradient:
    """The gradient of an update.

    Attributes:
        total: By trained tensor.
        bounds: What rounding may change of each: the measured share of each batch, independently, and the tokens at a
            clip limit.
        kl: The mean KL divergence to the starting model; None without one.
        kl_bound: What rounding may change of it.
    """

    total: Mapping[str, torch.Tensor]
    bounds: Mapping[str, float]
    kl: float | None
    kl_bound: float


def repeat(update: Update, precisions: Sequence[Precision], *, seed: int, end: float = math.inf) -> Gradient:
    """Compute an update's gradient again, batch by batch.

    Args:
        update: The update.
        precisions: That in which all is computed, and that in which some batches are computed too.
        seed: Chooses these batches.
        end: When it must have ended, by `time.monotonic`.

    Raises:
        CannotLook: By what its first batches took, it would end later.
    """
    import torch

    shares = update.shares()
    parts = batches([call for call in update.calls if update.advantages[call.rollout] or update.reference is not None])
    random.Random(seed).shuffle(parts)
    main, other = (Models(update, precision) for precision in precisions)
    total: dict[str, torch.Tensor] = {}
    clips: dict[str, torch.Tensor] = {}
    squares, errors = defaultdict[str, float](float), defaultdict[str, float](float)
    kls, kls_apart = list[torch.Tensor](), list[torch.Tensor]()
    begin, whole, computed, seconds = time.monotonic(), sum(map(tokens, parts)), 0, 0.0
    apart = 0.0
    for part in parts:
        spent = time.monotonic() - begin
        if computed and spent > (end - begin) / 4:
            longer = spent + seconds * (whole - computed) / computed
            if begin + longer > end:
                why = f"computing the update again would take {longer:.0f} s, longer than a step of this run"
                raise CannotLook(why)
        second, now = dict[str, torch.Tensor](), main.logprobs(part)
        seconds += time.monotonic() - begin - spent
        if computed < MEASURED:
            beside = other.logprobs(part)
            loss, _, kl = update.loss(part, beside, shares)
            second = other.gradients(loss)
            differ = float((now[0] - beside[0]).detach().abs().max())
            apart = max(apart, finite(differ, "what two precisions of the model differ by"))
        started = time.monotonic()
        loss, at_the_clip, own_kl = update.loss(part, now, shares, apart)
        if own_kl is not None:
            kls.append(own_kl)
            if second and kl is not None:
                kls_apart.append(own_kl - kl)
        for name, gradient in main.gradients(loss, again=at_the_clip is not None).items():
            size = float(gradient.norm())
            if second and size:
                off = float((gradient.to(second[name].dtype) - second[name]).norm())
                errors[name] = max(errors[name], finite(off / size, f"what two precisions of {name} differ by"))
            squares[name] += size**2
            total[name] = total[name].add_(gradient) if name in total else gradient
        if at_the_clip is not None:
            for name, gradient in main.gradients(at_the_clip).items():
                clips[name] = clips[name].add_(gradient) if name in clips else gradient
        computed, seconds = computed + tokens(part), seconds + time.monotonic() - started
    bounds = {name: MARGIN * errors[name] * math.sqrt(squares[name]) for name in total}
    for name, gradient in clips.items():
        bounds[name] += AT_THE_CLIP * float(gradient.norm())
    if not kls:
        return Gradient(total, bounds, None, 0.0)
    kl_mean = float(torch.cat(kls).mean())
    # An estimate of a KL near 0 is a difference of numbers near 1, which round by 1.2e-7 each.
    kl_bound = MARGIN * float(torch.cat(kls_apart).abs().mean()) + 1e-4 * abs(kl_mean) + 2.4e-7
    return Gradient(total, bounds, kl_mean, kl_bound)


def gradient(
    record: Record,
    step: int,
    sketch: Sketch,
    begin: Weights,
    reference: Weights | None,
    precisions: Sequence[Precision],
    advantages: Mapping[str, float],
    *,
    budget_s: float,
) -> Iterator[Verdict]:
    """Compare the gradient that the optimizer got with that of the whole update's loss.

    Of several updates of a step it is the first in odd steps and the last in even ones, whose weights before are kept.

    Args:
        record: The run.
        step: The step.
        sketch: What the learner left.
        begin: The weights that the step begins with.
        reference: The starting model of a KL loss; None without one.
        precisions: See `repeat`.
        advantages: By rollout.
        budget_s: What it may take.

    Raises:
        CannotLook: It would take longer.
    """
    settings, figures = record.settings, record.lines.get(step, {}).get("algorithm", {})
    if not math.isfinite(figures.get("grad_norm", 0.0)):
        raise CannotLook("an update was skipped, because its gradient was not finite")
    calls, epochs = record.calls(step), settings["ppo_epochs"]
    times: Counter[tuple[str, str]] = Counter(tuple(call) for update in sketch.updates for call in update["calls"])
    strange = [key for key in times if key not in calls or key[0] not in advantages]
    if strange:
        yield fault("gradient", f"{len(strange)} calls were trained that the step does not have", causes="the learner")
        return
    needed = {key for key in record.trained(step).keys() | set(times) if advantages.get(key[0]) or reference}
    odd = [f"call {span} of rollout {rollout}: {times[rollout, span]}" for rollout, span in sorted(needed)
           if times[rollout, span] != epochs]  # fmt: skip
    if odd:
        yield fault("gradient", f"{len(odd)} calls are not in {epochs} updates: {some(odd)}", causes="mini-batches")
    number = len(sketch.updates) - 1 if sketch.later and step % 2 == 0 else 0
    told = sketch.updates[number]
    update = Update(
        settings=settings,
        calls=[calls[tuple(key)] for key in told["calls"]],
        advantages=advantages,
        weights=attrs.evolve(begin, trained=sketch.later) if number else begin,
        begin=begin,
        reference=reference,
    )
    found = repeat(update, precisions, seed=step, end=time.monotonic() + budget_s)
    half = HALF if precisions[1].cast or precisions[1].dtype.itemsize < 4 else 0.0
    wrong, silent, worst = list[str](), list[str](), 0.0
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in found.total.values()))
    bound = math.sqrt(sum(bound**2 for bound in found.bounds.values())) + (half or 1e-4) * norm + 1e-9
    if not abs(told["norm"] - norm) <= bound:
        wrong.append(f"norm {told['norm']:.6g} before clipping instead of {norm:.6g}, the bound is {bound:.2g}")
    clip = min(1.0, settings["max_grad_norm"] / (norm + 1e-6))
    for name, seen in told["tensors"].items():
        wanted = projections(found.total[name] * clip, name)
        bound = clip * (found.bounds[name] + FLOOR * norm) + half * wanted[0] + 1e-30
        got = seen["gradient"] or [0.0] * len(wanted)
        most = np.array([bound, *[SIGMAS * bound] * (len(wanted) - 1)])
        share = float(np.max(np.abs(np.array(got) - wanted) / most))  # NaN, if there is one
        worst = max(worst, share)
        if share > 1 and not got[0]:
            silent.append(name)
        elif not share <= 1:
            times_off = got[0] / wanted[0] if wanted[0] else math.inf
            sign = sum(a * b for a, b in zip(got[1:], wanted[1:], strict=True))
            wrong.append(
                f"{name}: norm {got[0]:.6g} instead of {wanted[0]:.6g}, {times_off:.3g} times"
                f"{' and of the other sign' if sign < 0 else ''}, the bound is {bound:.2g}"
            )
    if silent:  # first: where something is detached, gradients before it are other ones too
        wrong.insert(0, f"no gradient reaches {len(silent)} tensors: {', '.join(silent[:3])}")
    if wrong:
        detail = f"gradients are not those of the step's loss: update {number + 1}: {some(wrong)}. The bound is "
        detail += f"{MARGIN:g} times what two precisions differ by in this step"
        causes = "token weights, the loss, a pass that is lost or counted twice, a layer that is detached or changed"
        yield fault("gradient", detail, causes=causes, ratio=worst)
    stated = figures.get("kl_reference")
    single = len(sketch.updates) == 1 and found.kl is not None and stated is not None
    if single and not abs(stated - found.kl) <= found.kl_bound:
        detail = f"the step states the KL divergence {stated} to its reference, and to the starting model it is "
        causes = "a reference that is not the starting model"
        yield fault("gradient", f"{detail}{found.kl:.6g}, bound {found.kl_bound:.2g}", causes=causes)
    of = f"update {number + 1} of {len(sketch.updates)}"
    yield ok("gradient", f"{of}, {len(update.calls)} calls, {len(told['tensors'])} tensors", ratio=worst)


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
    if not abs(figures["lr"] - wanted) <= 1e-6 * wanted:
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

    yield from schedule(record, step, made=made)
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
            off = np.abs(change - wanted) / (bound + 1e-37)  # 0 at the learning rate 0
            at = int(np.argmax(off))  # of NaN, if there is one
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
