"""Attention kernels that also return the log-sum-exp of the scores, and take one for the gradient.

Two results over different keys are merged by their log-sum-exp, which is exact:

    lse = log(exp(lse_1) + exp(lse_2)),    out = out_1 exp(lse_1 - lse) + out_2 exp(lse_2 - lse)

A kernel's backward pass recomputes the probabilities of its keys from the log-sum-exp that it is given, and subtracts
sum(out * gradient) of the result that it is given. With those of the merged result it gives its own keys' part of the
whole gradient. So no gradient of the log-sum-exp is needed.

Shapes are [tokens, heads, size]; a log-sum-exp is fp32 or wider, [tokens, heads].
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from itertools import pairwise

import attrs
import numpy as np
import torch  # noqa: TID253  (imported with a learner only)
from torch.nn import functional  # noqa: TID253

STEP = 512
"""Queries of one long sequence are padded to a multiple of this: cuDNN prepares for each new shape, in 0.1 s."""

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
    def of(cls, q: Sequence[int], k: Sequence[int], *, causal: bool) -> Sequences:
        """Return them from their lengths."""
        cu_q, cu_k = (torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32) for lengths in (q, k))
        return cls(cu_q, cu_k, max(q), max(k), causal)

    def to(self, device: torch.device) -> Sequences:
        """Return them on a device."""
        return attrs.evolve(self, cu_q=self.cu_q.to(device), cu_k=self.cu_k.to(device))

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the result and its log-sum-exp."""
        if q.device.type != "cuda":
            return self._cpu(q, k, v, scaling)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, self.cu_q, self.cu_k, self.max_q, self.max_k, 0.0, self.causal, False, scale=scaling
        )
        return out, lse.t()

    def backward(
        self, gradient: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
        lse: torch.Tensor, scaling: float | None,
    ) -> Grads:  # fmt: skip
        """Return the gradients of q, k and v, where `out` and `lse` are those of the merged result."""
        if q.device.type != "cuda":
            return self._cpu_backward(gradient, q, k, v, out, lse, scaling)
        dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)  # state of random numbers; there is no dropout
        found: Grads = torch.ops.aten._flash_attention_backward(
            gradient, q, k, v, out, lse.t().contiguous(), self.cu_q, self.cu_k, self.max_q, self.max_k, 0.0,
            self.causal, dropout, dropout, scale=scaling,
        )  # fmt: skip
        return found

    def _cpu(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float))
        for (a, b), (c, d) in self._pairs():
            one, its = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                _row(q[a:b]), _row(k[c:d], q), _row(v[c:d], q), 0.0, self.causal, scale=scaling
            )
            out[a:b], lse[a:b] = one[0].transpose(0, 1), its[0].t()
        return out, lse

    def _cpu_backward(
        self, gradient: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
        lse: torch.Tensor, scaling: float | None,
    ) -> Grads:  # fmt: skip
        grads = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for (a, b), (c, d) in self._pairs():
            found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                _row(gradient[a:b]), _row(q[a:b]), _row(k[c:d], q), _row(v[c:d], q), _row(out[a:b]),
                lse[a:b].t()[None], 0.0, self.causal, scale=scaling,
            )  # fmt: skip
            grads[0][a:b] = found[0][0].transpose(0, 1)
            for whole, part in zip(grads[1:], found[1:], strict=True):
                heads = part[0].transpose(0, 1)
                whole[c:d] = heads.reshape(d - c, whole.shape[1], -1, heads.shape[-1]).sum(2)
        return grads

    def _pairs(self) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        return zip(pairwise(self.cu_q.tolist()), pairwise(self.cu_k.tolist()), strict=True)


@attrs.frozen(eq=False)
class Long:
    """One long sequence, for cuDNN, which is almost twice as fast as FlashAttention there; where it is not, as above.

    Queries are padded to a multiple of `STEP`, and so are the keys of a causal one, which no real query sees. The
    gradient of a padded query is 0, and so is its part of the gradients of keys and values.

    Attributes:
        padded: The sequence with its padding.
    """

    padded: Sequences

    @classmethod
    def of(cls, q: int, k: int, *, causal: bool) -> Long:
        """Return it from its lengths; `k` is a multiple of `STEP`, or as `q` if it is causal."""
        whole = -(-q // STEP) * STEP
        assert causal or k % STEP == 0
        return cls(Sequences.of([whole], [whole if causal else k], causal=causal))

    def to(self, device: torch.device) -> Long:
        """Return it on a device."""
        return Long(self.padded.to(device))

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the result and its log-sum-exp."""
        n, (q, k, v) = len(q), self._whole(q, k, v)
        if not _has_cudnn(q):
            out, lse = self.padded.forward(q, k, v, scaling)
            return out[:n], lse[:n]
        found = torch.ops.aten._scaled_dot_product_cudnn_attention(
            _row(q), _row(k), _row(v), None, True, 0.0, self.padded.causal, False, scale=scaling
        )
        return found[0][0].transpose(0, 1)[:n], found[1].view(q.shape[1], -1).t()[:n]

    def backward(
        self, gradient: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
        lse: torch.Tensor, scaling: float | None,
    ) -> Grads:  # fmt: skip
        """Return the gradients of q, k and v, where `out` and `lse` are those of the merged result."""
        n, m, (q, k, v) = len(q), len(k), self._whole(q, k, v)
        gradient, out, lse = (_pad(x, len(q)) for x in (gradient, out, lse))
        if not _has_cudnn(q):
            found = self.padded.backward(gradient, q, k, v, out, lse, scaling)
            return found[0][:n], found[1][:m], found[2][:m]
        dropout = torch.zeros((), dtype=torch.int64, device=q.device)  # seed and offset; there is no dropout
        grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            _row(gradient), _row(q), _row(k), _row(v), _row(out), lse.t().contiguous()[None, :, :, None], dropout,
            dropout, None, None, None, len(q), len(k), 0.0, self.padded.causal, scale=scaling,
        )  # fmt: skip
        dq, dk, dv = (x[0].transpose(0, 1) for x in grads)
        return dq[:n], dk[:m], dv[:m]

    def _whole(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Grads:
        return _pad(q, self.padded.max_q), _pad(k, self.padded.max_k), _pad(v, self.padded.max_k)


def _has_cudnn(q: torch.Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return q.device.type == "cuda" and q.shape[2] <= 128 and not isinstance(q, FakeTensor) and _hopper(q.device)


@functools.cache
def _hopper(device: torch.device) -> bool:
    cudnn: bool = torch.backends.cudnn.is_available()  # type: ignore[no-untyped-call]
    return cudnn and torch.cuda.get_device_capability(device)[0] >= 9


def _pad(x: torch.Tensor, length: int) -> torch.Tensor:
    missing = length - len(x)
    return functional.pad(x, (0, 0) * (x.dim() - 1) + (0, missing)) if missing else x


def _row(x: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """Return a sequence [1, heads, tokens, size], with each key head once for every query head of `like`."""
    if like is not None and like.shape[1] > x.shape[1]:
        x = x.repeat_interleave(like.shape[1] // x.shape[1], 1)
    return x.transpose(0, 1)[None]
