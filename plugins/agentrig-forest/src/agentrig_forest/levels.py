"""Attention within a pack by a GPU's fastest kernels, without a copy of a prefix's keys for each branch.

A run of segments without a branch is a node; a long one is cut in two. Each token attends to its own node, causally.
Then the tokens below a branching node attend to that node, all of whose tokens come before theirs: for each depth one
more call. The results are merged by their log-sum-exp (`agentrig_forest.lse`), which is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import attrs
import torch

from agentrig_forest.kernels import has_triton, is_fake
from agentrig_forest.lse import Grads, Long, Sequences, rounded_down, rounded_up
from agentrig_forest.segments import Pack

LONG = 2048
"""Fewest tokens of a node that is computed with those of its shape only; shorter are faster in one call for all."""

MOST = 8
"""Most long nodes that one kernel computes together."""

Rows = tuple[int, int] | torch.Tensor
"""Some tokens of a pack: from one to before another, or by their numbers, [tokens]."""

Results = tuple[torch.Tensor, torch.Tensor]


@attrs.frozen(eq=False)
class Padding:
    """Queries that a kernel for fixed lengths has between those that were asked for; their results are not used.

    Attributes:
        given: The token of each query of the kernel, [queries of the kernel].
        places: The places of those that were asked for, [queries].
    """

    given: torch.Tensor
    places: torch.Tensor

    @classmethod
    def of(cls, spans: Sequence[tuple[int, int]], queries: int) -> Padding:
        """Return it for spans of tokens with `queries` queries each; the last token of a span fills up the rest."""
        given = [torch.arange(a, a + queries).clamp(max=b - 1) for a, b in spans]
        places = [torch.arange(i * queries, i * queries + b - a) for i, (a, b) in enumerate(spans)]
        return cls(torch.cat(given), torch.cat(places))


@attrs.frozen(eq=False)
class Attention:
    """Attention of some tokens to some others.

    Attributes:
        q: The tokens of the queries; each token is there once in all calls to nodes of the same depth.
        k: The tokens of the keys.
        kernel: What computes it.
        padding: The queries that the kernel has; None if these are `q`.
    """

    q: Rows
    k: Rows
    kernel: Sequences
    padding: Padding | None = None

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float | None) -> Results:
        """Return the result of the call's queries and its log-sum-exp, from those of a pack."""
        out, lse = self.kernel.forward(self._queries(q), _take(k, self.k), _take(v, self.k), scaling)
        if self.padding is None:
            return out, lse
        return out.index_select(0, self.padding.places), lse.index_select(1, self.padding.places)

    def backward(
        self, gradient: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
        lse: torch.Tensor, scaling: float | None,
    ) -> Grads:  # fmt: skip
        """Return the gradients of the call's queries, keys and values, from the tensors of a pack."""
        gradient, q, out = (self._queries(x) for x in (gradient, q, out))
        lse = lse.index_select(1, self.q) if isinstance(self.q, torch.Tensor) else lse[:, self.q[0] : self.q[1]]
        if self.padding is not None:
            every = lse.new_full((len(lse), len(q)), torch.inf)
            lse = every.index_copy_(1, self.padding.places, lse)
        dq, dk, dv = self.kernel.backward(gradient, q, _take(k, self.k), _take(v, self.k), out, lse, scaling)
        return (dq if self.padding is None else dq.index_select(0, self.padding.places)), dk, dv

    def _queries(self, x: torch.Tensor) -> torch.Tensor:
        return _take(x, self.q if self.padding is None else self.padding.given)


@attrs.frozen(eq=False)
class Levels:
    """The layout.

    Attributes:
        own: Each token attends to its own node: each token is in one of these calls.
        above: The tokens below branching nodes attend to these, depth by depth.
    """

    own: Sequence[Attention]
    above: Sequence[Attention]

    @classmethod
    def of(cls, pack: Pack) -> Levels:
        """Return a pack's layout."""
        nodes = list(_cut(_nodes(pack)))
        above: list[Attention] = []
        for depth in sorted({node.depth for node in nodes}):
            above += _above([node for node in nodes if node.depth == depth and node.below > node.end])
        return cls(list(_own(nodes)), above)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float | None) -> torch.Tensor:
        """Return the attention's result; the arguments are those of `attention.Blocks.attend`."""
        q, k = q.to(v.dtype), k.to(v.dtype)  # autocast leaves them in fp32 after the rotary embedding
        rows = (x.contiguous() for x in (q, k, v))
        found: torch.Tensor = _Merged.apply(*rows, self, scaling)  # type: ignore[no-untyped-call]
        return found


@attrs.frozen
class _Node:
    """A run of segments without a branch: tokens `start` to `end`; those below it end at `below`."""

    start: int
    end: int
    below: int
    depth: int

    @property
    def tokens(self) -> int:
        """Its length."""
        return self.end - self.start

    @property
    def queries(self) -> int:
        """How many tokens are below it."""
        return self.below - self.end


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


def _cut(nodes: Iterable[_Node]) -> Iterator[_Node]:
    """Cut long nodes at a length of `lse.STEPS`; the tokens after it are a node below, with the children."""
    for node in nodes:
        depth = 2 * node.depth  # of the odd depths are the tokens after a cut
        middle = node.start + rounded_down(node.tokens) if node.tokens >= LONG else node.end
        yield attrs.evolve(node, end=middle, depth=depth)
        if middle < node.end:
            yield attrs.evolve(node, start=middle, depth=depth + 1)


def _own(nodes: Sequence[_Node]) -> Iterator[Attention]:
    """Make the calls in which each token attends to its own node."""
    for some in _alike(nodes, lambda node: (node.tokens,)):
        rows = _rows([(node.start, node.end) for node in some])
        length = some[0].tokens
        yield Attention(rows, rows, Long.alike(len(some), length, length, causal=True))
    short = [node for node in nodes if node.tokens < LONG]
    if short:
        lengths = [node.tokens for node in short]
        rows = _rows([(node.start, node.end) for node in short])
        yield Attention(rows, rows, Sequences.of(lengths, lengths, causal=True))


def _above(branching: Sequence[_Node]) -> Iterator[Attention]:
    """Make the calls in which the tokens below some nodes of the same depth attend to these."""
    for some in _alike(branching, lambda node: (rounded_up(node.queries), node.tokens)):
        queries = rounded_up(some[0].queries)
        kernel = Long.alike(len(some), queries, some[0].tokens, causal=False)
        below, keys = _sides(some)
        exact = all(node.queries == queries for node in some)
        yield Attention(_rows(below), _rows(keys), kernel, None if exact else Padding.of(below, queries))
    short = [node for node in branching if node.tokens < LONG]
    if short:
        below, keys = _sides(short)
        kernel_of_all = Sequences.of([n.queries for n in short], [n.tokens for n in short], causal=False)
        yield Attention(_rows(below), _rows(keys), kernel_of_all)


def _sides(nodes: Sequence[_Node]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return the tokens below some nodes, and their own."""
    return [(node.end, node.below) for node in nodes], [(node.start, node.end) for node in nodes]


def _alike(nodes: Iterable[_Node], shape: Callable[[_Node], tuple[int, ...]]) -> Iterator[list[_Node]]:
    """Group long nodes of one shape by 1, 2, 4 or 8: one kernel computes them, and cuDNN prepares for few numbers."""
    groups: dict[tuple[int, ...], list[_Node]] = {}
    for node in nodes:
        if node.tokens >= LONG:
            groups.setdefault(shape(node), []).append(node)
    for some in groups.values():
        while some:
            count = min(MOST, 1 << (len(some).bit_length() - 1))
            yield some[:count]
            some = some[count:]


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
        lse = q.new_empty((q.shape[1], len(q)), dtype=torch.promote_types(q.dtype, torch.float))
        merge = _merge
        if _on_cuda(q):
            from agentrig_forest.triton_merge import merge
        for call in layout.own:
            merge(out, lse, call.q, *call.forward(q, k, v, scaling), first=True)
        for call in layout.above:
            merge(out, lse, call.q, *call.forward(q, k, v, scaling), first=False)
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
            parts = call.backward(gradient, q, k, v, out, lse, ctx.scaling)
            for whole, part, rows in zip(grads, parts, (call.q, call.k, call.k), strict=True):
                _add(whole, rows, part, first=number < len(ctx.layout.own))
        return (*grads, None, None)


def _merge(
    out: torch.Tensor, lse: torch.Tensor, rows: Rows, one: torch.Tensor, its: torch.Tensor, *, first: bool
) -> None:
    """Merge a call's results into those of its rows so far; with `first` there are none."""
    if first:
        _put(out, rows, one)
        _put(lse.t(), rows, its.t())
        return
    before = _take(lse.t(), rows).t()
    share = torch.sigmoid(its - before).t()[..., None]
    merged = torch.lerp(_take(out, rows).to(share.dtype), one.to(share.dtype), share)
    _put(out, rows, merged.to(out.dtype))
    _put(lse.t(), rows, torch.logaddexp(before, its).t())


def _on_cuda(x: torch.Tensor) -> bool:
    """Return whether Triton's kernels compute there."""
    return x.is_cuda and not is_fake(x) and has_triton()


def _take(x: torch.Tensor, rows: Rows) -> torch.Tensor:
    return x.index_select(0, rows) if isinstance(rows, torch.Tensor) else x[rows[0] : rows[1]]


def _put(x: torch.Tensor, rows: Rows, values: torch.Tensor) -> None:
    if isinstance(rows, torch.Tensor):
        x.index_copy_(0, rows, values)
    else:
        x[rows[0] : rows[1]] = values


def _add(x: torch.Tensor, rows: Rows, values: torch.Tensor, *, first: bool) -> None:
    """Add to rows, or with `first` put values there."""
    if isinstance(rows, torch.Tensor) and _on_cuda(x):
        from agentrig_forest import triton_merge

        triton_merge.add(x, rows, values, first=first)
    elif first:
        _put(x, rows, values)
    elif isinstance(rows, torch.Tensor):
        x.index_add_(0, rows, values)
    else:
        x[rows[0] : rows[1]] += values
