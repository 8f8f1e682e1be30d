"""Checks at run time that an update is correct, with separate arithmetic (docs/proofs.md).

They compute a few numbers per token and a few elements per tensor, without a pass through the model.
"""

from __future__ import annotations

import logging
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import attrs
import numpy as np
import torch  # noqa: TID253  (imported with the learner only)

from agentrig.audit.adamw import adamw
from agentrig.errors import RunStopped
from agentrig.forest.sequences import Batch
from agentrig_grpo.config import GrpoConfig
from agentrig_grpo.optimizers import Spots, learning_rate, moment

log = logging.getLogger(__name__)

SPOTS = 8
"""Elements of each tensor that are checked after the optimizer's step."""

TOKEN_BOUND = 1e-3
"""Largest difference of a token's gradient, relative to the largest one of the update; both are computed in fp32."""

SILENT = 2
"""After so many updates in a row without a gradient, a trained tensor stops the run."""

CAUSE = "update-not-proven"
"""The cause of such a stop in `error.json`."""

CURE = "This is a fault of the trainer, not of your settings: the weights would learn something else. Please report it."


class _Sample(Protocol):
    @property
    def response_ids(self) -> Sequence[int]: ...

    @property
    def logprobs(self) -> Sequence[float] | None: ...

    @property
    def proximal(self) -> Sequence[float] | None: ...

    @property
    def advantage(self) -> float: ...

    @property
    def rollout(self) -> int: ...


class TokenProof:
    """Checks that each token of an update enters the gradient once, with its rollout's weight, advantage and ratio.

    Args:
        samples: The samples of the update that have a gradient.
        weights: The weight of a token of each sample.
        config: Settings.
        device: The model's device.
        where: Step and update, for messages.
    """

    def __init__(
        self, samples: Sequence[_Sample], weights: Sequence[float], config: GrpoConfig, device: Any, where: str
    ) -> None:
        self._config, self._where = config, where
        self._rollouts = [s.rollout for s in samples]
        self._lengths = [len(s.response_ids) for s in samples]
        lengths = torch.tensor(self._lengths)
        self._offsets = (lengths.cumsum(0) - lengths).to(device)
        self._ids = torch.from_numpy(np.concatenate([np.asarray(s.response_ids) for s in samples])).to(device)
        n = len(self._ids)

        def spread(values: Sequence[float]) -> torch.Tensor:
            return torch.from_numpy(np.repeat(np.array(values, dtype=np.float32), self._lengths)).to(device)

        self._advantages, self._weights = spread([s.advantage for s in samples]), spread(weights)
        known = all(s.logprobs is not None for s in samples)
        flat = [value for s in samples for value in s.logprobs or ()] if known else None
        self._sampled = None if flat is None else torch.tensor(flat, dtype=torch.float32, device=device)
        begun = [value for s in samples for value in s.proximal or ()]
        self._begun = torch.tensor(begun, dtype=torch.float32, device=device) if len(begun) == n else None
        self._found, self._now, self._reference = (torch.zeros(n, device=device) for _ in range(3))
        self._seen = torch.zeros(n, device=device)
        self._strange = torch.zeros((), device=device)

    def watch(self, logprobs: torch.Tensor, batch: Batch, reference: torch.Tensor | None) -> None:
        """Record the gradient by the log-probabilities of a batch, [T], when it is computed."""
        at = self._offsets[batch.sample] + batch.place
        self._strange += (self._ids[at] != batch.targets).sum()
        self._now[at] = logprobs.detach()
        if reference is not None:
            self._reference[at] = reference

        def note(gradient: torch.Tensor) -> None:
            self._seen.index_add_(0, at, torch.ones_like(gradient))
            self._found.index_add_(0, at, gradient)

        logprobs.register_hook(note)  # type: ignore[no-untyped-call]

    def difference(self) -> float:
        """Return the mean difference of the sampled log-probabilities and the learner's, in nats; 0 without any."""
        return 0.0 if self._sampled is None else float((self._now - self._sampled).abs().mean())

    def furthest(self, n: int) -> list[tuple[float, int]]:
        """Return the n largest mean differences over a sample's tokens, and the samples' indices; none without any."""
        if self._sampled is None:
            return []
        lengths = torch.tensor(self._lengths, device=self._now.device)
        owners = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
        gaps = (self._now - self._sampled).abs()
        means = (torch.zeros(len(lengths), device=gaps.device).index_add_(0, owners, gaps) / lengths).nan_to_num(
            float("inf")
        )
        found = means.topk(min(n, len(means)))
        return list(zip(found.values.tolist(), found.indices.tolist(), strict=True))

    def check(self) -> float:
        """Compare, and return the largest difference, relative to the largest gradient of a token.

        Raises:
            RunStopped: Tokens are counted twice or left out, or their gradient is wrong.
        """
        if int(self._strange):
            self._stop(f"{int(self._strange)} response tokens are not those of their sample")
        for times, what in ((self._seen > 1, "counted more than once"), (self._seen < 1, "left out of the gradient")):
            if int(times.sum()):
                self._stop(f"{int(times.sum())} of {len(self._seen)} response tokens are {what}{self._first(times)}")
        wanted, sure = self._wanted()
        scale = float(wanted.abs().max())
        error = ((self._found - wanted).abs() * sure) / max(scale, 1e-30)
        worst = float(error.max())
        if worst != worst or scale in (0.0, float("inf")) or worst <= TOKEN_BOUND:
            return 0.0 if worst != worst else worst
        wrong = error > TOKEN_BOUND
        if bool(((self._found + wanted).abs() <= TOKEN_BOUND * scale)[wrong].all()):
            what = "have a gradient of the wrong sign: good answers would become less likely"
        else:
            what = "have a gradient that does not follow from their rollout's advantage, their weight and their ratio"
        at = int(error.argmax())
        self._stop(
            f"{int(wrong.sum())} of {len(wrong)} response tokens {what}{self._first(wrong)}. The largest difference: "
            f"{float(self._found[at]):.3g} instead of {float(wanted[at]):.3g}"
        )
        raise AssertionError  # never reached

    def _wanted(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the derivative of the loss by each log-probability, and 1 where it is certain (not at the clip)."""
        config, advantage = self._config, self._advantages
        ratio, stale = self._ratios()
        low, high = 1 - config.clip_low, 1 + config.clip_high
        free = torch.where(advantage > 0, ratio <= high, ratio >= low)
        edge = torch.minimum((ratio - low).abs(), (ratio - high).abs()) < 1e-5
        wanted = -self._weights * advantage * ratio * stale * free
        if config.kl_loss_coef:
            pull = 1 - torch.exp(self._reference - self._now)
            wanted = wanted + self._weights * config.kl_loss_coef * pull
        return wanted, (~edge).float()

    def _ratios(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the ratio that is clipped, and the truncated importance weight of stale rollouts (1 without them)."""
        one = torch.ones_like(self._now)
        if self._sampled is None:
            return one, one
        if not self._config.max_staleness:
            return torch.exp(self._now - self._sampled), one
        begun = self._now if self._begun is None else self._begun
        most = math.log(self._config.rollout_is_threshold)
        return torch.exp(self._now - begun), torch.exp((begun - self._sampled).clamp(max=most))

    def _first(self, wrong: torch.Tensor) -> str:
        at = int(wrong.nonzero()[0])
        for rollout, length in zip(self._rollouts, self._lengths, strict=True):
            if at < length:
                return f", the first is token {at} of a call of rollout {rollout}"
            at -= length
        raise AssertionError("no sample has this token")

    def _stop(self, what: str) -> None:
        raise RunStopped(f"{self._where}: {what}.\n  {CURE}", cause=CAUSE)


@attrs.frozen(eq=False)
class Look:
    """What `StepProof.before` checks, on the device.

    Attributes:
        gradients: The tensors that have a gradient.
        norms: The norm of each, [gradients].
        steps: The tensors that have a number of steps in the optimizer's state.
        made: These numbers, [steps]; None without any.
        spots: The followed elements of all weights, gradients and both moments; None where no tensor has one.
    """

    gradients: Sequence[str]
    norms: torch.Tensor
    steps: Sequence[str]
    made: torch.Tensor | None
    spots: Sequence[torch.Tensor | None]


class StepProof:
    """Checks that every trained tensor gets a gradient and changes by the AdamW step of the settings.

    Args:
        trained: Name to parameter.
        config: Settings.
    """

    def __init__(self, trained: Mapping[str, torch.nn.Parameter], config: GrpoConfig) -> None:
        self._trained, self._config = trained, config
        # Adjacent elements, at random places: reading them is a view, where any others would need a kernel a tensor.
        rng = random.Random(0)
        starts = {name: rng.randrange(max(1, p.numel() - SPOTS)) for name, p in trained.items()}
        self._at = {n: Spots.of(starts[n], SPOTS, p.numel(), p.device) for n, p in trained.items()}
        self._silent: Counter[str] = Counter()
        self._idle: set[str] = set()
        self._kept: tuple[torch.Tensor, ...] = ()

    def clean(self, where: str) -> None:
        """Check that no gradient of an earlier update is left.

        Raises:
            RunStopped: A gradient is left.
        """
        left = [name for name, p in self._trained.items() if p.grad is not None and bool(p.grad.any())]
        if left:
            raise RunStopped(
                f"{where}: the gradient of an earlier update is still there, in {_some(left)}: it would be "
                f"counted again.\n  {CURE}",
                cause=CAUSE,
            )

    @torch.no_grad()
    def look(self, optimizer: torch.optim.Optimizer) -> Look:
        """Collect what `before` checks, once all passes have begun: a device that still computes them does not wait.

        Args:
            optimizer: AdamW.
        """
        states = [optimizer.state.get(p) or {} for p in self._trained.values()]
        steps = {name: s["step"] for name, s in zip(self._trained, states, strict=True) if "step" in s}
        gradients = {name: p.grad for name, p in self._trained.items() if p.grad is not None}
        return Look(
            gradients=list(gradients),
            norms=torch.stack(torch._foreach_norm(list(gradients.values()))),
            steps=list(steps),
            made=torch.stack([torch.as_tensor(step) for step in steps.values()]) if steps else None,
            spots=[
                self._picked(self._trained),
                self._picked({n: gradients.get(n) for n in self._trained}),
                *(
                    _joined([moment(s, number, at) for s, at in zip(states, self._at.values(), strict=True)])
                    for number in (1, 2)
                ),
            ],
        )

    def before(self, look: Look, *, update: int, where: str, used: Callable[[Any], bool]) -> None:
        """Check gradients and the optimizer's state before clipping and the step, and keep them for `after`.

        Args:
            look: What `look` returned.
            update: The number of this update, from 1, over the whole run.
            where: Step and update, for messages.
            used: Whether a module takes part in the model's forward pass.

        Raises:
            RunStopped: A tensor that the model uses gets no gradient, or the optimizer's state is from another update.
        """
        loud = {name for name, norm in zip(look.gradients, look.norms.tolist(), strict=True) if norm != 0}
        for name in self._trained.keys() - loud - self._idle:
            self._silent[name] += 1
        for name in loud:
            del self._silent[name]
        silent = [n for n in self._trained if self._silent[n] >= SILENT and n not in self._idle]
        if loud and silent:
            still = [name for name in silent if used(name)]
            if still:
                raise RunStopped(
                    f"{where}: {len(still)} of {len(self._trained)} trained tensors got no gradient in {SILENT} "
                    f"updates, though the model uses them: {_some(still)}. Is something detached there?\n"
                    f"  {CURE}",
                    cause=CAUSE,
                )
            self._idle |= set(silent)
            log.warning("%s: the model does not use %s: they do not change", where, _some(silent))
        made = dict(zip(look.steps, [] if look.made is None else look.made.tolist(), strict=True))
        # A tensor whose gradient was None in some updates has a smaller number.
        most = max(made.values(), default=0)
        if most != update - 1:
            raise RunStopped(
                f"{where}: this is update {update} of the run, and the optimizer has made {most:.0f}: its state was "
                f"not restored, or an update was left out.\n  {CURE}",
                cause=CAUSE,
            )
        some = set(look.gradients)
        self._kept = (
            *(self._on_host(joined) for joined in look.spots),
            torch.tensor([made.get(n, 0) + 1.0 for n in self._trained], dtype=torch.float64)[:, None],
            torch.tensor([n in some for n in self._trained])[:, None],
        )

    def after(
        self, *, norm: float, step: int, update: int, where: str, copies: Mapping[str, torch.Tensor] | None = None
    ) -> float:
        """Compare the step with AdamW's (arXiv:1711.05101), and return the largest difference as a share of its bound.

        Args:
            norm: L2 norm of the whole gradient before clipping.
            step: The run's step, from 1.
            update: As in `before`.
            where: As in `before`.
            copies: The rounded copies that the model computes with, if it does not use the trained weights themselves.

        Raises:
            RunStopped: A tensor did not change, or changed by another step; or a copy differs from its weight.
        """
        config = self._config
        weight, gradient, mean, square, made, moved = self._kept
        rate = learning_rate(config, step=step, update=update)
        gradient = gradient * min(1.0, config.max_grad_norm / (norm + 1e-6))
        should = adamw(
            *(each.numpy() for each in (weight, gradient, mean, square)),
            made=made.numpy() - 1,
            rate=rate,
            settings=attrs.asdict(config),
        )
        wanted, bound = torch.from_numpy(should.change) * moved, torch.from_numpy(should.bound)
        now = self._spots(self._trained)
        found = now - weight
        error = (found - wanted).abs() / bound
        wrong = ~(error <= 1)
        if bool(wrong.any()):
            names = list(self._trained)
            rows = wrong.any(1).nonzero()[:, 0].tolist()
            still = [names[row] for row in rows if not bool(found[row].any())]
            at = int(error.argmax())
            what = f"{len(rows)} of {len(names)} trained tensors "
            what += (
                f"did not change: {_some(still)}" if len(still) == len(rows) else "changed by a step other than AdamW's"
            )
            raise RunStopped(
                f"{where}: {what}. With learning rate {rate:.3g} and the gradient clipped to norm "
                f"{config.max_grad_norm:g}, {names[at // SPOTS]} should change by "
                f"{float(wanted.flatten()[at]):.3g}; it changed by {float(found.flatten()[at]):.3g}.\n  {CURE}",
                cause=CAUSE,
            )
        if copies is not None:
            dtype = next(iter(copies.values())).dtype
            stale = (self._spots(copies) != now.to(dtype).double()).any(1)
            if bool(stale.any()):
                names = [name for name, wrong in zip(self._trained, stale.tolist(), strict=True) if wrong]
                raise RunStopped(
                    f"{where}: the model does not compute with the weights that were trained: the {dtype} copies of "
                    f"{len(names)} of {len(self._trained)} tensors are others, {_some(names)}.\n  {CURE}",
                    cause=CAUSE,
                )
        return float(error.max())

    def _spots(self, tensors: Mapping[str, torch.Tensor | None]) -> torch.Tensor:
        """Return the followed elements of tensors, fp64 [tensors, SPOTS] on the CPU; 0 where there is none."""
        return self._on_host(self._picked(tensors))

    def _picked(self, tensors: Mapping[str, torch.Tensor | None]) -> torch.Tensor | None:
        return _joined([None if t is None else self._at[n].pick(t) for n, t in tensors.items()])

    def _on_host(self, joined: torch.Tensor | None) -> torch.Tensor:
        if joined is None:
            return torch.zeros(len(self._trained), SPOTS, dtype=torch.float64)
        return joined.view(-1, SPOTS).cpu().double()


def _joined(rows: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Return rows of equal length one after the other, zeros for those that are missing; None if all are."""
    like = next((row for row in rows if row is not None), None)
    if like is None:
        return None
    none = torch.zeros_like(like)
    return torch.cat([none if row is None else row for row in rows])


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
