"""Log-probabilities and entropies from hidden states on a GPU: each logit is read once, in 16 bits.

The chain of torch's operations writes and reads the logits in fp32 about twenty times. Here a matrix product makes them
in 16 bits, a kernel reads them once, and in the backward pass another one turns them into their gradient in place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from agentrig_forest.kernels import has_triton


def fits(head: Any, hidden: torch.Tensor) -> bool:
    """Return whether an output head and its input are of the kind that `logprobs` computes: linear, in bf16 on CUDA."""
    # A class or tensor of another type is one that gathers or adapts the weight when it is called.
    plain = type(head) is torch.nn.Linear and head.bias is None and type(head.weight) is torch.nn.Parameter
    return (
        plain and hidden.device.type == "cuda" and hidden.dtype == head.weight.dtype == torch.bfloat16 and has_triton()
    )


def logprobs(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float, rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probability of a target for each hidden state, with a gradient, and the entropy without one.

    Args:
        hidden: Hidden states, [T, size].
        weight: The head's weight, [vocabulary, size].
        targets: Token ids, [T].
        temperature: The logits are divided by it.
        rows: Most hidden states whose logits are in memory at once.

    Returns:
        Log-probabilities and entropies in nats, fp32 [T].
    """
    found: tuple[torch.Tensor, torch.Tensor] = _Head.apply(hidden, weight, targets, 1 / temperature, rows)  # type: ignore[no-untyped-call]
    return found


class _Head(torch.autograd.Function):
    """The log-probabilities in chunks; logits of one chunk are kept for the gradient, those of several made again."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, scale: float, rows: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute log-probabilities and entropies."""
        parts = []
        logits = hidden.new_empty(0)
        for states, their in zip(torch.split(hidden, rows), torch.split(targets, rows), strict=True):
            logits = functional.linear(states, weight)
            parts.append(torch.ops.agentrig.row_logprobs(logits, their, scale))
        found, lse, entropy = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, targets, lse, *([logits] if len(parts) == 1 else []))
        ctx.mark_non_differentiable(entropy)
        ctx.scale, ctx.rows = scale, rows
        return found, entropy

    @staticmethod
    def backward(ctx, gradient: torch.Tensor, _: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[no-untyped-def]
        """Compute the gradients of the hidden states, and of the weight where it is trained."""
        hidden, weight, targets, lse, *kept = ctx.saved_tensors
        parts, of_weight = [], None
        columns = (torch.split(x, ctx.rows) for x in (hidden, targets, lse, gradient))
        for states, their, its, part in zip(*columns, strict=True):
            logits = kept[0].clone() if kept else functional.linear(states, weight)
            torch.ops.agentrig.row_gradient(logits, their, its, part.contiguous(), ctx.scale)
            parts.append(logits @ weight)
            if ctx.needs_input_grad[1]:  # as large as the head
                product = logits.t() @ states
                of_weight = product if of_weight is None else of_weight.add_(product)
            del logits
        return torch.cat(parts), of_weight, None, None, None


@torch.library.custom_op("agentrig::row_logprobs", mutates_args=(), device_types="cpu")
def row_logprobs(
    logits: torch.Tensor, targets: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return each row's log softmax(logits * scale) at its target, its log-sum-exp, and its entropy: fp32 [T]."""
    scaled = logits.float() * scale
    lse = scaled.logsumexp(-1)
    p = torch.exp(scaled - lse[:, None])
    return scaled.gather(1, targets[:, None])[:, 0] - lse, lse, lse - (p * scaled).sum(-1)


@row_logprobs.register_fake
def _(logits: torch.Tensor, targets: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    one, two, three = (logits.new_empty(len(logits), dtype=torch.float) for _ in range(3))
    return one, two, three


@row_logprobs.register_kernel("cuda")
def _(logits: torch.Tensor, targets: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from agentrig_forest import triton_rows

    return triton_rows.logprobs(logits, targets, scale)


@torch.library.custom_op("agentrig::row_gradient", mutates_args=("logits",), device_types="cpu")
def row_gradient(
    logits: torch.Tensor, targets: torch.Tensor, lse: torch.Tensor, gradient: torch.Tensor, scale: float
) -> None:
    """Replace logits by their gradient, where `gradient` is that of the log-probabilities, [T]."""
    p = torch.exp(logits.float() * scale - lse[:, None])
    found = -p * (gradient * scale)[:, None]
    found[torch.arange(len(p), device=p.device), targets] += gradient * scale
    logits.copy_(found)


@row_gradient.register_fake
def _(logits: torch.Tensor, targets: torch.Tensor, lse: torch.Tensor, gradient: torch.Tensor, scale: float) -> None: ...


@row_gradient.register_kernel("cuda")
def _(logits: torch.Tensor, targets: torch.Tensor, lse: torch.Tensor, gradient: torch.Tensor, scale: float) -> None:
    from agentrig_forest import triton_rows

    triton_rows.gradient(logits, targets, lse, gradient, scale)
