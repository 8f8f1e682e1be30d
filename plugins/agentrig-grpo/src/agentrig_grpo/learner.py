"""The learner: a step's samples in, new weights and figures out."""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch  # noqa: TID253  (imported by the algorithm when it runs)

from agentrig.audit.sketch import Sketch
from agentrig.errors import AgentrigError
from agentrig.forest.scoring import CHUNK, score, why_not_shared
from agentrig.forest.segments import Pack
from agentrig.forest.sequences import Batch, Sample, collate, packed
from agentrig.ledger import NOT_FINITE, ZERO_ADVANTAGE
from agentrig_grpo.building import build
from agentrig_grpo.config import GrpoConfig
from agentrig_grpo.figures import SUSPECTS, Figures, of_pass
from agentrig_grpo.loss import sample_weights, token_losses
from agentrig_grpo.masters import computing_with
from agentrig_grpo.optimizers import check_state, learning_rate, optimizer_of
from agentrig_grpo.passes import memory_in_words
from agentrig_grpo.samples import TrainSample as TrainSample
from agentrig_grpo.samples import check_recorded
from agentrig_grpo.tables import Table
from agentrig_grpo.used import Used, tokens_in_loss

GPU_CHUNK = 1 << 28
"""Most logits in memory at once on a GPU: almost two thousand tokens of a large vocabulary. With 2^29 an update takes
1% less time and 3 GiB more."""


class Learner:
    """Holds the trained model and its optimizer.

    Args:
        model: A Hugging Face causal language model in fp32, on its device; adapters are added here.
        config: Settings.
        dtype: `float32`, or `bfloat16`: then the model computes with 16-bit copies of its weights, or under autocast
            (with LoRA, and for models whose calls share no tokens). Weights, gradients and the optimizer stay fp32.
        seed: Of the order of mini-batches and of new adapters.
        chunk: Most logits that are held at once; None for the device's usual number.
        recomputed: With gradient checkpointing: how many layers compute their activations twice; None for all.

    Attributes:
        share: Whether tokens that calls share are computed once.
        path: That, in words: one sentence.
        furthest: Of the samples of the latest `update`, the one whose recorded log-probabilities differ most from those
            under the weights that sampled, and the mean absolute difference of its tokens. These weights are the
            learner's before the update; of stale samples, those before the update before. None where not all samples
            have recorded ones.
    """

    def __init__(
        self,
        model: Any,
        config: GrpoConfig,
        *,
        dtype: str,
        seed: int,
        chunk: int | None = None,
        recomputed: int | None = None,
    ) -> None:
        self.config, self._seed = config, seed
        self._bf16 = dtype == "bfloat16"
        built = build(model, config, bf16=self._bf16, seed=seed, recomputed=recomputed)
        self.model, self.share, self.trained = built.model, built.share, built.trained
        self._reference, self._masters = built.reference, built.masters
        self.path = (
            "the learner computes tokens that calls share once"
            if self.share
            else f"the learner computes each call in full, in a row of its own: {why_not_shared(model)}"
        )
        self._device = next(iter(self.trained.values())).device
        self.optimizer = optimizer_of(self.trained.values(), config)
        self._chunk = chunk or (CHUNK if self._device.type == "cpu" else GPU_CHUNK)
        self.updates = 0
        self.used = Used(0)
        self.furthest: tuple[float, TrainSample] | None = None
        self._sketch: Sketch | None = None
        self._earlier: dict[str, torch.Tensor] = {}  # what the model computed with before the latest update

    def update(
        self, samples: Sequence[TrainSample], *, step: int, staleness: int = 0, sketch: Sketch | None = None
    ) -> dict[str, float]:
        """Update the weights on a step's samples.

        Args:
            samples: The trained calls of all rollouts that have an advantage.
            step: Seeds the order of mini-batches, so a resumed run repeats it.
            staleness: How many updates the weights that sampled are behind the learner's: 0, or 1 with
                `max_staleness = 1`. Only `furthest` depends on it.
            sketch: What the auditor of this step gets; None if it is not audited.

        Returns:
            Figures: loss, clip_fraction, ratio_mean, ratio_max, entropy (nats), kl and kl_k1 (k3 and k1
            estimates of behaviour against policy), kl_reference, grad_norm, lr, weight_change (L2 norm of the
            step's change of all trained weights), updates, trained_tokens (response tokens that the
            gradient came from), learner_tokens_per_s (all tokens through the model a second),
            computed_tokens (tokens through the model), traced_tokens (what they would be if no two calls shared
            any), repeated_tokens (those computed again because a group did not fit into one pass), sharing (1 if
            shared tokens are computed once, 0 if each call is computed in full) and sampled_difference (mean difference
            of the recorded log-probabilities and those of the first update, nats; 0 without recorded ones). With
            `max_staleness = 1` the ratio and the clip are those against the weights that the step began with
            (`token_losses`), and there are rollout_is_mean, rollout_is_max (importance weights before they are
            truncated) and rollout_is_ratio_fraction_high (share of tokens whose weight was truncated).

        Raises:
            agentrig.errors.RunStopped: The device has too little memory for an update, or a stale sample has no
                log-probabilities.

        An update with a gradient that is not finite is skipped; `grad_norm` is then NaN or infinite.
        """
        self._sketch = sketch
        self.used = Used(len(samples))
        self.furthest = None
        if not samples:
            self._earlier = {}
            return {"weight_change": 0.0, "updates": 0.0, "trained_tokens": 0.0}
        start = time.perf_counter()
        figures = Figures(recorded=all(s.logprobs is not None for s in samples))
        if self.config.max_staleness:
            check_recorded(samples, step)
        samples = self._with_behaviour(samples, figures)
        with memory_in_words(figures, self.config, step):
            for epoch in range(self.config.ppo_epochs):
                for mini_batch in self._mini_batches(samples, step=step, epoch=epoch):
                    self._one_update([samples[i] for i in mini_batch], figures, mini_batch, step)
                self.used.end_epoch()
        suspects = figures.furthest
        if staleness and self._earlier:
            # The policy has moved since: a changed call stands out there too, or is found by chance.
            others = random.Random(f"{self._seed} {step}").sample(samples, min(SUSPECTS, len(samples)))
            suspects = self._under_earlier([*(sample for _, sample in suspects), *others])
        self.furthest = max(suspects, key=lambda each: each[0], default=None)
        self._earlier = self._copies_of(figures.before) if self.config.max_staleness else {}
        wall = time.perf_counter() - start
        return {
            **figures.metrics(),
            "lr": self.optimizer.param_groups[0]["lr"],
            "weight_change": self._change(figures.before),
            "learner_tokens_per_s": figures.computed / wall,
            "sharing": float(self.share),
        }

    def _one_update(self, samples: Sequence[TrainSample], figures: Figures, places: Sequence[int], step: int) -> None:
        """Accumulate a mini-batch's gradient in passes of `tokens_per_batch` tokens, then step the optimizer.

        Args:
            samples: The mini-batch.
            figures: Is added to.
            places: The samples' places among those of the step.
            step: The training step.
        """
        config = self.config
        lengths = [len(s.response_ids) for s in samples]
        weights = sample_weights(lengths, [s.rollout for s in samples], config.loss_agg_mode)  # type: ignore[arg-type]
        # A sample with advantage 0 has a gradient only from the KL loss. Its tokens still count in the
        # aggregation, or the update would be larger when more groups have zero variance.
        active = [i for i, s in enumerate(samples) if s.advantage or config.kl_loss_coef]
        self.used.drop([places[i] for i in set(range(len(samples))).difference(active)], ZERO_ADVANTAGE)
        if not active:
            return
        chosen, shares = [samples[i] for i in active], [weights[i] for i in active]
        batches = self._batches(chosen, figures)
        table = Table.of(chosen, shares, self._device)
        in_loss = torch.zeros(len(active), dtype=torch.int64, device=self._device)
        gaps = torch.zeros(sum(lengths[i] for i in active), device=self._device)
        parts: list[dict[str, torch.Tensor]] = []
        for batch in batches:
            behaviour, advantage, weight = table.look_up(batch)
            reference = self._reference_logprobs(batch) if config.kl_loss_coef else None
            logprobs, entropy = self._score(self.model, batch)
            if behaviour is None:
                behaviour = logprobs.detach()
            gaps[table.places(batch)] = (logprobs.detach() - behaviour).abs()
            stale: dict[str, Any] = {}
            if config.max_staleness:
                begun = table.look_up_proximal(batch)
                proximal = logprobs.detach() if begun is None else begun
                stale = {"proximal": proximal, "rollout_is_threshold": config.rollout_is_threshold}
            out = token_losses(
                logprobs,
                behaviour,
                advantage,
                clip_low=config.clip_low,
                clip_high=config.clip_high,
                reference=reference,
                kl_loss_coef=config.kl_loss_coef,
                **stale,
            )
            logprobs.retain_grad()
            out.loss.retain_grad()
            loss = (out.loss * weight).sum()
            loss.backward()  # type: ignore[no-untyped-call]
            if self._masters is not None:
                self._masters.collect()
            in_loss.index_add_(0, batch.sample, tokens_in_loss(logprobs, out, advantage).long())
            figures.tokens += len(batch.targets)
            parts.append(of_pass(loss, out, entropy, config.rollout_is_threshold))
        figures.add(parts)  # it waits for a device: what the host alone does comes before it
        if not figures.norms:
            figures.compare(gaps, chosen)
        norm = float(torch.nn.utils.clip_grad_norm_(self.trained.values(), config.max_grad_norm))
        figures.norms.append(norm)
        if not math.isfinite(norm):  # skipped: it would make all weights NaN; the run's guard sees the metric
            self.optimizer.zero_grad(set_to_none=True)
            self.used.drop([places[i] for i in active], NOT_FINITE)
            return
        self.updates += 1
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(config, step=step, update=self.updates)
        if not figures.before:  # not earlier: activations need the memory
            figures.before = [p.detach().clone() for p in self.trained.values()]
        if self._sketch is not None:
            self._sketch.take(self.trained, self.optimizer, [s.call for s in samples if s.call is not None], norm)
        self.optimizer.step()
        if self._masters is not None:
            self._masters.refresh()
        if self._sketch is not None:
            self._sketch.after(self.trained, None if self._masters is None else self._masters.copies)
        self.optimizer.zero_grad(set_to_none=True)
        figures.updates += 1
        self.used.train([places[i] for i in active], in_loss.tolist())

    @torch.no_grad()
    def _change(self, before: list[torch.Tensor]) -> float:
        """Return the L2 norm of the step's change, into the memory of the weights before; 0 if none was made."""
        if not before:
            return 0.0
        torch._foreach_sub_(before, list(self.trained.values()))  # in place: a third copy of all weights would be much
        return float(torch.stack(torch._foreach_norm(before)).norm())

    def _copies_of(self, before: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return copies of the weights before an update, in the dtype that the model computes with; none without one.

        A step without an update leaves nothing: the weights that sampled are then those that the learner has.
        """
        dtype = torch.float32 if self._masters is None else torch.bfloat16
        return {name: kept.to(dtype, copy=True) for name, kept in zip(self.trained, before, strict=False)}

    @torch.no_grad()
    def _under_earlier(self, samples: Sequence[TrainSample]) -> list[tuple[float, TrainSample]]:
        """Return how far the samples' log-probabilities are from those under the weights of an update before."""
        gaps = [0.0] * len(samples)
        parameters = self.trained if self._masters is None else self._masters.copies
        with computing_with(parameters, self._earlier):
            for pack in packed(samples, self.config.tokens_per_batch, share=self.share):
                batch = self._collate(pack)
                found = self._score(self.model, batch)[0].tolist()
                for at, place, logprob in zip(batch.sample.tolist(), batch.place.tolist(), found, strict=True):
                    recorded = samples[at].logprobs or ()
                    gaps[at] += abs(logprob - recorded[place]) / len(recorded)
        return [(math.inf if math.isnan(gap) else gap, s) for gap, s in zip(gaps, samples, strict=True)]

    @torch.no_grad()
    def logprobs(self, sample: Sample, *, temperature: float = 1.0, dtype: torch.dtype | None = None) -> list[float]:
        """Return the log-probabilities of a sample's response under the current weights.

        Args:
            sample: Prompt and response.
            temperature: Of the softmax.
            dtype: Of weights and arithmetic; None for those of training.
        """
        (pack,) = packed([sample], 1, share=self.share)
        if dtype is None:
            return self._score(self.model, self._collate(pack), temperature)[0].tolist()
        parameters = dict(self.model.named_parameters())
        exact = parameters if self._masters is None else self._masters.trained
        with computing_with(parameters, {name: p.data.to(dtype) for name, p in exact.items()}):
            batch = collate(pack, share=self.share).to(self._device)
            return score(self.model, batch, temperature)[0].tolist()

    def _score(self, model: Any, batch: Batch, temperature: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._bf16 and self._masters is None):
            temperature = self.config.temperature if temperature is None else temperature
            return score(model, batch, temperature, chunk=self._chunk)

    def _collate(self, pack: Pack) -> Batch:
        return collate(pack, share=self.share, varlen=self._bf16 and self._device.type == "cuda").to(self._device)

    def _batches(self, samples: Sequence[TrainSample], figures: Figures) -> Iterator[Batch]:
        """Make the forest of some samples, and return the batches of its packs, each made when it is asked for."""
        return self._collated(packed(samples, self.config.tokens_per_batch, share=self.share), samples, figures)

    def _collated(self, packs: Iterator[Pack], samples: Sequence[TrainSample], figures: Figures) -> Iterator[Batch]:
        figures.traced += sum(len(s.prompt_ids) + len(s.response_ids) - 1 for s in samples)
        seen: set[int] = set()
        for pack in packs:
            figures.repeated += sum(len(pack.forest.segments[i].tokens) for i in pack.segments if i in seen)
            seen.update(pack.segments)
            batch = self._collate(pack)
            figures.computed += batch.computed
            figures.longest = max(figures.longest, batch.computed)
            yield batch

    @torch.no_grad()
    def _with_behaviour(self, samples: Sequence[TrainSample], figures: Figures) -> list[TrainSample]:
        """Fill in missing behaviour log-probabilities with those of the current weights; of stale samples the proximal.

        With a single update, the update's own forward pass gives them, so nothing is computed here; nor is it for
        samples that no update uses.
        """
        active = [i for i, s in enumerate(samples) if s.advantage or self.config.kl_loss_coef]
        name = "proximal" if self.config.max_staleness else "logprobs"
        lacking = [i for i in active if getattr(samples[i], name) is None]
        single = self.config.ppo_epochs * self.config.mini_batches == 1
        if not lacking or (single and len(lacking) == len(active)):
            return list(samples)
        found: dict[int, list[float]] = {i: [0.0] * len(samples[i].response_ids) for i in lacking}
        for batch in self._batches([samples[i] for i in lacking], figures):
            logprobs, _ = self._score(self.model, batch)
            places = zip(batch.sample.tolist(), batch.place.tolist(), logprobs.tolist(), strict=True)
            for sample, place, logprob in places:
                found[lacking[sample]][place] = logprob
        filled: dict[int, Any] = {i: {name: values} for i, values in found.items()}
        return [attrs.evolve(s, **filled.get(i, {})) for i, s in enumerate(samples)]

    @torch.no_grad()
    def _reference_logprobs(self, batch: Batch) -> torch.Tensor:
        """Return log-probabilities under the starting model: a frozen copy, or this one without its adapters."""
        without: Any = contextlib.nullcontext() if self._reference is not None else self.model.disable_adapter()
        with without:
            return self._score(self._reference if self._reference is not None else self.model, batch)[0]

    def _mini_batches(self, samples: Sequence[TrainSample], *, step: int, epoch: int) -> Iterator[list[int]]:
        """Split the samples by group, so that a shared prompt stays in one pass; yield the samples' places."""
        parts = self.config.mini_batches
        groups = list(dict.fromkeys(s.group for s in samples))
        random.Random(f"{self._seed} {step} {epoch}").shuffle(groups)
        for part in range(min(parts, len(groups))):
            chosen = set(groups[part :: min(parts, len(groups))])
            yield [i for i, s in enumerate(samples) if s.group in chosen]

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs: trained weights, optimizer, number of updates."""
        trained = {name: p.detach().cpu() for name, p in self.trained.items()}
        return {"trained": trained, "optimizer": self.optimizer.state_dict(), "updates": self.updates}

    @torch.no_grad()
    def load_weights(self, trained: dict[str, torch.Tensor]) -> None:
        """Set the trained weights.

        Raises:
            agentrig.errors.AgentrigError: They belong to another model or other LoRA settings.
        """
        if trained.keys() != self.trained.keys() or any(self.trained[n].shape != t.shape for n, t in trained.items()):
            raise AgentrigError(
                "the checkpoint's trained weights do not fit this configuration: "
                "resume with the model and the LoRA settings that the run started with"
            )
        for name, tensor in trained.items():
            self.trained[name].copy_(tensor)
        if self._masters is not None:
            self._masters.refresh()

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned; see `load_weights` for the errors."""
        check_state(state["optimizer"], self.config)
        self.load_weights(state["trained"])
        self.optimizer.load_state_dict(state["optimizer"])
        for group in self.optimizer.param_groups:  # torch restores the old values; a resumed run may set others
            group.update(betas=(self.config.beta1, self.config.beta2), weight_decay=self.config.weight_decay)
        self.updates = state["updates"]
