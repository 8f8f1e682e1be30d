"""Attention kernels that also return the log-sum-exp of the scores, and take one for the gradient.

Two results over different keys are merged by their log-sum-exp, which is exact:

    lse = log(exp(lse_1) + exp(lse_2)),    out = out_1 exp(lse_1 - lse) + out_2 exp(lse_2 - lse)

A kernel's backward pass recomputes the probabilities of its keys from the log-sum-exp that it is given, and subtracts
sum(out * gradient) of the result that it is given. With those of the merged result it gives its own keys' part of the
whole gradient. So no gradient of the log-sum-exp is needed.

Shapes are [tokens, heads, size]; a log-sum-exp is fp32 or wider, [heads, tokens].
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Self

import attrs
import numpy as np
import torch

from agentrig_forest.kernels import is_fake

STEPS = ((2048, 128), (4096, 256), (1 << 62, 512))
"""Lengths below the first number are rounded to a multiple of the second for a kernel that is made for one shape: cuDNN
prepares for each new one, in 0.1 s."""

Grads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@attrs.frozen(eq=False)
class Sequences:
    """Sequences of queries and their keys, one after the other, for FlashAttention; on a CPU for torch's own kernel.

    Attributes:
        cu_q: Offsets of each sequence's queries, and the last end, int32 [sequences + 1].
        cu_k: The same of its keys.
        max_q: Most queries of a sequence.
        max_k: Most keys of a sequence.
        causal: Whether query i sees the keys up to i only; a sequence then has as many keys as queries.
    """

    cu_q: torch.Tensor
    cu_k: torch.Tensor
    max_q: int
    max_k: int
    causal: bool

    @classmethod
    def of(cls, q: Sequence[int], k: Sequence[int], *, causal: bool) -> Self:
        """Return them from their lengths."""
        cu_q, cu_k = (torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32) for lengths in (q, k))
        return cls(cu_q, cu_k, max(q), max(k), causal)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the result and its log-sum-exp."""
        if q.device.type != "cuda":
            return self._cpu(q, k, v, scaling)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, self.cu_q, self.cu_k, self.max_q, self.max_k, 0.0, self.causal, False, scale=scaling
        )
        return out, lse

    def backward(
        self, gradient: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
        lse: torch.Tensor, scaling: float | None,
    ) -> Grads:  # fmt: skip
        """Return the gradients of q, k and v, where `out` and `lse` are those of the merged result."""
        if q.device.type != "cuda":
            return self._cpu_backward(gradient, q, k, v, out, lse, scaling)
        dropout = torch.empty(2, dtype=torch.uint64, device=q.device)  # of random numbers; without dropout not read
        found: Grads = torch.ops.aten._flash_attention_backward(
            gradient, q, k, v, out, lse.contiguous(), self.cu_q, self.cu_k, self.max_q, self.max_k, 0.0,
            self.causal, dropout, dropout, scale=scaling,
        )  # fmt: skip
        return found

    def _cpu(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wide = torch.promote_types(q.dtype, torch.float)
        out, lse = torch.empty_like(q), q.new_empty((q.shape[1], len(q)), dtype=wide)
        for (a, b), (c, d) in self._pairs():
            one, its = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                _row(q[a:b]), _row(k[c:d], q), _row(v[c:d], q), 0.0, self.causal, scale=scaling
            )
            out[a:b], lse[:, a:b] = one[0].transpose(0, 1), its[0]
        return out, lse

    def _cpu_backward(
        self, gradient: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
        lse: torch.Tensor, scaling: float | None,
    ) -> Grads:  # fmt: skip
        grads = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for (a, b), (c, d) in self._pairs():
            found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                _row(gradient[a:b]), _row(q[a:b]), _row(k[c:d], q), _row(v[c:d], q), _row(out[a:b]),
                lse[:, a:b][None], 0.0, self.causal, scale=scaling,
            )  # fmt: skip
            grads[0][a:b] = found[0][0].transpose(0, 1)
            for whole, part in zip(grads[1:], found[1:], strict=True):
                heads = part[0].transpose(0, 1)
                whole[c:d] = heads.reshape(d - c, whole.shape[1], -1, heads.shape[-1]).sum(2)
        return grads

    def _pairs(self) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        return zip(pairwise(self.cu_q.tolist()), pairwise(self.cu_k.tolist()), strict=True)


def rounded_down(length: int) -> int:
    """Return the largest length of `STEPS` that is not larger."""
    return length // _step(length) * _step(length)


def rounded_up(length: int) -> int:
    """Return the smallest length of `STEPS` that is not smaller."""
    return -(-length // _step(length)) * _step(length)


def _step(length: int) -> int:
    return next(step for most, step in STEPS if length < most)


@attrs.frozen(eq=False)
class Long(Sequences):
    """Long sequences of one shape, for cuDNN, which is almost twice as fast as FlashAttention there.

    Where it is not, as above. One kernel computes all of them: with one alone many multiprocessors have nothing to do
    at its end. Queries that are not among those asked for have no part in the gradients of keys and values if their
    log-sum-exp is infinity.
    """

    @classmethod
    def alike(cls, count: int, q: int, k: int, *, causal: bool) -> Long:
        """Return some sequences with q queries and k keys each."""
        return cls.of([q] * count, [k] * count, causal=causal)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the result and its log-sum-exp."""
        if not _has_cudnn(q):
            return super().forward(q, k, v, scaling)
        found = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *(self._batch(x) for x in (q, k, v)), None, True, 0.0, self.causal, False, scale=scaling
        )
        lse = found[1].view(self._count, q.shape[1], -1).transpose(0, 1)
        return _flat(found[0]), lse.reshape(q.shape[1], -1)

    def backward(
        self, gradient: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
        lse: torch.Tensor, scaling: float | None,
    ) -> Grads:  # fmt: skip
        """Return the gradients of q, k and v, where `out` and `lse` are those of the merged result."""
        if not _has_cudnn(q):
            return super().backward(gradient, q, k, v, out, lse, scaling)
        dropout = torch.empty((), dtype=torch.int64, device=q.device)  # seed and offset; without dropout not read
        its = lse.reshape(len(lse), self._count, -1).transpose(0, 1).contiguous()[..., None]
        grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *(self._batch(x) for x in (gradient, q, k, v, out)), its, dropout, dropout, None, None, None,
            self.max_q, self.max_k, 0.0, self.causal, scale=scaling,
        )  # fmt: skip
        dq, dk, dv = (_flat(x) for x in grads)
        return dq, dk, dv

    @property
    def _count(self) -> int:
        return len(self.cu_q) - 1

    def _batch(self, x: torch.Tensor) -> torch.Tensor:
        """Return sequences one after the other as [sequences, heads, tokens, size]."""
        return x.reshape(self._count, -1, *x.shape[1:]).transpose(1, 2)


def _flat(x: torch.Tensor) -> torch.Tensor:
    """Return what `_batch` was made of."""
    return x.transpose(1, 2).flatten(0, 1)


def _has_cudnn(q: torch.Tensor) -> bool:
    return q.device.type == "cuda" and q.shape[2] <= 128 and not is_fake(q) and _hopper(q.device)


@functools.cache
def _hopper(device: torch.device) -> bool:
    cudnn: bool = torch.backends.cudnn.is_available()  # type: ignore[no-untyped-call]
    return cudnn and torch.cuda.get_device_capability(device)[0] >= 9


def _row(x: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """Return a sequence [1, heads, tokens, size], with each key head once for every query head of `like`."""
    if like is not None and like.shape[1] > x.shape[1]:
        x = x.repeat_interleave(like.shape[1] // x.shape[1], 1)
    return x.transpose(0, 1)[None]
