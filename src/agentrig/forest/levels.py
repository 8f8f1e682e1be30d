"""Attention within a pack by a GPU's fastest kernels, without a copy of a prefix's keys for each branch.

A run of segments without a branch is a node. Each token attends to its own node, causally. Then the tokens below a
branching node attend to that node, all of whose tokens come before theirs: for each depth one more call. The results
are merged by their log-sum-exp (`agentrig.forest.lse`), which is exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import attrs
import torch  # noqa: TID253  (imported with a learner only)

from agentrig.forest.lse import STEP, Long, Sequences
from agentrig.forest.segments import Pack

LONG = 2048
"""Fewest tokens of a node that is computed by itself: prompts of a thousand tokens are faster in one call for all."""

Rows = tuple[int, int] | torch.Tensor
"""Some tokens of a pack: from one to before another, or by their numbers, [tokens]."""


@attrs.frozen(eq=False)
class Call:
    """Attention of some tokens to some others.

    Attributes:
        q: The tokens of the queries; each token is there once in all calls to nodes of the same depth.
        k: The tokens of the keys.
        kernel: What computes it.
    """

    q: Rows
    k: Rows
    kernel: Sequences | Long

    def to(self, device: torch.device) -> Call:
        """Return the call on a device."""
        q, k = (rows.to(device) if isinstance(rows, torch.Tensor) else rows for rows in (self.q, self.k))
        return Call(q, k, self.kernel.to(device))


@attrs.frozen(eq=False)
class Levels:
    """The layout.

    Attributes:
        own: Each token attends to its own node: each token is in one of these calls.
        above: The tokens below branching nodes attend to these, depth by depth.
    """

    own: Sequence[Call]
    above: Sequence[Call]

    @classmethod
    def of(cls, pack: Pack) -> Levels:
        """Return a pack's layout."""
        nodes = list(_nodes(pack))
        own, above = list(_own(nodes)), []
        for depth in range(max(node.depth for node in nodes) + 1):
            branching = [node for node in nodes if node.depth == depth and node.below > node.end]
            above += list(_above(branching))
        return cls(own, above)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float | None) -> torch.Tensor:
        """Return the attention's result; see `agentrig.forest.attention.Layout`."""
        q, k = q.to(v.dtype), k.to(v.dtype)  # autocast leaves them in fp32 after the rotary embedding
        rows = (x.contiguous() for x in (q, k, v))
        found: torch.Tensor = _Merged.apply(*rows, self, scaling)  # type: ignore[no-untyped-call]
        return found

    def to(self, device: torch.device) -> Levels:
        """Return the layout on a device."""
        return Levels([call.to(device) for call in self.own], [call.to(device) for call in self.above])


@attrs.frozen
class _Node:
    """A run of segments without a branch: tokens `start` to `end`; those below it end at `below`."""

    start: int
    end: int
    below: int
    depth: int


def _nodes(pack: Pack) -> Iterator[_Node]:
    """Join the segments of a pack that continue an only child, and follow it in the pack."""
    spans, parents = pack.spans(), [s.parent for s in pack.forest.segments]
    children: dict[int, int] = {}
    below: dict[int, int] = {}
    for index in reversed(pack.segments):  # children come after their parents
        below[index] = max(below.get(index, 0), spans[index][1])
        parent = parents[index]
        if parent is not None:
            children[parent] = children.get(parent, 0) + 1
            below[parent] = max(below.get(parent, 0), below[index])
    depths: dict[int, int] = {}
    start = 0
    for index in pack.segments:
        parent = parents[index]
        alone = parent is not None and children[parent] == 1
        depths[index] = 0 if parent is None else depths[parent] + (not alone)
        if not alone:
            start = spans[index][0]
        if children.get(index) != 1:
            yield _Node(start, spans[index][1], below[index], depths[index])


def _own(nodes: Sequence[_Node]) -> Iterator[Call]:
    """Make the calls in which each token attends to its own node."""
    short = [node for node in nodes if node.end - node.start < LONG]
    for node in nodes:
        if node.end - node.start >= LONG:
            n = node.end - node.start
            yield Call((node.start, node.end), (node.start, node.end), Long.of(n, n, causal=True))
    if short:
        lengths = [node.end - node.start for node in short]
        rows = _rows([(node.start, node.end) for node in short])
        yield Call(rows, rows, Sequences.of(lengths, lengths, causal=True))


def _above(branching: Sequence[_Node]) -> Iterator[Call]:
    """Make the calls in which the tokens below some nodes of the same depth attend to these."""
    rest: list[tuple[_Node, int]] = []
    for node in branching:
        start = node.start
        if node.end - node.start >= LONG and node.below - node.end >= STEP:
            start = node.end - (node.end - node.start) % STEP
            kernel = Long.of(node.below - node.end, start - node.start, causal=False)
            yield Call((node.end, node.below), (node.start, start), kernel)
        if start < node.end:
            rest.append((node, start))
    if rest:
        q, k = [node.below - node.end for node, _ in rest], [node.end - start for node, start in rest]
        yield Call(
            _rows([(node.end, node.below) for node, _ in rest]),
            _rows([(start, node.end) for node, start in rest]),
            Sequences.of(q, k, causal=False),
        )


def _rows(spans: Sequence[tuple[int, int]]) -> Rows:
    if all(a[1] == b[0] for a, b in pairwise(spans)):
        return spans[0][0], spans[-1][1]
    return torch.cat([torch.arange(a, b) for a, b in spans])


class _Merged(torch.autograd.Function):
    """The calls of a layout, merged."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Levels, scaling: float | None
    ) -> torch.Tensor:
        """Compute the result, [tokens, heads, size]."""
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float))
        for call in layout.own:
            one, its = call.kernel.forward(_take(q, call.q), _take(k, call.k), _take(v, call.k), scaling)
            _put(out, call.q, one)
            _put(lse, call.q, its)
        for call in layout.above:
            one, its = call.kernel.forward(_take(q, call.q), _take(k, call.k), _take(v, call.k), scaling)
            before = _take(lse, call.q)
            share = torch.sigmoid(its - before)[..., None]
            merged = torch.lerp(_take(out, call.q).to(share.dtype), one.to(share.dtype), share)
            _put(out, call.q, merged.to(out.dtype))
            _put(lse, call.q, torch.logaddexp(before, its))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.layout, ctx.scaling = layout, scaling
        return out

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[no-untyped-def]
        """Add the parts of the gradient of all calls."""
        q, k, v, out, lse = ctx.saved_tensors
        gradient = gradient.contiguous()
        grads = [torch.empty_like(x) for x in (q, k, v)]
        for number, call in enumerate([*ctx.layout.own, *ctx.layout.above]):
            parts = call.kernel.backward(
                _take(gradient, call.q), _take(q, call.q), _take(k, call.k), _take(v, call.k), _take(out, call.q),
                _take(lse, call.q), ctx.scaling,
            )  # fmt: skip
            save = _put if number < len(ctx.layout.own) else _add
            for whole, part, rows in zip(grads, parts, (call.q, call.k, call.k), strict=True):
                save(whole, rows, part)
        return (*grads, None, None)


def _take(x: torch.Tensor, rows: Rows) -> torch.Tensor:
    return x.index_select(0, rows) if isinstance(rows, torch.Tensor) else x[rows[0] : rows[1]]


def _put(x: torch.Tensor, rows: Rows, values: torch.Tensor) -> None:
    if isinstance(rows, torch.Tensor):
        x.index_copy_(0, rows, values)
    else:
        x[rows[0] : rows[1]] = values


def _add(x: torch.Tensor, rows: Rows, values: torch.Tensor) -> None:
    if isinstance(rows, torch.Tensor):
        x.index_add_(0, rows, values)
    else:
        x[rows[0] : rows[1]] += values
