"""Links `gradient` and `weights`: an audited step's updates, computed again from its recorded calls.

Some batches of calls are computed in two numbers of bits. What the two differ by is what rounding does to this step: a
bound that is measured where it is used. Each formula is written from its paper.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import attrs
import numpy as np

from agentrig.audit import scores
from agentrig.audit.adamw import Change, adamw, learning_rate
from agentrig.audit.model import (
    MEASURED,
    Precision,
    Weights,
    at_least_fp32,
    batches,
    logprobs,
    place,
    structure,
    tokens,
)
from agentrig.audit.record import Call, readable
from agentrig.audit.sketch import Sketch, projections
from agentrig.audit.step import Step, work_clock
from agentrig.audit.verdicts import CannotLook, Verdict, fault, faults, finite, ok, some
from agentrig.text import amount

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

MORE, MORE_S = 1.4, 4.0
"""Of a step's time, or seconds if that is more: until then an audit begins with further updates of the step. With what
comes after the gradient, two audits take as long as three steps."""

AT_THE_CLIP = 4.0
"""A token whose ratio is at a clip limit, within what two precisions differ by, may be in the gradient or not.
The sum of such tokens' gradients with random signs estimates what any choice of them changes; four times it covers up
to 16 tokens that all fall on one side."""

SIGMAS = 6.0
"""A sum of an error's elements with random signs is larger than six times its norm with a probability below 4e-8
(Hoeffding)."""


@attrs.frozen(kw_only=True, eq=False)
class Update:
    """What an update is made of: settings `[algorithm]`, all its calls, and their advantages by rollout and span.

    It begins with `weights`, and its step with `begin`; a KL loss has the starting model as `reference`.
    """

    settings: Mapping[str, Any]
    calls: Sequence[Call]
    advantages: Mapping[tuple[str, str], float | Sequence[float]]
    weights: Weights
    begin: Weights
    reference: Weights | None = None

    @cached_property
    def shares(self) -> dict[str, float]:
        """The weight of each rollout's tokens; calls with advantage 0 count too.

        1 / tokens of the update (DAPO), or 1 / (rollouts * tokens of its rollout) (GRPO, equation 3).
        """
        lengths = Counter[str]()
        for call in self.calls:
            lengths[call.rollout] += len(call.reply)
        by_rollout = self.settings["loss_agg_mode"] == "seq-mean-token-mean"
        return {r: 1 / (len(lengths) * n) if by_rollout else 1 / lengths.total() for r, n in lengths.items()}


def teaches(worth: float | Sequence[float]) -> bool:
    """Return whether a call has a gradient: it, or one of its tokens, is worth something."""
    return bool(worth) if isinstance(worth, int | float) else any(worth)


def surrogate(
    kind: str, log_ratio: torch.Tensor, now: torch.Tensor, advantage: torch.Tensor, low: float, high: float
) -> torch.Tensor:
    """Return the loss of each token, without a KL term.

    `clip` and `gspo` are PPO's clipped surrogate (arXiv:1707.06347, equation 7) with DAPO's upper bound
    (arXiv:2503.14476, equation 8), of a token's ratio or of a whole reply's (arXiv:2507.18071). `cispo` weighs the
    log-probability with the bounded ratio (arXiv:2506.13585). `sapo` has a gate (arXiv:2511.20347). `cross-entropy` is
    minus the log-probability of what was demonstrated, and has no ratio.
    """
    import torch

    ratio = torch.exp(log_ratio)
    if kind in ("clip", "gspo"):
        return -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    if kind == "cispo":
        return -(ratio.clamp(low, high).detach() * advantage * now)
    if kind == "sapo":
        heat = torch.where(advantage > 0, 1.0, 1.05)
        return -(advantage * 4 / heat / (1 + torch.exp(-heat * (ratio - 1))))
    if kind == "cross-entropy":
        return -(advantage * now)
    raise CannotLook(f"the loss {kind} is not known here")


class Models:
    """The models of an update in one precision."""

    def __init__(self, update: Update, precision: Precision) -> None:
        self._update, self._cast = update, precision.cast
        self._now = update.weights.load(precision)
        self._begun = self._now if update.begin is update.weights else update.begin.load(precision)
        self._reference = update.reference and update.reference.load(precision)
        self._trained = update.weights.parameters(self._now)

    def logprobs(self, batch: Sequence[Call]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return the log-probabilities of a batch's tokens: now, at the begin of the step, under the reference."""
        import torch

        settings = self._update.settings

        def of(model: Any) -> torch.Tensor:
            with torch.autocast(model.device.type, torch.bfloat16, enabled=self._cast):
                return logprobs(model, batch, settings["temperature"])

        now = of(self._now)
        used = settings["max_staleness"] or any(call.logprobs is None for call in batch)
        with torch.no_grad():
            begun = of(self._begun) if used and self._begun is not self._now else now.detach()
            return now, begun, None if self._reference is None else of(self._reference)

    def loss(
        self, batch: Sequence[Call], found: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None], apart: float = 0.0
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Return a batch's part of the loss; that of its tokens at a clip limit (`AT_THE_CLIP`); the KL of each token.

        The loss of a token is in `surrogate`. With stale rollouts it is that of decoupled PPO (arXiv:2110.00641): the
        ratio is to the policy before the step, times that policy's ratio to the one that sampled, truncated. The KL
        term is Schulman's k3 (arXiv:2402.03300, equation 4). `found` is what `logprobs` returns, and `apart` what two
        precisions differ by in a log-probability.
        """
        import torch

        update, settings, (now, begun, reference) = self._update, self._update.settings, found
        low, high, stale = 1 - settings["clip_low"], 1 + settings["clip_high"], settings["max_staleness"]
        lengths = [len(call.reply) for call in batch]

        def spread(values: Iterator[float]) -> torch.Tensor:
            return torch.tensor(list(values)).to(now).repeat_interleave(torch.tensor(lengths, device=now.device))

        worths = [update.advantages[call.rollout, call.span] for call in batch]
        of_tokens = ([w] * n if isinstance(w, int | float) else w for w, n in zip(worths, lengths, strict=True))
        advantage = torch.tensor([one for worth in of_tokens for one in worth]).to(now)
        share = spread(update.shares[call.rollout] for call in batch)
        own = zip(batch, torch.split(begun, lengths), strict=True)
        sampled = torch.cat([b if call.logprobs is None else torch.tensor(call.logprobs).to(now) for call, b in own])
        begun = begun if stale else sampled
        log_ratio = now - begun
        correction = torch.exp(begun - sampled).clamp(max=settings["rollout_is_threshold"]) if stale else 1.0
        kind = settings.get("loss", "clip")
        if kind == "gspo":  # the logarithm of a reply's ratio is the mean of its tokens'
            log_ratio = torch.cat([part.mean().expand(len(part)) for part in torch.split(log_ratio, lengths)])
        loss, k3 = surrogate(kind, log_ratio, now, advantage, low, high) * correction, None
        if reference is not None:
            k3 = torch.exp(reference - now) - (reference - now) - 1
            loss = loss + settings["kl_loss_coef"] * k3
        limit = torch.where(advantage > 0, math.log(high), math.log(low))
        open_ = (advantage != 0) & ((log_ratio.detach() - limit).abs() <= apart) & (kind in ("clip", "gspo"))
        signs = torch.randint(0, 2, open_.shape).to(share) * 2 - 1
        if kind == "gspo":  # all tokens of a reply are in the gradient, or none
            signs = torch.cat([part[:1].expand(len(part)) for part in torch.split(signs, lengths)])
        at_the_clip = (
            (signs * torch.exp(log_ratio) * advantage * correction * share)[open_].sum() if open_.any() else None
        )
        return (loss * share).sum(), at_the_clip, None if k3 is None else k3.detach()

    def gradients(self, loss: torch.Tensor, *, again: bool = False) -> dict[str, torch.Tensor]:
        """Return a loss's gradient by trained tensor; with `again` another one of the same graph follows."""
        import torch

        found = torch.autograd.grad(loss, self._trained, retain_graph=again, allow_unused=True)
        pairs = zip(self._update.weights.trained, self._trained, found, strict=True)
        return {name: at_least_fp32(torch.zeros_like(p) if g is None else g) for name, p, g in pairs}


class Gradient(NamedTuple):
    """The gradient of an update by trained tensor, and with a KL loss the mean KL divergence to the starting model.

    A bound is what rounding may change: the measured share of each batch, independently, and the tokens at a clip
    limit.
    """

    total: Mapping[str, torch.Tensor]
    bounds: Mapping[str, float]
    kl: float | None
    kl_bound: float
    errors: Mapping[str, float]
    apart: float


def repeat(
    update: Update,
    precisions: Sequence[Precision],
    *,
    seed: int,
    budget_s: float = math.inf,
    wall_s: float = math.inf,
    like: Gradient | None = None,
) -> Gradient:
    """Compute an update's gradient again, batch by batch: all in the first precision, some also in the second.

    The seed chooses these. `budget_s` is how long it may take, by `work_clock`; `wall_s` by the clock on the wall.
    `like` is another update of the same step: what was measured there holds here too, beside what one batch shows.

    Raises:
        CannotLook: By what its first batches took, it would take longer.
    """
    import torch

    learned = {key for key, worth in update.advantages.items() if teaches(worth) or update.reference is not None}
    active = [call for call in update.calls if (call.rollout, call.span) in learned]
    main, other = (Models(update, precision) for precision in precisions)
    total: dict[str, torch.Tensor] = {}
    clips: dict[str, torch.Tensor] = {}
    squares, errors = defaultdict[str, float](float), defaultdict[str, float](float)
    kls, kls_apart, apart = list[torch.Tensor](), list[torch.Tensor](), like.apart if like else 0.0
    errors.update(like.errors if like else {})
    clock = work_clock()
    begun, begin = time.monotonic(), clock()
    computed, seconds = 0, 0.0  # seconds: without those of the second precision
    for part in batches(active, seed):
        started = clock()
        waits = max(1.0, (time.monotonic() - begun) / max(started - begin, 1e-6))  # seconds for one of work
        may_take = min(budget_s, wall_s / waits)
        if computed and started - begin > may_take / 4:
            longer = started - begin + seconds * (tokens(active) - computed) / computed
            if longer > may_take:
                busy = waits if may_take < budget_s else 1.0
                took = f"{busy * longer:.0f} s; it may take {busy * may_take:.0f} s"
                raise CannotLook(f"computing the update again would take {took}")
        second, second_kl, now = dict[str, torch.Tensor](), None, main.logprobs(part)
        if computed < (1 if like else MEASURED):
            measuring, beside = clock(), other.logprobs(part)
            loss, _, second_kl = other.loss(part, beside)
            second = other.gradients(loss)
            differ = float((now[0] - beside[0]).detach().abs().max())
            apart = max(apart, finite(differ, "what two precisions of the model differ by"))
            started += clock() - measuring
        loss, at_the_clip, kl = main.loss(part, now, apart)
        if kl is not None:
            kls.append(kl)
        if kl is not None and second_kl is not None:
            kls_apart.append(kl - second_kl)
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
        computed, seconds = computed + tokens(part), seconds + clock() - started
    bounds = {name: MARGIN * errors[name] * math.sqrt(squares[name]) for name in total}
    for name, gradient in clips.items():
        bounds[name] += AT_THE_CLIP * float(gradient.norm())
    if not kls:
        return Gradient(total, bounds, None, 0.0, errors, apart)
    mean = float(torch.cat(kls).mean())
    # An estimate of a KL near 0 is a difference of numbers near 1, which round by 1.2e-7 each.
    kl_bound = MARGIN * float(torch.cat(kls_apart).abs().mean()) + 1e-4 * abs(mean) + 2.4e-7
    return Gradient(total, bounds, mean, kl_bound, errors, apart)


def gradient(step: Step) -> Iterator[Verdict]:
    """Compare the gradient that the optimizer got with that of the whole update's loss.

    Of several updates of a step it is those whose weights before are kept, as many as `MORE` allows.
    """
    settings, figures, sketch = step.settings, step.figures, step.updates
    if not sketch.updates:
        yield ok("the step made no update")
        return
    norm = figures.get("grad_norm", 0.0)
    if norm is None or not math.isfinite(norm):
        raise CannotLook("an update was skipped, because its gradient was not finite")
    advantages, epochs, kl = scores.by_call(step), settings["ppo_epochs"], settings["kl_loss_coef"]
    times: Counter[tuple[str, str]] = Counter(tuple(call) for update in sketch.updates for call in update["calls"])
    strange = [key for key in times if key not in step.calls or key not in advantages]
    if strange:
        yield fault(f"{len(strange)} calls were trained that the step does not have", "the learner")
        return
    needed = {key for key in step.trained.keys() | set(times) if teaches(advantages.get(key, 0.0)) or kl}
    odd = sorted(key for key in needed if times[key] != epochs)
    named = [f"call {span} of rollout {rollout}: {times[rollout, span]}" for rollout, span in odd]
    yield from faults(f"{len(odd)} calls are not in {epochs} updates", named, "mini-batches")
    begin, looked = _begun(step, set(sketch.updates[0]["tensors"])), dict[int, int]()
    precisions = step.precisions(place(begin.directory, 48 if kl else 36, on_cpu=step.record.on_cpu), merged=False)
    half = HALF if precisions[1].cast or precisions[1].dtype.itemsize < 4 else 0.0
    step_s = (step.line.get("step_s") or 0.0) - (step.told("time_s").get("audit") or 0.0)
    found, worst, took, end = None, 0.0, 0.0, step.begun + min(step.wall_s, max(MORE_S, MORE * step_s))
    for number in _order(sketch, step.number):
        started = time.monotonic()
        if looked and started + took > end:
            break
        told = sketch.updates[number]
        update = Update(
            settings=settings,
            calls=[step.calls[tuple(key)] for key in told["calls"]],
            advantages=advantages,
            weights=attrs.evolve(begin, trained=sketch.kept[number]) if number else begin,
            begin=begin,
            reference=Weights(directory=step.record.model, trained={}) if kl else None,
        )
        uneven = [call for call in update.calls if call.logprobs and len(call.logprobs) != len(call.reply)]
        if uneven:
            some_calls = amount(len(uneven), "call")
            raise CannotLook(f"{some_calls} state another number of log-probabilities than of tokens: {uneven[0].name}")
        budget_s = math.inf if looked else step.budget_s
        found = repeat(update, precisions, seed=step.number, budget_s=budget_s, wall_s=step.wall_s, like=found)
        wrong, share = _apart(told, found, settings, half)
        worst, took, looked[number] = max(worst, share), time.monotonic() - started, len(update.calls)
        if wrong:
            detail = f"gradients are not those of the step's loss: update {number + 1}: {some(wrong)}. The bound is "
            causes = "token weights, the loss, a pass that is lost or counted twice, a layer that is detached or "
            causes += f"changed{', the reference model of the KL loss' if kl else ''}"
            yield fault(f"{detail}{MARGIN:g} times what two precisions differ by in this step", causes, share)
            return
    stated: Any = figures.get("kl_reference")
    single = len(sketch.updates) == 1 and stated is not None
    if single and found is not None and found.kl is not None and not abs(stated - found.kl) <= found.kl_bound:
        detail = f"the step states the KL divergence {stated} to its reference, and to the starting model it is "
        yield fault(f"{detail}{found.kl:.6g}, bound {found.kl_bound:.2g}", "a reference that is not the starting model")
    numbers = ", ".join(str(number + 1) for number in sorted(looked))
    of = f"update{'s' if len(looked) > 1 else ''} {numbers} of {len(sketch.updates)}"
    calls = sum(looked.values()), times.total()
    tensors = amount(len(sketch.updates[0]["tensors"]), "tensor")
    yield ok(f"{of}, {amount(calls[0], 'call')}, {tensors}", worst, read=calls)


def _order(sketch: Sketch, step: int) -> list[int]:
    """Return the updates whose weights before are kept, in the order in which they are looked at.

    Every other one comes first, in odd steps the first, in even steps the last: of four updates two steps look at all,
    if the time is enough for two of each.
    """
    numbers = sorted(sketch.kept or (0,))
    numbers = numbers[::2] + numbers[1::2]
    return numbers if step % 2 else numbers[::-1]


def _apart(
    told: Mapping[str, Any], found: Gradient, settings: Mapping[str, Any], half: float
) -> tuple[list[str], float]:
    """Return what in an update's sketch is not of the gradient, and the largest difference as a share of its bound."""
    wrong, silent, worst = list[str](), list[str](), 0.0
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in found.total.values()))
    bound = math.sqrt(sum(bound**2 for bound in found.bounds.values())) + (half or 1e-4) * norm + 1e-9
    if not abs(told["norm"] - norm) <= bound:
        wrong.append(f"norm {told['norm']:.6g} before clipping instead of {norm:.6g}, the bound is {bound:.2g}")
    # By the stated norm, which is compared above: a sum of many squares in fp32 rounds by more than a gradient does.
    clip = min(1.0, settings["max_grad_norm"] / (told["norm"] + 1e-6))
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
            other = " and of the other sign" if np.dot(got[1:], wanted[1:]) < 0 else ""
            what = f"norm {got[0]:.6g} instead of {wanted[0]:.6g}, {times_off:.3g} times{other}"
            wrong.append(f"{name}: {what}, the bound is {bound:.2g}")
    if silent:  # first: where something is detached, gradients before it are other ones too
        wrong.insert(0, f"no gradient reaches {len(silent)} tensors: {', '.join(silent[:3])}")
    return wrong, worst


def _begun(step: Step, names: set[str]) -> Weights:
    """Return the weights that a step begins with, as the tensors of these names."""
    import torch

    found = step.weights(step.number - 1)
    if not found.trained and not step.settings["lora_rank"]:
        own = found.load(Precision(torch.float32)).named_parameters()
        found = attrs.evolve(found, trained={name: p.detach() for name, p in own if name in names})
    if set(found.trained) != names:
        raise CannotLook(f"the weights before step {step.number} were not kept")
    return found


def _names(step: Step, names: Set[str]) -> Iterator[Verdict]:
    """Compare the tensors that are trained with those that must be, by the model's structure and the settings.

    That is each parameter of the model, or, as agentrig-grpo's README says of `lora_targets`, two factors of each
    linear layer but the output's, or of the modules whose names end so.
    """
    import torch

    try:
        plain = structure(step.record.model)
    except CannotLook:
        return  # on another machine than the run's
    rank, targets = step.settings["lora_rank"], step.settings.get("lora_targets", "all-linear")
    wanted = {name for name, _ in plain.named_parameters()}
    if rank:
        ends = () if targets == "all-linear" else tuple(f".{target.strip()}" for target in targets.split(","))
        output = plain.get_output_embeddings()
        wanted = set()
        for name, module in plain.named_modules():
            kind = type(module).__name__
            linear = (isinstance(module, torch.nn.Linear) or kind == "Conv1D") and module is not output
            if f".{name}".endswith(ends) if ends else linear:
                middle, end = ("lora_embedding_", "") if kind == "Embedding" else ("lora_", ".weight")
                wanted |= {f"base_model.model.{name}.{middle}{side}.default{end}" for side in "AB"}
    lost, others = sorted(wanted - names), sorted(names - wanted)
    what = f"{len(others)} tensors are trained that are no adapters" if rank else f"{len(others)} unknown tensors"
    yield from faults(f"{what}, with lora_rank = {rank}", others, "parameters of the model that are not frozen")
    targeted = f" and lora_targets = {targets}" if rank else ""
    what = f"{len(lost)} of {len(wanted)} tensors that lora_rank = {rank}{targeted} must train are not trained"
    yield from faults(what, lost, "parameters that are frozen, or left out where adapters are made")


def saved(step: Step, at: int | None = None) -> Iterator[Verdict]:
    """Compare the two files of weights in a checkpoint, of the step itself or another, with what was trained.

    Those of `learner.pt` have the digest that the run recorded of the step that made them, or of the start.
    `model.safetensors` has them rounded to the run's dtype, or `adapter_model.safetensors` has the same factors, which
    `adapter_config.json` scales as the settings do: equal bit for bit.
    """
    import torch
    from safetensors.torch import load_file

    at, rank = step.number if at is None else at, step.settings.get("lora_rank", 0)
    folder = step.folder(at)
    file, version = folder / ("adapter_model.safetensors" if rank else "model.safetensors"), step.weights_of(at)
    if version is None or not (file.is_file() and (folder / "trainer" / "learner.pt").is_file()):
        raise CannotLook(f"step {at} has no checkpoint of the loop's")
    trained, stated = step.learner(at), step.record.digests(version)
    with readable(file):
        written = load_file(file)
    made, wrong = f"that step {version} made" if version else "of the start", list[str]()
    if step.sources.digest is not None and stated.get("weights", "") not in ("", step.sources.digest(trained)):
        wrong.append(f"learner.pt has other weights than those {made}, by their recorded digest")
    if rank:
        dtype, wanted = torch.float32, {re.sub(r"\.default(\.weight)?$", r"\1", n): t for n, t in trained.items()}
        wrong += _scaled(step, at)
    else:
        place(step.record.model, 8, on_cpu=step.record.on_cpu)
        dtype = getattr(torch, stated.get("dtype", ""), None) or next(iter(written.values())).dtype
        whole = Weights(directory=step.record.model, trained=trained).load(Precision(torch.float32, rounded=dtype))
        # A tensor that two layers share is trained and written once.
        names = written.keys() | trained.keys()
        wanted = {name: p.detach() for name, p in whole.named_parameters() if name in names}
    for name, tensor in wanted.items():
        if name not in written:
            wrong.append(f"{file.name} lacks {name}")
        elif written[name].dtype != dtype:
            wrong.append(f"{name} is written in {written[name].dtype}, and the run's dtype is {dtype}")
        elif not (off := float((written[name].float() - tensor).abs().max())) <= 0:
            wrong.append(f"{name} is off by up to {off:.3g}")
    what = f"the checkpoint of step {at} does not hold the weights {made}"
    yield from faults(what, wrong, "the copy of the weights, or how it is written")
    yield ok(f"checkpoint of step {at}: {amount(len(written), 'tensor')}")


def _scaled(step: Step, at: int) -> list[str]:
    """Say that a checkpoint's adapters are scaled in another way than the settings say; nothing if they are not."""
    if at < step.number and step.record.resumed:
        return []  # they may have had another lora_alpha before
    file = step.folder(at) / "adapter_config.json"
    with readable(file):
        told = json.loads(file.read_text("utf-8"))
        scaling = float(told["lora_alpha"]) / told["r"]
    return [] if scaling == step.scaling else [f"{file.name} scales them by {scaling:g} instead of {step.scaling:g}"]


def schedule(step: Step) -> Iterator[Verdict]:
    """Compare the stated learning rate of a step's last update with that of the settings."""
    made, figures = step.made, step.figures
    if not figures.get("updates") or figures.get("lr") is None:
        return
    wanted = learning_rate(step.settings, step=step.number, update=made + int(figures["updates"]))
    if not abs(figures["lr"] - wanted) <= 1e-6 * wanted:
        detail = f"the last update of step {step.number} had the learning rate {figures['lr']:.6g} instead of "
        yield fault(f"{detail}{wanted:.6g}", "the schedule of the learning rate")


def weights(step: Step) -> Iterator[Verdict]:
    """Compare what the optimizer did to some elements of every tensor with AdamW's step; see `adamw` for the bound.

    And compare which tensors are trained with the settings, and the checkpoints of the step before and of the run's end
    with their weights.
    """
    import torch

    yield from schedule(step)
    checkpoint = ""
    try:
        yield from (each for each in saved(step, step.number - 1) if each.result == "fault")
    except CannotLook as why:
        checkpoint = f"; not the checkpoint before: {why}" if step.number > 1 else ""
    if step.number == max(step.record.lines) and step.folder(step.number).is_dir():  # after the end
        with suppress(CannotLook):
            yield from (each for each in saved(step) if each.result == "fault")
    sketch, made, settings = step.updates, step.made, step.settings
    stated = step.figures.get("updates", len(sketch.updates))
    if stated != len(sketch.updates):
        detail = f"the step states {stated:.0f} updates, and the learner took a sketch of {len(sketch.updates)}"
        yield fault(detail, "updates that were made or counted twice, or a learner that fills no sketch")
        return
    before, wrong, worst, elements = Sketch.read(step.record.path, step.number - 1), list[str](), 0.0, 0
    if sketch.whole and sketch.updates:
        yield from _names(step, set(sketch.updates[0]["tensors"]))
    state: dict[str, tuple[Any, Change]] = {}  # by tensor: weights and moments that the next update must begin with
    if before is not None and before.updates:
        earlier = step.record.at(step.number - 1).settings
        rate = learning_rate(earlier, step=step.number - 1, update=made)
        for name, seen in before.updates[-1]["tensors"].items():
            state[name] = seen["after"], _change(seen, rate, earlier)
    for number, update in enumerate(sketch.updates, made + 1):
        rate = learning_rate(settings, step=step.number, update=number)
        most = max((seen["made"] for seen in update["tensors"].values()), default=0)
        if most != number - 1:
            wrong.append(f"update {number} of the run: the optimizer has made {most:.0f} updates before")
        for name, seen in update["tensors"].items():
            of, should = f"update {number}, {name}", _change(seen, rate, settings)
            change, wanted, bound = np.array(seen["after"]) - np.array(seen["weights"]), should.change, should.bound
            elements += len(change)
            if seen["gradients"] is None:
                wanted, bound = np.zeros_like(change), np.zeros_like(change)
            off = np.abs(change - wanted) / (bound + 1e-37)  # 0 at the learning rate 0
            at = int(np.argmax(off))  # of NaN, if there is one
            worst = max(worst, float(off[at]))
            if not off[at] <= 1:
                wrong.append(f"{of} changed by {change[at]:.4g} instead of {wanted[at]:.4g}, bound {bound[at]:.2g}")
            if name in state:
                last, was = state[name]
                if last != seen["weights"]:
                    wrong.append(f"{of} begins with other weights than the update before ended with")
                mean = np.array(seen["means"] or [0.0] * len(change))
                if settings["optimizer"] != "adamw8bit" and not (np.abs(mean - was.mean) <= was.mean_bound).all():
                    wrong.append(f"{of} begins with another mean gradient than the update before made")
            if seen["copies"] and torch.tensor(seen["after"]).to(torch.bfloat16).tolist() != seen["copies"]:
                wrong.append(f"{of}: the model does not compute with the new weights in bf16")
            state[name] = seen["after"], should
    if not sketch.updates:
        yield ok("the step made no update")
        return
    what = f"not AdamW's step at learning rate {rate:.4g}, whose bound is that of fp32's rounding"
    causes = "the schedule, the optimizer or its state, a tensor that is not in it, weights that were replaced"
    yield from faults(what, wrong, causes, worst)
    yield ok(f"{amount(len(sketch.updates), 'update')}, {elements} elements{checkpoint}", worst)


def _change(seen: Mapping[str, Any], rate: float, settings: Mapping[str, Any]) -> Change:
    none = [0.0] * len(seen["at"])
    given = (np.array(seen[name] or none) for name in ("weights", "gradients", "means", "squares"))
    return adamw(*given, made=seen["made"], rate=rate, settings=settings)
