"""The weights of a model that FSDP shards, gathered for the servers: one collective for each FSDP unit.

verl lists the parameters with `state_dict`, which gathers each unit in fp32 and cuts its parameters into parts again.
Then it gathers these parts one by one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch  # noqa: TID253  (runs in verl's workers; imported by the engine only)
from torch.distributed.fsdp import FullyShardedDataParallel  # noqa: TID253
from torch.distributed.fsdp._common_utils import clean_tensor_name  # noqa: TID253


def gathered(model: Any, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and the whole value of each parameter; all ranks must do so at the same time.

    A tied parameter comes under each of its names. While the caller uses the parameters of a unit, those of the next
    one are gathered. A value is valid until the next one is asked for. Buffers are not included.

    Args:
        model: A model with `units`. What the last forward pass left gathered is freed, as `state_dict` does.
        dtype: Each rank rounds its part to it before it is sent; None keeps the model's.
    """
    ahead: deque[tuple[str, Any, torch.Tensor, Any]] = deque()
    for prefix, handle in units(model):
        flat = handle.flat_param
        if flat.data_ptr() != flat._local_shard.data_ptr():
            handle.reshard(True)
        shard = flat._local_shard.detach().to(handle.device, non_blocking=True).to(dtype or flat.dtype)
        whole = torch.empty(shard.numel() * handle.world_size, dtype=shard.dtype, device=shard.device)
        group = handle.process_group
        ahead.append((prefix, handle, whole, torch.distributed.all_gather_into_tensor(whole, shard, group, True)))
        if len(ahead) > 1:
            yield from _named(*ahead.popleft())
    while ahead:
        yield from _named(*ahead.popleft())


def units(model: Any) -> list[tuple[str, Any]]:
    """Return the prefix and the handle of each module whose parameters FSDP1 shards over several ranks."""
    return [
        (f"{name}." if name else "", module._handle)
        for name, module in model.named_modules()
        if isinstance(module, FullyShardedDataParallel) and module._handle and module._handle.uses_sharded_strategy
    ]


def _named(prefix: str, handle: Any, whole: torch.Tensor, work: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Wait for a unit, and yield its parameters: views of the gathered tensor."""
    work.wait()
    flat = handle.flat_param
    views = handle._get_unflat_views(whole[: flat._unpadded_unsharded_size.numel()])
    found = dict(zip(flat._fqns, views, strict=True))
    for tied in flat._shared_param_infos:
        first = found[f"{tied.prim_module_name}.{tied.prim_param_name}".lstrip(".")]
        found[f"{tied.module_name}.{tied.param_name}".lstrip(".")] = first
    for name, value in found.items():
        yield clean_tensor_name(prefix + name), value
