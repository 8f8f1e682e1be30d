"""torch's fused kernels instead of transformers' chains of small ones, and whether a tensor's device has kernels."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
from torch.nn import functional


@functools.cache
def has_triton() -> bool:
    """Return whether Triton is installed: torch for CUDA brings it on Linux."""
    return importlib.util.find_spec("triton") is not None


def is_fake(x: torch.Tensor) -> bool:
    """Return whether a tensor has no data, as in an estimate of memory."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(x, FakeTensor)


def fuse_norms(model: Any) -> int:
    """Compute each RMS norm of a model with torch's kernel; return how many there are.

    transformers rounds to the model's dtype before it multiplies by the weight, the kernel once at the end: in 16 bits
    the results differ by that rounding, in fp32 by nothing but the order of sums.
    """
    norms = [m for m in model.modules() if type(m).__name__.endswith("RMSNorm") and hasattr(m, "variance_epsilon")]
    for norm in norms:
        norm.forward = functools.partial(_rms_norm, norm)
    return len(norms)


def _rms_norm(norm: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(hidden_states, norm.weight.shape, norm.weight, norm.variance_epsilon)
