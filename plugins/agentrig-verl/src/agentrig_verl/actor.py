"""verl's actor worker, which also measures how far a step moved the weights."""

from __future__ import annotations

import math
from typing import Any

import torch  # noqa: TID253  (runs in verl's workers; imported by the trainer only)
from verl.utils import tensordict_utils  # noqa: TID253
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker  # noqa: TID253

from agentrig_verl import logprobs

SAMPLE = 1 << 20
"""How many weights of each rank are sampled; an odd stride spreads them over every tensor."""

METRIC = "weight_change"


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


class Actor(ActorRolloutRefWorker):  # type: ignore[misc]
    """verl's hybrid worker with `MeasuringWorker` inside, and fast log-probabilities where flash-attn is missing."""

    actor_worker_cls = MeasuringWorker

    def __init__(self, *args: Any, **more: Any) -> None:
        logprobs.install()
        super().__init__(*args, **more)
