"""Attention within a pack by a GPU's fastest kernels, without a copy of a prefix's keys for each branch.

A run of segments without a branch is a node. Each token attends to its own node, causally. Then the tokens below a
branching node attend to that node, all of whose tokens come before theirs: for each depth one more call. The results
are merged by their log-sum-exp (`agentrig.forest.lse`), which is exact.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import attrs
import torch  # noqa: TID253  (imported with a learner only)
from torch.nn import functional  # noqa: TID253

from agentrig.forest.lse import STEP, Grads, Long, Sequences
from agentrig.forest.segments import Pack

LONG = 2048
"""Fewest tokens of a node that is computed by itself: prompts of a thousand tokens are faster in one call for all."""

Rows = tuple[int, int] | torch.Tensor
"""Some tokens of a pack: from one to before another, or by their numbers, [tokens]."""

Results = tuple[torch.Tensor, torch.Tensor]


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
    kernel: Sequences

    def to(self, device: torch.device) -> Call:
        """Return the call on a device."""
        q, k = (rows.to(device) if isinstance(rows, torch.Tensor) else rows for rows in (self.q, self.k))
        return Call(q, k, self.kernel.to(device))

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float | None) -> Results:
        """Return the result of the call's queries and its log-sum-exp, from those of a pack."""
        return self.kernel.forward(_take(q, self.q), _take(k, self.k), _take(v, self.k), scaling)

    def backward(
        self, gradient: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
        lse: torch.Tensor, scaling: float | None,
    ) -> Grads:  # fmt: skip
        """Return the gradients of the call's queries, keys and values, from the tensors of a pack."""
        gradient, q, out = (_take(x, self.q) for x in (gradient, q, out))
        lse = lse.index_select(1, self.q) if isinstance(self.q, torch.Tensor) else lse[:, self.q[0] : self.q[1]]
        return self.kernel.backward(gradient, q, _take(k, self.k), _take(v, self.k), out, lse, scaling)


@attrs.frozen(eq=False)
class Window:
    """Attention of adjacent tokens to adjacent others, by a kernel for a multiple of `STEP` of each.

    There are then more queries than were asked for. They are the tokens beside these, without a copy; where the pack
    ends, they are padding.

    Attributes:
        q: The tokens of the queries, from one to before another.
        k: The tokens of the keys; those of the queries if it is causal.
        begin: The first query of the kernel.
        kernel: What computes it.
    """

    q: tuple[int, int]
    k: tuple[int, int]
    begin: int
    kernel: Long

    @classmethod
    def of(cls, q: tuple[int, int], k: tuple[int, int], tokens: int) -> Window:
        """Return it for some tokens of a pack; `k` is `q`, or its length is a multiple of `STEP`.

        Args:
            q: The queries.
            k: The keys.
            tokens: Tokens of the pack.
        """
        causal, whole = q == k, -(-(q[1] - q[0]) // STEP) * STEP
        # Keys before a causal query's own would be seen by it, keys after it are not.
        begin = q[1] - whole if not causal and whole <= q[1] and q[0] + whole > tokens else q[0]
        return cls(q, k, begin, Long.of(whole, whole if causal else k[1] - k[0], causal=causal))

    def to(self, device: torch.device) -> Window:
        """Return the call on a device."""
        return attrs.evolve(self, kernel=self.kernel.to(device))

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float | None) -> Results:
        """Return the result of the call's queries and its log-sum-exp, from those of a pack."""
        out, lse = self.kernel.forward(self._queries(q), self._keys(k), self._keys(v), scaling)
        start, end = self.q[0] - self.begin, self.q[1] - self.begin
        return out[start:end], lse[:, start:end]

    def backward(
        self, gradient: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
        lse: torch.Tensor, scaling: float | None,
    ) -> Grads:  # fmt: skip
        """Return the gradients of the call's queries, keys and values, from the tensors of a pack."""
        start, end = self.q[0] - self.begin, self.q[1] - self.begin
        after = self.kernel.queries - end
        known = functional.pad(lse[:, self.q[0] : self.q[1]], (start, after), value=torch.inf)
        gradient, q, out = (self._queries(x) for x in (gradient, q, out))
        dq, dk, dv = self.kernel.backward(gradient, q, self._keys(k), self._keys(v), out, known, scaling)
        n = self.k[1] - self.k[0]
        return dq[start:end], dk[:n], dv[:n]

    def _queries(self, x: torch.Tensor) -> torch.Tensor:
        return _padded(x, self.begin, self.kernel.queries)

    def _keys(self, x: torch.Tensor) -> torch.Tensor:
        return self._queries(x) if self.q == self.k else x[self.k[0] : self.k[1]]


@attrs.frozen(eq=False)
class Levels:
    """The layout.

    Attributes:
        own: Each token attends to its own node: each token is in one of these calls.
        above: The tokens below branching nodes attend to these, depth by depth.
    """

    own: Sequence[Call | Window]
    above: Sequence[Call | Window]

    @classmethod
    def of(cls, pack: Pack) -> Levels:
        """Return a pack's layout."""
        nodes = list(_nodes(pack))
        own, above = list(_own(nodes, pack.tokens)), []
        for depth in range(max(node.depth for node in nodes) + 1):
            branching = [node for node in nodes if node.depth == depth and node.below > node.end]
            above += list(_above(branching, pack.tokens))
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


def _own(nodes: Sequence[_Node], tokens: int) -> Iterator[Call | Window]:
    """Make the calls in which each token attends to its own node."""
    short = [node for node in nodes if node.end - node.start < LONG]
    for node in nodes:
        if node.end - node.start >= LONG:
            yield Window.of((node.start, node.end), (node.start, node.end), tokens)
    if short:
        lengths = [node.end - node.start for node in short]
        rows = _rows([(node.start, node.end) for node in short])
        yield Call(rows, rows, Sequences.of(lengths, lengths, causal=True))


def _above(branching: Sequence[_Node], tokens: int) -> Iterator[Call | Window]:
    """Make the calls in which the tokens below some nodes of the same depth attend to these."""
    rest: list[tuple[_Node, int]] = []
    for node in branching:
        start = node.start
        if node.end - node.start >= LONG and node.below - node.end >= STEP:
            start = node.end - (node.end - node.start) % STEP
            yield Window.of((node.end, node.below), (node.start, start), tokens)
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
        lse = q.new_empty((q.shape[1], len(q)), dtype=torch.promote_types(q.dtype, torch.float))
        for call in layout.own:
            one, its = call.forward(q, k, v, scaling)
            _put(out, call.q, one)
            _put(lse.t(), call.q, its.t())
        for call in layout.above:
            one, its = call.forward(q, k, v, scaling)
            merge = _merge_on_cuda if q.is_cuda and not _is_fake(q) else _merge
            merge(out, lse, call.q, one, its)
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
            save = _put if number < len(ctx.layout.own) else _add
            for whole, part, rows in zip(grads, parts, (call.q, call.k, call.k), strict=True):
                save(whole, rows, part)
        return (*grads, None, None)


def _merge(out: torch.Tensor, lse: torch.Tensor, rows: Rows, one: torch.Tensor, its: torch.Tensor) -> None:
    """Merge a call's results into those of its rows so far."""
    before = _take(lse.t(), rows).t()
    share = torch.sigmoid(its - before).t()[..., None]
    merged = torch.lerp(_take(out, rows).to(share.dtype), one.to(share.dtype), share)
    _put(out, rows, merged.to(out.dtype))
    _put(lse.t(), rows, torch.logaddexp(before, its).t())


def _merge_on_cuda(out: torch.Tensor, lse: torch.Tensor, rows: Rows, one: torch.Tensor, its: torch.Tensor) -> None:
    """Do the same with one kernel, where there is Triton."""
    if not _has_triton():
        _merge(out, lse, rows, one, its)
        return
    from agentrig.forest import triton_merge

    triton_merge.merge(out, lse, rows, one, its)


@functools.cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _is_fake(x: torch.Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(x, FakeTensor)


def _padded(x: torch.Tensor, begin: int, length: int) -> torch.Tensor:
    """Return rows from `begin` on, with zeros after the last."""
    found = x[begin : begin + length]
    missing = length - len(found)
    return functional.pad(found, (0, 0) * (x.dim() - 1) + (0, missing)) if missing else found


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
