"""A stand-in for torch_npu: torch then reports two NPUs and the backend hccl; no operator runs on them.

It takes torch's spare device slot (PrivateUse1), as the real one does. Collectives go through gloo.
"""

import types
from typing import Any

import torch
import torch.distributed as dist

__version__ = "2.13.0"


def npu_fusion_attention(*_args: Any, **_kwargs: Any) -> Any:
    raise NotImplementedError("the stand-in computes nothing")


def _device_module() -> Any:
    module: Any = types.ModuleType("torch.npu")
    module.is_available = lambda: True
    module.device_count = lambda: 2
    module.current_device = lambda: 0
    module.set_device = lambda device: None
    module.synchronize = lambda device=None: None
    module.empty_cache = lambda: module.told.append("empty_cache")
    module.mem_get_info = lambda device=None: (40 << 30, 64 << 30)
    module.memory_reserved = lambda device=None: 4 << 30
    module.set_per_process_memory_fraction = lambda share, device=None: module.told.append(share)
    module.told = []
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: None
    module.get_device_name = lambda device=0: "Ascend910B3"
    module.mstx = types.SimpleNamespace(range_start=lambda name: 0, range_end=lambda mark: None, mark=lambda name: None)
    return module


def _autoload() -> Any:
    if hasattr(torch, "npu"):
        return
    spare: Any = torch
    spare.utils.rename_privateuse1_backend("npu")
    spare._register_device_module("npu", _device_module())
    if dist.is_available():
        dist.Backend.register_backend(
            "hccl",
            lambda store, rank, size, timeout: dist.ProcessGroupGloo(store, rank, size, timeout),
            devices=["npu", "cpu"],
        )


_autoload()
