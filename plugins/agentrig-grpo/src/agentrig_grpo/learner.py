"""The learner: a step's samples in, new weights and figures out."""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import attrs
import torch  # noqa: TID253  (imported by the algorithm when it runs)
from agentrig_forest.noise import with_noise
from agentrig_forest.scoring import CHUNK, score, why_not_shared
from agentrig_forest.segments import Pack
from agentrig_forest.sequences import Batch, collate, packed

from agentrig.audit.sketch import Sketch
from agentrig.delivery.digests import digests, fingerprint
from agentrig.delivery.verdict import difference
from agentrig.demonstrations import Turn
from agentrig.device_memory import give_memory_back, shortage
from agentrig.errors import AgentrigError, memory_named
from agentrig.hardware.memory import in_words
from agentrig.learners import TrainSample as TrainSample
from agentrig.ledger import NOT_FINITE, ZERO_ADVANTAGE
from agentrig.refusals import check_single_calls
from agentrig_grpo import adapter_files, checkpoint, trainer_files
from agentrig_grpo.building import build, recompute
from agentrig_grpo.config import LearnerConfig
from agentrig_grpo.context import context_of
from agentrig_grpo.encoding import encode
from agentrig_grpo.figures import Figures, of_pass
from agentrig_grpo.fitting import CPU_PASS, checkpoint_bytes, group_length, lower
from agentrig_grpo.host_copy import HostCopy
from agentrig_grpo.host_moments import PART
from agentrig_grpo.lora import factors, live_weights
from agentrig_grpo.loss import CROSS_ENTROPY, LossInputs, sample_weights, token_losses, tokens_in_loss
from agentrig_grpo.masters import computing_in
from agentrig_grpo.model_files import weight_files
from agentrig_grpo.naming import lasting
from agentrig_grpo.optimizers import check_state, learning_rate, optimizer_bytes, optimizer_of
from agentrig_grpo.passes import check_recorded, check_tokens, out_of_memory
from agentrig_grpo.server.chat import Chat, TooLong

log = logging.getLogger(__name__)

BESIDE_PASSES = 'Set algorithm.moments = "host" or algorithm.lora_rank = 16, or take a smaller model'
"""What helps where the gradient was computed, and the weights could not be updated."""

HOST_MARGIN = 1.1
"""A copy for a checkpoint is made if so many times its size is free in host memory."""

GPU_CHUNK = 1 << 28
"""Most logits in memory at once on a GPU: almost two thousand tokens of a large vocabulary. With 2^29 an update takes
1% less time and 3 GiB more."""

COUNTED = ("tokens", "computed", "traced", "repeated", "longest")
"""The figures that passes add to."""

T = TypeVar("T")


class Learner:
    """Implements `agentrig.learners.Learner`: holds the trained model and its optimizer.

    Args:
        model: A Hugging Face causal language model on its device, in fp32, or as its files have it if adapters are
            trained; these are added here.
        dtype: `float32`, or `bfloat16`: then the model computes with 16-bit copies of its weights, or under autocast
            (models whose calls share no tokens, and adapters of a model that has more than 16 bits). Trained weights,
            gradients and the optimizer stay fp32.
        seed: Of the order of mini-batches and of new adapters.
        chunk: Most logits that are held at once; None for the device's usual number.
        recomputed: How many layers compute their activations twice; None for what `gradient_checkpointing` says.
        frozen_exact: With LoRA: whether rounding the model to bfloat16 changes nothing; None to compare its weights.
        tokenizer: The model's, for `save` and `prompt`.
        host_memory: Returns the free bytes of host memory, for copies of what is saved; None if nobody needs to ask.
        lent: Name to digest of the model's frozen weights in its files, where they are the server's own: it gets
            adapters only, and is proven to have these weights still. None where they are the learner's.
        start: What adapters are adapters of, see `agentrig_grpo.adapter_files.reference`; None to read the model.

    Attributes:
        share: Whether tokens that calls share are computed once.
        path: That, in words: one sentence.
        layers: How many blocks the model has.
        tokens: Most tokens of a pass.
        recomputed: How many layers compute their activations twice.
    """

    def __init__(
        self,
        model: Any,
        config: LearnerConfig,
        *,
        dtype: str,
        seed: int,
        chunk: int | None = None,
        recomputed: int | None = None,
        frozen_exact: bool | None = None,
        tokenizer: Any = None,
        host_memory: Callable[[], int] | None = None,
        lent: Mapping[str, str] | None = None,
        start: Mapping[str, str] | None = None,
    ) -> None:
        self.config, self.tokenizer = config, tokenizer
        self.ready: Callable[[], None] = lambda: None  # checks the memory when the model's server has new weights
        self._dtype, self._seed, self._lent = dtype, seed, lent
        self._bf16 = dtype == "bfloat16"
        if start is None and config.lora_rank:
            start = adapter_files.reference(model, lasting(config.model))
        self._start: Mapping[str, str] = start or {}
        built = build(model, config, bf16=self._bf16, seed=seed, recomputed=recomputed, frozen_exact=frozen_exact)
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
        self.layers: int = getattr(model.config, "num_hidden_layers", 1)
        self.tokens: int = CPU_PASS if config.tokens_per_batch == "auto" else config.tokens_per_batch
        every = self.layers if config.gradient_checkpointing is True else 0
        self.recomputed = every if recomputed is None else min(recomputed, self.layers)
        self.measured: Callable[[int], None] | None = None
        self.updates = 0
        self.used: Sequence[tuple[int, str]] = ()
        self._in_loss: list[list[int]] = []  # for each epoch, the tokens of each sample that the gradient came from
        self._reasons: dict[int, str] = {}  # why a sample was not trained in some epoch
        self._kept: dict[str, torch.Tensor] = {}
        self._sketch: Sketch | None = None
        self._host, self._copies = HostCopy(self._device), True
        self._host_memory = host_memory
        self._latest = 0  # tokens of the latest pass
        self.gives_back = config.server_sleep is True
        self.lowered: Callable[[int, int, str], None] = lambda tokens, recomputed, why: None  # keeps that it was
        self.limit: Callable[[bool], None] = lambda updating: None  # sets how much of the device torch may hold

    def update(self, samples: Sequence[TrainSample], *, step: int, sketch: Sketch | None = None) -> dict[str, float]:
        """Update the weights on a step's samples; see `agentrig.learners.Learner`.

        An update with a gradient that is not finite is skipped; `grad_norm` is then NaN or infinite.

        Returns:
            The figures of `agentrig_grpo.figures.Figures.metrics`, `weight_change` (L2 norm of the step's change of all
            trained weights) and `sharing` (1 if shared tokens are computed once, 0 if each call is computed in full).
            Of a step with an update also the learning rate, and `learner_tokens_per_s` (all tokens through the model a
            second).
        """
        self.limit(True)
        try:
            return self._update(samples, step, sketch)
        finally:
            if self.gives_back:
                gc.collect()  # of activations that are still part of a cycle
                give_memory_back(self._device)
            self.limit(False)  # the server wakes next

    def _update(self, samples: Sequence[TrainSample], step: int, sketch: Sketch | None) -> dict[str, float]:
        self._sketch = sketch
        self._in_loss, self._reasons, self.used = [], {}, ()
        if not samples:
            return {"weight_change": 0.0, "updates": 0.0, "trained_tokens": 0.0}
        start = time.perf_counter()
        check_tokens(samples, self.model.get_input_embeddings().weight.shape[0], step)
        figures = Figures(recorded=all(s.logprobs is not None for s in samples))
        if self.config.max_staleness:
            check_recorded(samples, step)
        check_single_calls(self.config.loss, (s.rollout for s in samples))
        with memory_named(f"step {step}: the update, beside its passes", BESIDE_PASSES):
            samples = self._with_behaviour(samples, figures, step)
            for epoch in range(self.config.ppo_epochs):
                self._in_loss.append([0] * len(samples))
                for mini_batch in self._mini_batches(samples, step=step, epoch=epoch):
                    self._one_update([samples[i] for i in mini_batch], figures, mini_batch, step)
        self.used = [self._used(place, sample) for place, sample in enumerate(samples)]
        wall = time.perf_counter() - start
        if self.measured is not None and figures.updates:
            self.measured(int(torch.get_device_module(self._device.type).max_memory_reserved()))
            self.measured = None
        found = figures.metrics() | {"weight_change": self._change(figures.before), "sharing": float(self.share)}
        if figures.norms:
            found |= {"lr": self.optimizer.param_groups[0]["lr"], "learner_tokens_per_s": figures.computed / wall}
        return found

    def _one_update(self, samples: Sequence[TrainSample], figures: Figures, places: Sequence[int], step: int) -> None:
        """Accumulate a mini-batch's gradient in passes of at most `tokens` tokens, then step the optimizer.

        Args:
            figures: Is added to.
            places: The samples' places among those of the step.
        """
        config = self.config
        lengths = [len(s.response_ids) for s in samples]
        weights = sample_weights(lengths, [s.rollout for s in samples], config.loss_agg_mode)  # type: ignore[arg-type]
        # A sample with advantage 0 has a gradient only from the KL loss. Its tokens still count in the
        # aggregation, or the update would be larger when more groups have zero variance.
        active = [i for i, s in enumerate(samples) if s.learned or config.kl_loss_coef]
        self._reasons |= {places[i]: ZERO_ADVANTAGE for i in set(range(len(samples))).difference(active)}
        if not active:
            return
        chosen, shares = [samples[i] for i in active], [weights[i] for i in active]
        parts, in_loss = self._with_room(lambda: self._gradient(chosen, shares, figures), figures, step)
        figures.add(parts)  # it waits for a device: what the host alone does comes before it
        norm = float(torch.nn.utils.clip_grad_norm_(self.trained.values(), config.max_grad_norm))
        figures.norms.append(norm)
        if not math.isfinite(norm):  # skipped: it would make all weights NaN; the run's guard sees the metric
            self.optimizer.zero_grad(set_to_none=True)
            self._reasons |= {places[i]: NOT_FINITE for i in active}
            return
        self.updates += 1
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(config, step=step, update=self.updates)
        if not figures.before:  # not earlier: activations need the memory
            figures.before = [self._copy(p) for p in self.trained.values()]
        if self._sketch is not None:
            self._sketch.take(self.trained, self.optimizer, [s.call for s in samples if s.call is not None], norm)
        self._host.before_change()
        self.optimizer.step()
        if self._masters is not None:
            self._masters.refresh()
        if self._sketch is not None:
            self._sketch.after(self.trained, None if self._masters is None else self._masters.copies)
        self.optimizer.zero_grad(set_to_none=True)
        figures.updates += 1
        for i, tokens in zip(active, in_loss.tolist(), strict=True):
            self._in_loss[-1][places[i]] += tokens

    def _gradient(
        self, samples: Sequence[TrainSample], shares: Sequence[float], figures: Figures
    ) -> tuple[list[dict[str, torch.Tensor]], torch.Tensor]:
        """Accumulate the gradient of samples in passes; return each pass's figures, and each sample's trained tokens.

        Args:
            samples: Those with a gradient.
            shares: What each of their tokens counts in the loss.
            figures: Is added to.
        """
        config = self.config
        inputs = LossInputs.of(samples, shares, self._device)
        in_loss = torch.zeros(len(samples), dtype=torch.int64, device=self._device)
        parts: list[dict[str, torch.Tensor]] = []
        for batch in self._batches(samples, figures):
            behaviour, advantage, weight = inputs.look_up(batch)
            reference = self._reference_logprobs(batch) if config.kl_loss_coef else None
            logprobs, entropy = self._score(self.model, batch)
            if behaviour is None:
                behaviour = logprobs.detach()
            stale: dict[str, Any] = {}
            if config.max_staleness:
                begun = inputs.proximal
                proximal = logprobs.detach() if begun is None else begun[inputs.places(batch)]
                stale = {"proximal": proximal, "rollout_is_threshold": config.rollout_is_threshold}
            out = token_losses(
                logprobs,
                behaviour,
                advantage,
                kind=config.loss,
                calls=batch.sample,
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
        return parts, in_loss

    def _with_room(self, passes: Callable[[], T], figures: Figures, step: int) -> T:
        """Return what passes return; where the device has too little memory for them, repeat them with smaller ones.

        They begin again from the same state, so the weights after the update are those of a run that began with the
        smaller pass.
        """
        while True:
            before = {name: getattr(figures, name) for name in COUNTED}
            try:
                return passes()
            except torch.OutOfMemoryError as error:
                group = group_length(self.config, context_of(self.model.config, self.config.max_length))
                most = self.layers if self.config.gradient_checkpointing == "auto" else self.recomputed
                smaller = lower(self.tokens, self.recomputed, latest=self._latest, group=group, most=most)
                if smaller is None:
                    raise out_of_memory(error, self.config, step, self._latest, self.tokens) from error
                said = shortage(str(error))
            # Only here is the memory of the failed pass free: the error held it.
            for name, count in before.items():
                setattr(figures, name, count)
            self.optimizer.zero_grad(set_to_none=True)
            if self._masters is not None:
                self._masters.drop()
            gc.collect()
            if self._device.type != "cpu":
                torch.get_device_module(self._device.type).empty_cache()
            self.fit(*smaller)
            self.lowered(*smaller, f"step {step}: the device ran out of memory: {said}")
            log.warning(
                "step %d: the device ran out of memory (%s): its passes begin again, with at most %d tokens and %d of "
                "%d layers computed twice, and stay so",
                *(step, said, self.tokens, self.recomputed, self.layers),
            )

    def fit(self, tokens: int, recomputed: int) -> None:
        """Change the most tokens of a pass, and how many layers compute their activations twice."""
        self.tokens = tokens
        if recomputed != self.recomputed:
            self.recomputed = recomputed
            recompute(self.model, recomputed)

    def _used(self, place: int, sample: TrainSample) -> tuple[int, str]:
        """Return how many of a sample's tokens were trained, in the epoch that is furthest from all, and why not."""
        reason = self._reasons.get(place, "")
        tokens = len(sample.response_ids) if self.config.kl_loss_coef else sum(map(bool, sample.advantages))
        expected = 0 if reason else tokens
        return max((epoch[place] for epoch in self._in_loss), key=lambda n: abs(n - expected)), reason

    @torch.no_grad()
    def _change(self, before: list[torch.Tensor]) -> float:
        """Return the L2 norm of the step's change, into the memory of the weights before; 0 if none was made."""
        if not before:
            return 0.0
        if self.config.moments == "host":
            squares: list[Any] = []
            for trained, whole in zip(self.trained.values(), before, strict=True):
                parts = zip(torch.split(trained.view(-1), PART), torch.split(whole.view(-1), PART), strict=True)
                squares += [(now - old.to(now.device, non_blocking=True)).square().sum() for now, old in parts]
            return float(torch.stack(squares).sum().sqrt())
        torch._foreach_sub_(before, list(self.trained.values()))  # in place: a third copy of all weights would be much
        return float(torch.stack(torch._foreach_norm(before)).norm())

    def _copy(self, weights: torch.Tensor) -> torch.Tensor:
        """Return a copy of trained weights, beside the optimizer's moments: on the device or in host memory."""
        if self.config.moments != "host":
            return weights.detach().clone()
        copy = torch.empty_like(weights, device="cpu", requires_grad=False, pin_memory=self._device.type != "cpu")
        return copy.copy_(weights.detach(), non_blocking=True)  # the update comes after it on the same stream

    @torch.no_grad()
    def logprobs(
        self, ids: Sequence[int], *, temperature: float = 1.0, dtype: torch.dtype | None = None
    ) -> list[float]:
        """Return the log-probabilities of all tokens except the first, under the current weights.

        Args:
            dtype: Of weights and arithmetic; None for those of training.
        """
        sample = TrainSample(
            prompt_ids=ids[:1], response_ids=ids[1:], logprobs=None, advantage=0.0, rollout=0, group=""
        )
        (pack,) = packed([sample], 1, share=self.share)
        modes = {module: module.training for module in self.model.modules()}
        self.model.eval()
        try:
            if dtype is None:
                return self._score(self.model, self._collate(pack), temperature)[0].tolist()
            with computing_in(self.model, dtype):
                batch = collate(pack, share=self.share).to(self._device)
                return score(self.model, batch, temperature)[0].tolist()
        finally:
            for module, mode in modes.items():
                module.training = mode

    def digests(self, dtype: str) -> dict[str, str]:
        """Return name to digest of the current weights with adapters merged, rounded to the server's dtype.

        Where the frozen weights are the server's, those of its files' weights and of the adapters.
        """
        if self._lent is not None:
            return {**self._lent, **digests(factors(self.model, getattr(torch, dtype)))}
        return digests(live_weights(self.model), getattr(torch, dtype))

    def spread(self, ids: Sequence[int], dtype: str) -> float:
        """Return the largest change of a log-probability by the server's dtype and the learner's mixed precision.

        Each is measured against fp32, on these tokens and with these weights. They may differ from fp32 in opposite
        directions, so the two are added. For a server in fp32 it is twice the largest change by noise of one rounding
        step: its own rounding and the learner's.
        """
        trained = self.logprobs(ids)
        if dtype == "float32":
            noisy = with_noise(self.model, partial(self.logprobs, ids), "float32")
            return 2 * max(difference(trained, found) for found in noisy)
        exact = self.logprobs(ids, dtype=torch.float32)
        rounded = self.logprobs(ids, dtype=getattr(torch, dtype))
        return difference(exact, rounded) + difference(exact, trained)

    def _score(self, model: Any, batch: Batch, temperature: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._bf16 and self._masters is None):
            temperature = self.config.temperature if temperature is None else temperature
            return score(model, batch, temperature, chunk=self._chunk)

    def _collate(self, pack: Pack) -> Batch:
        return collate(pack, share=self.share, varlen=self._bf16 and self._device.type == "cuda").to(self._device)

    def _batches(self, samples: Sequence[TrainSample], figures: Figures) -> Iterator[Batch]:
        """Yield the batches of the packs of the samples' forest, each made when it is asked for."""
        packs = packed(samples, self.tokens, share=self.share)
        figures.traced += sum(len(s.prompt_ids) + len(s.response_ids) - 1 for s in samples)
        seen: set[int] = set()
        for pack in packs:
            figures.repeated += sum(len(pack.forest.segments[i].tokens) for i in pack.segments if i in seen)
            seen.update(pack.segments)
            batch = self._collate(pack)
            figures.computed += batch.computed
            figures.longest = max(figures.longest, batch.computed)
            self._latest = batch.computed
            yield batch

    @torch.no_grad()
    def _with_behaviour(self, samples: Sequence[TrainSample], figures: Figures, step: int) -> list[TrainSample]:
        """Fill in missing behaviour log-probabilities with those of the current weights; of stale samples the proximal.

        With a single update, the update's own forward pass gives them, so nothing is computed here; nor is it for
        samples that no update uses, or for a loss without a ratio.
        """
        active = [i for i, s in enumerate(samples) if s.learned or self.config.kl_loss_coef]
        name = "proximal" if self.config.max_staleness else "logprobs"
        lacking = [i for i in active if getattr(samples[i], name) is None]
        single = self.config.ppo_epochs * self.config.mini_batches == 1 or self.config.loss == CROSS_ENTROPY
        if not lacking or (single and len(lacking) == len(active)):
            return list(samples)
        found: dict[int, list[float]] = {i: [0.0] * len(samples[i].response_ids) for i in lacking}

        def compute() -> None:
            for batch in self._batches([samples[i] for i in lacking], figures):
                logprobs, _ = self._score(self.model, batch)
                places = zip(batch.sample.tolist(), batch.place.tolist(), logprobs.tolist(), strict=True)
                for sample, place, logprob in places:
                    found[lacking[sample]][place] = logprob

        self._with_room(compute, figures, step)
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

    def weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Return the weights for the model's server; adapters are merged one matrix at a time, when it is read.

        Where the frozen weights are the server's, adapters alone.
        """
        if self._lent is not None:
            return factors(self.model, getattr(torch, self._dtype))
        return checkpoint.weights(self.model).items()

    def fingerprint(self) -> str:
        """Return a digest of the trained weights."""
        return fingerprint(self.trained)

    @cached_property
    def _chat(self) -> Chat:
        return Chat(self.tokenizer)

    def prompt(self, text: str) -> list[int]:
        """Return the token ids of a user's message as a chat prompt; none if it is longer than the model's context."""
        context = context_of(self.model.config, self.config.max_length)
        try:
            return list(self._chat.prompt_ids([{"role": "user", "content": text}], context))
        except TooLong:  # no call has it: the server refuses it
            return []

    def encode(self, turn: Turn) -> tuple[Sequence[int], Sequence[int]]:
        """Return the token ids of a demonstrated call; see `agentrig.learners.Imitating`."""
        return encode(turn, self._chat, context_of(self.model.config, self.config.max_length))

    def keep(self) -> None:
        """Copy the trained weights, for `restore`."""
        self._kept = {name: p.detach().cpu().clone() for name, p in self.trained.items()}

    def restore(self) -> None:
        """Set the weights of the latest `keep`."""
        self._set(self._kept)

    def save(self, directory: Path) -> None:
        """Write the model, or adapters and what their starting model is, and under `trainer/` what `load` needs."""
        self._write(directory, self.state(), {} if self.config.lora_rank else checkpoint.weights(self.model))

    def _write(self, directory: Path, state: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> None:
        dtype = getattr(torch, self._dtype)
        if self.config.lora_rank:
            adapters, start = state["trained"], self._start
            adapter_files.save(self.model, self.tokenizer, directory, dtype=dtype, trained=adapters, start=start)
        else:
            checkpoint.save(self.model, self.tokenizer, directory, dtype=dtype, state=weights)
        trainer_files.write(directory, state)

    def plan_saving(self) -> int:
        """Make room in host memory for `copied`; return about how many bytes `save` writes."""
        trained = list(self.trained.values())
        model = [] if self.config.lora_rank else list(self.model.parameters())
        moments = optimizer_bytes(trained, self.config.optimizer)
        weights = sum(t.nbytes for t in trained)
        held = moments + sum(t.nbytes for t in model)
        if self.config.lora_rank or self._masters is not None:
            held += weights
        free = None if self._host_memory is None else self._host_memory()
        if free is not None and held * HOST_MARGIN > free:
            self._copies = False
            log.warning(
                "each checkpoint is written while the run waits: a copy of what it holds needs %s of host memory, and "
                "%s is free",
                *(in_words(held), in_words(free)),
            )
        else:
            self._host.reserve(held)
        written: torch.dtype = getattr(torch, self._dtype)
        size = written.itemsize * sum(t.numel() for t in model)
        return checkpoint_bytes(self.config, trained=weights // 4, moments=moments, model=size)

    def copied(self) -> Callable[[Path], None] | None:
        """Copy what `save` writes, and return what writes the copy; see `agentrig.learners.Copying`."""
        if not self._copies:
            return None
        host, kept = self._host, self._kept
        weights = {} if self.config.lora_rank else checkpoint.weights(self.model)
        copy = host.take({"trainer": self._state(), "model": weights})

        def write(directory: Path) -> None:
            host.wait()
            self._write(directory, {**copy["trainer"], "kept": kept}, copy["model"])

        return write

    def load(self, directory: Path) -> None:
        """Continue from what `save` wrote; see `agentrig.learners.Learner`."""
        if self.config.lora_rank:
            adapter_files.check_start(directory, self._start)
        with trainer_files.fitting(directory):
            if not self.config.lora_rank:
                weight_files(directory)
            self.load_state(trainer_files.read(directory))

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs: trained weights, optimizer, number of updates, the weights that are kept."""
        state = self._state()
        trained = {name: tensor.cpu() for name, tensor in state["trained"].items()}
        return {**state, "trained": trained, "kept": self._kept}

    def _state(self) -> dict[str, Any]:
        """Return the part of `state` that an update changes, on its device."""
        trained = {name: p.detach() for name, p in self.trained.items()}
        return {"trained": trained, "optimizer": self.optimizer.state_dict(), "updates": self.updates}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned; see `_set` for the errors."""
        check_state(state["optimizer"], self.config)
        self._set(state["trained"])
        self.optimizer.state.clear()  # before the new moments are made
        self.optimizer.load_state_dict(state["optimizer"])
        for group in self.optimizer.param_groups:  # torch restores the old values; a resumed run may set others
            group.update(betas=(self.config.beta1, self.config.beta2), weight_decay=self.config.weight_decay)
        self.updates, self._kept = state["updates"], state["kept"]

    @torch.no_grad()
    def _set(self, trained: Mapping[str, torch.Tensor]) -> None:
        """Set the trained weights.

        Raises:
            agentrig.errors.AgentrigError: They belong to another model or other LoRA settings.
        """
        if trained.keys() != self.trained.keys() or any(self.trained[n].shape != t.shape for n, t in trained.items()):
            raise AgentrigError(
                "the checkpoint's trained weights do not fit this configuration: "
                "resume with the model and the LoRA settings that the run started with"
            )
        self._host.before_change()
        for name, tensor in trained.items():
            self.trained[name].copy_(tensor)
        if self._masters is not None:
            self._masters.refresh()
