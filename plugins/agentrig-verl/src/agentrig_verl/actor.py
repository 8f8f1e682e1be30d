"""verl's actor worker, which also measures the weight change of a step."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch  # noqa: TID253  (runs in verl's workers; imported by the trainer only)
from agentrig_forest.noise import decoder_blocks, with_noise
from verl.single_controller.base.decorator import Dispatch, register  # noqa: TID253
from verl.utils import tensordict_utils  # noqa: TID253
from verl.utils.device import get_device_id, get_device_name  # noqa: TID253
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker  # noqa: TID253

from agentrig.delivery.digests import Digests
from agentrig.delivery.verdict import difference
from agentrig_verl import logprobs
from agentrig_verl.counted import Counter

SAMPLE = 1 << 20
"""How many weights of each rank are sampled; an odd stride spreads them over every tensor."""

METRIC = "weight_change"

RECENT = 8
"""How many measurements of rounding count."""

COMPUTED, TRACED = "computed_tokens", "traced_tokens"
"""Metrics of an update: computed tokens, and the number without sharing between rows."""


class MeasuringWorker(TrainingWorker):  # type: ignore[misc]
    """Adds `weight_change` to the metrics of an update: an estimate of the L2 norm of the change of all weights.

    Exact when a rank holds no more than `SAMPLE` weights; else the root of the mean square over a fixed, even
    sample, times the root of the number of weights. Copying every weight would cost as much memory as the model.
    The metrics also say which rows the loss was computed over.
    """

    _counter: Counter | None = None

    def set_loss_fn(self, loss_fn: Callable[..., Any]) -> None:
        """Take verl's loss function, and count what it is computed over."""
        self._counter = Counter(loss_fn)
        super().set_loss_fn(self._counter)

    def train_mini_batch(self, data: Any) -> Any:
        """Run the update, and compare the weights before and after it."""
        before, count = self._sample()
        output = super().train_mini_batch(data)
        after, _ = self._sample()
        square = ((after - before).double() ** 2).sum() / max(1, len(before)) * count
        total = square.to(self.device_name).float().reshape(1)
        ranks = torch.distributed.get_world_size()
        if ranks > 1:
            torch.distributed.all_reduce(total)
            total /= ranks // self.engine.device_mesh.shape[-1]  # the last dimension shards, another would replicate
        if output is not None:
            tensordict_utils.get(output, "metrics")[METRIC] = [math.sqrt(float(total))]
        if self._counter is not None:
            counted = self._counter.take(self.engine.get_data_parallel_group(), self.device_name)
            if output is not None:
                tensordict_utils.get(output, "metrics").update(counted.metrics())
        return output

    def _sample(self) -> tuple[torch.Tensor, int]:
        """Return the sampled trained weights of this rank, fp32 on the CPU, and how many there are in all."""
        shards = []
        for parameter in self.engine.module.parameters():
            if parameter.requires_grad:
                local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                shards.append(local.detach().reshape(-1))
        count = sum(s.numel() for s in shards)
        stride = max(1, count // SAMPLE) | 1 if count > SAMPLE else 1
        return torch.cat([s[::stride].float().cpu() for s in shards]), count


class ForestWorker(MeasuringWorker):
    """Trains, or scores, with the engine that computes shared tokens once."""

    def __init__(self, config: Any) -> None:
        from agentrig_verl.engine import MODEL_TYPE  # registers the engine

        super().__init__(dataclasses.replace(config, model_type=MODEL_TYPE))

    def set_loss_fn(self, loss_fn: Callable[..., Any]) -> None:
        """Take verl's loss function, and check whether rows without an advantage have a gradient under it."""
        from agentrig_verl.engine import skips_zero_advantage

        self.engine.skips = skips_zero_advantage(loss_fn)
        super().set_loss_fn(loss_fn)

    def train_mini_batch(self, data: Any) -> Any:
        """Run the update, and add the tokens of all ranks to its metrics."""
        output = super().train_mini_batch(data)
        tokens, self.engine.tokens = self.engine.tokens, type(self.engine.tokens)()
        found = torch.tensor([tokens.computed, tokens.traced], dtype=torch.float64, device=self.device_name)
        torch.distributed.all_reduce(found)
        if output is not None:
            metrics = tensordict_utils.get(output, "metrics")
            metrics[COMPUTED], metrics[TRACED] = ([float(n)] for n in found)
        return output


class Actor(ActorRolloutRefWorker):  # type: ignore[misc]
    """verl's hybrid worker with `MeasuringWorker` inside, and fast log-probabilities where flash-attn is missing."""

    actor_worker_cls = MeasuringWorker

    def __init__(self, *args: Any, **more: Any) -> None:
        logprobs.install()
        super().__init__(*args, **more)
        self._told: dict[str, Any] = {}
        self._spent: dict[str, float] = {}
        self._probe: tuple[list[int], str] | None = None
        self._noises: deque[float] = deque(maxlen=RECENT)
        self._seeds = itertools.count()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)  # type: ignore[untyped-decorator]
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> Any:
        """Score the probe, send the weights to the servers, and keep the digests of some tensors on their way.

        All ranks send the same tensors, so each computes the digests of its share. The probe is scored while the
        servers wake, or before the transfer if they never sleep: beside their key-value cache there may be no room.
        """
        begun = time.perf_counter()
        self._told, self._spent = {}, {}
        rollout, engine = self.config.rollout, self.actor.engine
        dtype = getattr(torch, str(rollout.dtype), None)
        engine.sent = None if getattr(rollout, "quantization", None) else dtype  # a server quantizes what it gets
        found = Digests(dtype)
        shapes: dict[str, list[int]] = {}
        update, resume = self.rollout.update_weights, self.rollout.resume

        async def resumed(tags: list[str]) -> Any:
            scoring = None
            self._spent.setdefault("free", time.perf_counter() - begun)
            if self._probe is not None and not self._told:
                scoring = asyncio.create_task(asyncio.to_thread(self._score_probe, *self._probe, device=device))
            with self._timed("wake_" + "_".join(tags)):
                done = await resume(tags)
            if scoring is not None:
                with self._timed("probe"):  # what it takes longer than the server
                    self._told = await scoring
            return done

        async def watched(weights: Any, **more: Any) -> Any:
            passed = self._each(weights, "gather")
            if self._probe is not None:
                passed = self._each(digested(passed, found, shapes, rank=self.rank, ranks=_ranks()), "digests")
            with self._timed("send"):
                return await update(passed, **more)

        device = torch.device(get_device_name(), get_device_id())
        wakes = mode in ("auto", "naive") and rollout.checkpoint_engine.backend == "naive" and rollout.free_cache_engine
        if self._probe is not None and not wakes:
            with self._timed("probe"):
                self._told = self._score_probe(*self._probe, device=device)
        self.rollout.update_weights, self.rollout.resume = watched, resumed
        try:
            done = await super().update_weights(global_steps=global_steps, mode=mode)
        finally:
            self.rollout.update_weights, self.rollout.resume = update, resume
        if self._probe is not None:
            self._told["seconds"] = self._spent["probe"]
            self._told["sent"] = {name: (value, shapes[name]) for name, value in found.result().items()}
        self._spent["all"] = time.perf_counter() - begun
        return done

    @contextlib.contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._spent[part] = self._spent.get(part, 0.0) + time.perf_counter() - start

    def _each(self, items: Any, part: str) -> Iterator[Any]:
        """Pass on items, and count the time until each comes."""
        items, end = iter(items), object()
        while True:
            with self._timed(part):
                item = next(items, end)
            if item is end:
                return
            yield item

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def spent(self) -> dict[str, float]:
        """Return the seconds of the parts of the latest `update_weights`, as this rank's process waited for them.

        `free` comes before the servers wake, which are `wake_weights` and `wake_kv_cache`; `probe` is what scoring it
        took longer; `send` contains `digests`, and that `gather`, both without what the GPU still has to do; `all` is
        the whole.
        """
        return self._spent

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def set_probe(self, ids: list[int], dtype: str) -> None:
        """Take the tokens to score before each transfer, none for no proof, and the dtype of the servers."""
        self._probe = (ids, dtype) if ids else None
        self._noises.clear()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def told(self) -> dict[str, Any]:
        """Return the results of the latest `update_weights`.

        Returns:
            `logprobs` of the probe's tokens after the first; `noise`, the largest change of one by rounding; `layers`;
            the `seconds` that this took; and `sent`, name to digest and shape of this rank's share of the tensors.
        """
        return self._told

    def _score_probe(self, ids: list[int], dtype: str, *, device: torch.device) -> dict[str, Any]:
        """Score the probe with the current weights, on all ranks at once, and measure what rounding changes.

        The weights change with each step, and what rounding changes grows as the model learns. So a new probe is scored
        with noise three times, and once more for each later transfer. The largest change of the latest `RECENT` counts.
        """
        engine = self.actor.engine

        def score() -> list[float]:
            return scored(engine.module, ids, device)

        # A new thread begins on the first device.
        on = contextlib.nullcontext() if device.type == "cpu" else torch.get_device_module(device).device(device)
        with on, engine.eval_mode(), torch.no_grad():
            plain = score()
            again = [] if self._noises else [score()]  # without noise: the model may not be deterministic
            seeds = [next(self._seeds) for _ in range(1 if self._noises else 3)]
            again += with_noise(engine.module, score, dtype, seeds=seeds)
            self._noises += [difference(plain, found) for found in again]
        return {"logprobs": plain, "noise": max(self._noises), "layers": len(decoder_blocks(engine.module))}


def _ranks() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


class ForestActor(Actor):
    """The hybrid worker whose actor and reference compute tokens that rows share once."""

    actor_worker_cls = ForestWorker
    ref_worker_cls = ForestWorker


def digested(
    weights: Any, found: Digests, shapes: dict[str, list[int]], *, rank: int = 0, ranks: int = 1
) -> Iterator[tuple[str, Any]]:
    """Pass tensors on, and note the digest and the shape of each in a rank's share."""
    for i, (name, tensor) in enumerate(weights):
        if i % ranks == rank:
            found.add(name, tensor)
            shapes[name] = list(tensor.shape)
        yield name, tensor


def scored(model: Any, ids: Sequence[int], device: torch.device) -> list[float]:
    """Return the log-probability of each token after the first under a model, in the precision of its training."""
    given = torch.tensor([list(ids)], device=device)
    places = torch.arange(len(ids), device=device)[None]
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type != "cpu"):
        out = model(input_ids=given, position_ids=places, attention_mask=torch.ones_like(given), use_cache=False)
    found: list[float] = logprobs.token_logprobs(out.logits[0, :-1], given[0, 1:]).tolist()
    return found
