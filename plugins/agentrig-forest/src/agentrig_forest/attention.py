"""Attention within a pack of a forest: each token attends to its ancestors and itself only.

transformers calls `forest_attention` in each layer of a model that was prepared with `use`, and passes it the layout
from `scoring.score`. Without a layout it is transformers' own sdpa attention.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from agentrig_forest.levels import Levels
from agentrig_forest.segments import Forest, Pack

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

NAME = "agentrig_forest"
"""The attention's name in transformers."""

LEAST, BLOCK = 128, 512
"""Most tokens with one attention mask, if there is no kernel for sequences of different lengths: as many as there are
before them, within these bounds. Many short segments in one block would compute mostly what the mask hides; behind a
long prompt that is little, beside copying the prompt's keys for each block."""

AREA = 1 << 24
"""Most mask entries in one call of sdpa, with padding."""

PADDING = 1.5
"""Most mask entries with padding, as a multiple of those without."""


def use(model: Any) -> None:
    """Make a transformers model call `forest_attention`."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, forest_attention)
    model.set_attn_implementation(NAME)


def forest_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    layout: Layout | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """Call `attend` of the layout through transformers' attention interface, with tensors [1, heads, tokens, size]."""
    if layout is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **more
        )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return layout.attend(q, k, v, scaling)[None], None


def layout_of(pack: Pack, *, varlen: bool) -> Layout:
    """Return a pack's layout: for kernels of sequences (`varlen`, on CUDA in 16 bits), or for any device and dtype."""
    return Levels.of(pack) if varlen else Blocks.of(pack)


@attrs.frozen(eq=False)
class Part:
    """Some blocks of similar size, padded; see `Blocks`.

    Attributes:
        q: The token of each query, [blocks, queries].
        k: The token of each key, [blocks, keys].
        mask: The keys that a query attends to, [blocks, 1, queries, keys]; None for one causal block without padding.
    """

    q: torch.Tensor
    k: torch.Tensor
    mask: torch.Tensor | None


@attrs.frozen(eq=False)
class Blocks:
    """Adjacent queries form a block; its keys are its ancestors and the block itself.

    A block is a whole tree or subtrees below one segment, or a piece of a longer segment: at most `_most` tokens. So no
    mask is larger than a block times a path.

    Attributes:
        parts: The blocks, grouped by size.
        order: The index of each token's result in the concatenated results of all parts, [tokens].
    """

    parts: Sequence[Part]
    order: torch.Tensor

    @classmethod
    def of(cls, pack: Pack) -> Blocks:
        """Return a pack's layout."""
        parts = [_part(blocks) for blocks in _similar(_blocks(pack))]
        places = torch.cat([part.q.flatten() for part in parts])
        order = torch.empty(pack.tokens, dtype=torch.long)
        real = torch.nonzero(places >= 0)[:, 0]
        order[places[real]] = real
        return cls([attrs.evolve(part, q=part.q.clamp(min=0)) for part in parts], order)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float | None) -> torch.Tensor:
        """Return the attention's result, by torch's scaled_dot_product_attention.

        Args:
            q: Queries, [tokens, heads, size].
            k: Keys, [tokens, key heads, size].
            v: Values, with the shape of the keys.
            scaling: Factor of the products of queries and keys; None for 1 / sqrt(size).

        Returns:
            [tokens, heads, size].
        """
        n, heads, size = q.shape
        groups = heads // k.shape[1]
        flat = [x.reshape(n, -1) for x in (q, k, v)]
        found = []
        for part in self.parts:
            queries, keys, values = (
                # for rows that are used several times, the backward of embedding is faster than index_select's
                functional.embedding(index, x).view(*index.shape, -1, size).transpose(1, 2)
                for index, x in zip((part.q, part.k, part.k), flat, strict=True)
            )
            out = functional.scaled_dot_product_attention(
                queries,
                keys.repeat_interleave(groups, 1) if groups > 1 else keys,
                values.repeat_interleave(groups, 1) if groups > 1 else values,
                attn_mask=part.mask,
                is_causal=part.mask is None,
                scale=scaling,
            )
            found.append(out.transpose(1, 2).reshape(-1, heads * size))
        return functional.embedding(self.order, torch.cat(found)).view(n, heads, size)


Layout = Blocks | Levels
"""Which tokens of a pack each token attends to."""


@attrs.frozen(eq=False)
class _Block:
    """The tokens of queries and keys, and the keys that each query attends to, [queries, keys]; None for causal."""

    q: IntArray
    k: IntArray
    sees: BoolArray | None


def _blocks(pack: Pack) -> Iterator[_Block]:
    """Split a pack's tokens into blocks."""
    forest, spans = pack.forest, pack.spans()
    below: dict[int, int] = {}
    for index in reversed(pack.segments):  # children come after their parents
        a, b = spans[index]
        below[index] = below.get(index, 0) + b - a
        parent = forest.segments[index].parent
        if parent is not None:
            below[parent] = below.get(parent, 0) + below[index]
    held: list[int] = []
    size = 0

    def closed() -> Iterator[_Block]:
        if held:
            yield _subtrees(pack, spans, held)

    inside: set[int] = set()
    for index in pack.segments:
        parent = forest.segments[index].parent
        if parent in inside:
            inside.add(index)
            held.append(index)
            continue
        most = _most(forest.segments[index].start)
        if below[index] > most:  # too long together with its descendants: split it into pieces
            yield from closed()
            held, size, inside = [], 0, set()
            yield from _pieces(forest, spans, index)
            continue
        if held and (size + below[index] > most or parent is None or parent != forest.segments[held[0]].parent):
            yield from closed()
            held, size, inside = [], 0, set()
        held.append(index)
        inside.add(index)
        size += below[index]
    yield from closed()


def _most(before: int) -> int:
    """Return the most tokens of a block that begins at a position."""
    return min(max(before, LEAST), BLOCK)


def _pieces(forest: Forest, spans: Mapping[int, tuple[int, int]], index: int) -> Iterator[_Block]:
    """Split a long segment into pieces; a root attends to itself only, and needs no mask."""
    *above, own = (spans[i] for i in forest.path(index))
    prefix = _tokens(above)
    if not len(prefix):
        everything = np.arange(*own)
        yield _Block(everything, everything, None)
        return
    size = _most(len(prefix))
    for start in range(own[0], own[1], size):
        end = min(start + size, own[1])
        keys = np.concatenate([prefix, np.arange(own[0], end)])
        before = len(keys) - (end - start)
        sees = np.arange(len(keys))[None, :] <= before + np.arange(end - start)[:, None]
        yield _Block(np.arange(start, end), keys, sees)


def _subtrees(pack: Pack, spans: Mapping[int, tuple[int, int]], held: Sequence[int]) -> _Block:
    """Make a block of subtrees that have the same parent."""
    forest = pack.forest
    prefix = _tokens(spans[i] for i in forest.path(held[0])[:-1])
    first, last = spans[held[0]][0], spans[held[-1]][1]
    n = last - first
    sees, inside = np.zeros((n, n), dtype=bool), set(held)
    for index in held:
        a, b = (place - first for place in spans[index])
        parent = forest.segments[index].parent
        if parent is not None and parent in inside:
            end = spans[parent][1] - first
            sees[a:b] = sees[end - 1]
        sees[a:b, a:b] |= np.tri(b - a, dtype=bool)
    keys = np.concatenate([prefix, np.arange(first, last)])
    return _Block(np.arange(first, last), keys, np.concatenate([np.ones((n, len(prefix)), dtype=bool), sees], 1))


def _similar(blocks: Iterable[_Block]) -> Iterator[list[_Block]]:
    """Group blocks of similar size, so that there is little padding."""
    held: list[_Block] = []
    used = 0
    for block in sorted(blocks, key=lambda b: (b.sees is None, len(b.k), len(b.q))):
        area = len(block.q) * len(block.k)
        both = [*held, block]
        padded = len(both) * max(len(b.q) for b in both) * max(len(b.k) for b in both)
        if held and (block.sees is None or padded > AREA or padded > PADDING * (used + area)):
            yield held
            held, used, both = [], 0, [block]
        held = both
        used += area
    if held:
        yield held


def _part(blocks: Sequence[_Block]) -> Part:
    queries, keys = max(len(b.q) for b in blocks), max(len(b.k) for b in blocks)
    q = np.full((len(blocks), queries), -1)
    k = np.zeros((len(blocks), keys), dtype=np.int64)
    if blocks[0].sees is None:
        return Part(torch.from_numpy(blocks[0].q[None]), torch.from_numpy(blocks[0].k[None]), None)
    mask = np.zeros((len(blocks), 1, queries, keys), dtype=bool)
    mask[..., 0] = True  # a padded query needs at least one key; its result is not used
    for i, block in enumerate(blocks):
        q[i, : len(block.q)], k[i, : len(block.k)] = block.q, block.k
        mask[i, 0, : len(block.q), : len(block.k)] = block.sees
    return Part(torch.from_numpy(q), torch.from_numpy(k), torch.from_numpy(mask))


def _tokens(spans: Iterable[tuple[int, int]]) -> IntArray:
    """Return the concatenated tokens of some spans."""
    return np.concatenate([np.zeros(0, dtype=np.int64), *(np.arange(a, b) for a, b in spans)])
