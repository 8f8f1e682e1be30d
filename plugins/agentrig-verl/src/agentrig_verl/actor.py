"""verl's actor worker, which also measures how far a step moved the weights."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch  # noqa: TID253  (runs in verl's workers; imported by the trainer only)
from verl.single_controller.base.decorator import Dispatch, register  # noqa: TID253
from verl.utils import tensordict_utils  # noqa: TID253
from verl.utils.device import get_device_id, get_device_name  # noqa: TID253
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker  # noqa: TID253

from agentrig.delivery.digests import digest
from agentrig_verl import logprobs

SAMPLE = 1 << 20
"""How many weights of each rank are sampled; an odd stride spreads them over every tensor."""

METRIC = "weight_change"

COMPUTED, TRACED = "computed_tokens", "traced_tokens"
"""Metrics of an update: tokens through the model, and what they would be if no two rows shared any."""


class MeasuringWorker(TrainingWorker):  # type: ignore[misc]
    """Adds `weight_change` to the metrics of an update: an estimate of the L2 norm of the change of all weights.

    Exact when a rank holds no more than `SAMPLE` weights; else the root of the mean square over a fixed, even
    sample, times the root of the number of weights. Copying every weight would cost as much memory as the model.
    """

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
        self._sent: dict[str, tuple[str, list[int]]] = {}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)  # type: ignore[untyped-decorator]
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> Any:
        """Send the weights to the servers, and keep the digest of each tensor on its way."""
        real, self._sent = self.rollout.update_weights, {}
        dtype = getattr(torch, self.config.rollout.dtype)

        async def watched(weights: Any, **more: Any) -> Any:
            return await real(digested(weights, dtype, self._sent) if self.rank == 0 else weights, **more)

        self.rollout.update_weights = watched
        try:
            return await super().update_weights(global_steps=global_steps, mode=mode)
        finally:
            self.rollout.update_weights = real

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def sent_digests(self) -> dict[str, tuple[str, list[int]]]:
        """Return name to digest and shape of what the latest `update_weights` sent; of rank 0 only."""
        return self._sent

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def probe(self, ids: list[int], seed: int, dtype: str) -> tuple[list[float], int]:
        """Score given tokens with the current weights, on all ranks at once.

        Args:
            ids: Token ids.
            seed: 0 for the plain forward pass; else noise of the dtype's rounding is added after each block.
            dtype: What the servers compute in.

        Returns:
            The log-probability of each token but the first, and the number of blocks.
        """
        engine = self.actor.engine
        with engine.eval_mode(), torch.no_grad():
            blocks = decoder_blocks(engine.module)
            hooks = [b.register_forward_hook(rounding_noise(seed + i, dtype)) for i, b in enumerate(blocks) if seed]
            try:
                return scored(engine.module, ids, torch.device(get_device_name(), get_device_id())), len(blocks)
            finally:
                for hook in hooks:
                    hook.remove()


class ForestActor(Actor):
    """The hybrid worker whose actor and reference compute tokens that rows share once."""

    actor_worker_cls = ForestWorker
    ref_worker_cls = ForestWorker


def digested(weights: Any, dtype: torch.dtype, found: dict[str, tuple[str, list[int]]]) -> Iterator[tuple[str, Any]]:
    """Pass tensors on, and note the digest and shape of each, rounded to the servers' dtype."""
    for name, tensor in weights:
        rounded = tensor.to(dtype) if tensor.is_floating_point() else tensor
        found[name] = digest(rounded), list(tensor.shape)
        yield name, tensor


def decoder_blocks(model: Any) -> list[Any]:
    """Return the blocks of a causal language model: the longest list of modules in it."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return list(max(lists, key=len, default=()))


def rounding_noise(seed: int, dtype: str) -> Any:
    """Return a hook that changes each number of a block's output by up to one rounding step of a dtype."""
    step = torch.finfo(getattr(torch, dtype)).eps

    def hook(module: Any, given: Any, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        random = torch.Generator(device=hidden.device).manual_seed(seed)
        noise = torch.rand(hidden.shape, generator=random, device=hidden.device, dtype=torch.float32) * 2 - 1
        changed = (hidden.float() * (1 + step * noise)).to(hidden.dtype)
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    return hook


def scored(model: Any, ids: Sequence[int], device: torch.device) -> list[float]:
    """Return the log-probability of each token but the first under a model, in the precision that it trains in."""
    given = torch.tensor([list(ids)], device=device)
    places = torch.arange(len(ids), device=device)[None]
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type != "cpu"):
        out = model(input_ids=given, position_ids=places, attention_mask=torch.ones_like(given), use_cache=False)
    found: list[float] = logprobs.token_logprobs(out.logits[0, :-1], given[0, 1:]).tolist()
    return found
