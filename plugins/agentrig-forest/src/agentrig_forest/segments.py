"""Forests of token segments: a prefix that several samples have in common is computed once.

A sample's input is its prompt and its response without the last token, which is only a target. Inputs share their
common prefix, at any depth: a group's prompt, the history of a conversation, the common start of two different
prompts. The result is a forest of radix trees: each segment continues its parent, and a path from a root gives a
sample's input. Shared tokens have the same hidden states in a causal model, so this is exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Protocol

import attrs
import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]


class Sample(Protocol):
    """A prompt and its response to train on (an `agentrig.Triplet` is one)."""

    @property
    def prompt_ids(self) -> Sequence[int]:
        """Token ids of the prompt, at least one."""

    @property
    def response_ids(self) -> Sequence[int]:
        """Token ids of the response, at least one."""


@attrs.frozen(eq=False)
class Segment:
    """Tokens that follow a parent segment's last token.

    Attributes:
        tokens: Token ids, at least one.
        start: Position of the first token, counted from the root's.
        parent: Index of the parent in the forest; None for a root.
        ends: The samples whose input ends with this segment's last token.
    """

    tokens: Tokens
    start: int
    parent: int | None
    ends: tuple[int, ...]

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.start + len(self.tokens)


@attrs.frozen(eq=False)
class Forest:
    """The segments of some samples: parents before children, and the segments of a tree next to each other.

    Attributes:
        segments: The segments in depth-first order.
        samples: The samples of the forest; `Segment.ends` indexes them.
    """

    segments: Sequence[Segment]
    samples: Sequence[Sample]

    @property
    def tokens(self) -> int:
        """Number of tokens to compute if no segment is computed twice."""
        return sum(len(s.tokens) for s in self.segments)

    def path(self, index: int) -> list[int]:
        """Return a segment's ancestors from the root down, and the segment itself."""
        found: list[int] = []
        at: int | None = index
        while at is not None:
            found.append(at)
            at = self.segments[at].parent
        return found[::-1]


def grow(samples: Sequence[Sample], *, share: bool = True) -> Forest:
    """Build the forest of some samples; without `share`, each gets a tree of its own."""
    for i, sample in enumerate(samples):
        if not sample.prompt_ids or not sample.response_ids:
            sizes = f"{len(sample.prompt_ids)} prompt and {len(sample.response_ids)} response tokens"
            raise ValueError(f"sample {i} has {sizes}")
    inputs = [np.fromiter((*s.prompt_ids, *s.response_ids[:-1]), np.int32) for s in samples]
    if not share:
        return Forest([Segment(tokens, 0, None, (i,)) for i, tokens in enumerate(inputs)], samples)
    # Big-endian bytes have the same order as the lists of numbers that they encode.
    order = sorted(range(len(inputs)), key=lambda i: inputs[i].astype(">u4").tobytes())
    common = np.array([0, *(_common(inputs[a], inputs[b]) for a, b in pairwise(order))])
    segments: list[Segment] = []
    todo: list[tuple[int, int, int, int | None]] = [
        (low, high, 0, None) for low, high in reversed(_split(common, 0, len(order), 0))
    ]
    while todo:
        low, high, start, parent = todo.pop()
        first = inputs[order[low]]
        end = len(first) if high - low == 1 else int(min(common[low + 1 : high].min(), len(first)))
        # Sorted: inputs that end here come first.
        rest = low
        while rest < high and len(inputs[order[rest]]) == end:
            rest += 1
        segments.append(Segment(first[start:end], start, parent, tuple(order[low:rest])))
        here = len(segments) - 1
        todo += [(a, b, end, here) for a, b in reversed(_split(common, rest, high, end))]
    return Forest(segments, samples)


def _common(a: Tokens, b: Tokens) -> int:
    """Return the length of the common prefix of two inputs."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n


def _split(common: npt.NDArray[np.int64], low: int, high: int, depth: int) -> list[tuple[int, int]]:
    """Split sorted inputs whose first `depth` tokens agree, by their next token."""
    if low >= high:
        return []
    cuts = [low, *(low + 1 + np.flatnonzero(common[low + 1 : high] <= depth)).tolist(), high]
    return list(pairwise(cuts))


@attrs.frozen(eq=False)
class Pack:
    """Segments that are computed in one forward pass, each after its parent.

    Attributes:
        forest: The forest of the segments.
        segments: Indices into its segments, ascending.
        scored: The segments whose `ends` are scored in this pass; an ancestor can be in several packs.
    """

    forest: Forest
    segments: Sequence[int]
    scored: frozenset[int]

    @property
    def tokens(self) -> int:
        """Number of tokens of the pass."""
        return sum(len(self.forest.segments[i].tokens) for i in self.segments)

    def samples(self) -> list[int]:
        """Return the samples that are scored in this pass."""
        return [i for index in self.segments if index in self.scored for i in self.forest.segments[index].ends]

    def spans(self) -> dict[int, tuple[int, int]]:
        """Return the start and end of each segment's tokens in the pack."""
        ends = np.cumsum([len(self.forest.segments[i].tokens) for i in self.segments]).tolist()
        return dict(zip(self.segments, zip([0, *ends[:-1]], ends, strict=True), strict=True))


def packs(forest: Forest, budget: int) -> Iterator[Pack]:
    """Split a forest into packs of at most `budget` tokens.

    Only a tree that is larger than the budget is cut: the segments above the cut are computed in both packs. The
    others, and the pieces, are put where they fit, the largest first. A single path that is longer than the budget
    becomes a separate pack. The packs have the order of the forest.
    """
    parts = [part for tree in _trees(forest) for part in _pieces(forest, tree, budget)]
    found: list[list[_Piece]] = []
    free: list[int] = []
    for part in sorted(parts, key=lambda part: -part.tokens):
        place = next((i for i, left in enumerate(free) if part.tokens <= left), len(free))
        if place == len(free):
            found.append([])
            free.append(budget)
        found[place].append(part)
        free[place] -= part.tokens
    for together in sorted(found, key=lambda pieces: min(min(piece.scored) for piece in pieces)):
        held = set[int]().union(*(piece.held for piece in together))
        yield Pack(forest, sorted(held), frozenset[int]().union(*(piece.scored for piece in together)))


@attrs.frozen(eq=False)
class _Piece:
    """Segments of a tree with their ancestors, those of them that are scored, and the tokens of all."""

    held: set[int]
    scored: set[int]
    tokens: int


def _trees(forest: Forest) -> Iterator[range]:
    """Return the segments of each tree."""
    starts = [i for i, segment in enumerate(forest.segments) if segment.parent is None]
    return (range(a, b) for a, b in pairwise([*starts, len(forest.segments)]))


def _pieces(forest: Forest, tree: range, budget: int) -> Iterator[_Piece]:
    """Cut a tree into pieces of at most `budget` tokens, if it has more."""
    held: set[int] = set()
    scored: set[int] = set()
    tokens = 0
    for index in tree:
        segment = forest.segments[index]
        if not segment.ends:
            continue  # computed with its first descendant that is scored
        path = forest.path(index)
        more = sum(len(forest.segments[i].tokens) for i in path if i not in held)
        if scored and tokens + more > budget:
            yield _Piece(held, scored, tokens)
            held, scored, tokens, more = set(), set(), 0, segment.end
        held.update(path)
        scored.add(index)
        tokens += more
    yield _Piece(held, scored, tokens)


def rows(forest: Forest, budget: int) -> Iterator[Pack]:
    """Split a forest without sharing, sorted by length, into packs of at most `budget` tokens with padding.

    A row that is longer than the budget becomes a separate pack.
    """
    held: list[int] = []
    longest = 0
    for index in sorted(range(len(forest.segments)), key=lambda i: -forest.segments[i].end):
        if held and (len(held) + 1) * longest > budget:
            yield Pack(forest, held, frozenset(held))
            held = []
        longest = longest if held else forest.segments[index].end
        held.append(index)
    if held:
        yield Pack(forest, held, frozenset(held))
