"""Compares two results, in polynomial time except for contrived ones.

Both results are lists of tuples as `sqlite3` returns them: cells are None, int, float, str or bytes.
Equality of cells is Python's (1 == 1.0, 1 != '1').
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

Row = tuple[Any, ...]


class OutOfTime(Exception):
    """The search for a column permutation exceeded its time limit."""


def same_result(gold: Sequence[Row], predicted: Sequence[Row], *, ordered: bool, deadline: float) -> bool:
    """Return whether two results are the same for the official evaluator.

    Two empty results are the same, whatever their columns. Otherwise some permutation of the columns
    must make the multisets of rows (the lists, if `ordered`) equal, and they must pass the official
    quick-reject step.

    Raises:
        OutOfTime: The deadline, a time of `time.monotonic()`, passed first.
    """
    if len(gold) != len(predicted):
        return False
    if not gold:
        return True
    width = len(gold[0])
    if len(predicted[0]) != width:
        return False
    if width == 1:
        return gold == predicted or (not ordered and Counter(gold) == Counter(predicted))
    if gold == predicted and repr(gold) == repr(predicted):
        return True
    if not permutable(gold, predicted, ordered=ordered, deadline=deadline):
        return False
    # Without numbers that are equal but print differently (1 and 1.0, 0.0 and -0.0) the quick-reject
    # step follows from the permutation.
    floats = any(type(cell) is float for rows in (gold, predicted) for row in rows for cell in row)
    return not floats or quick_reject_passes(gold, predicted, ordered=ordered)


def quick_reject_passes(gold: Sequence[Row], predicted: Sequence[Row], *, ordered: bool) -> bool:
    """Apply the official quick-reject step: rows sorted by the cells' string forms must agree.

    It is meant as a shortcut that never changes the result, but it does: 1 and 1.0 are equal cells
    with different string forms, so results that differ only in this can fail here.
    """

    def sort_key(cell: Any) -> str:
        return f"{cell}{type(cell)}"

    first = [tuple(sorted(row, key=sort_key)) for row in gold]
    second = [tuple(sorted(row, key=sort_key)) for row in predicted]
    return first == second if ordered else set(first) == set(second)


def permutable(
    gold: Sequence[Sequence[Hashable]], predicted: Sequence[Sequence[Hashable]], *, ordered: bool, deadline: float
) -> bool:
    """Return whether some permutation of the predicted columns makes the rows equal.

    There are as many of both, at least one, and all have one width. Not `ordered`, they are compared as multisets.

    Raises:
        OutOfTime: The deadline, a time of `time.monotonic()`, passed first.
    """
    gold_columns = list(zip(*gold, strict=True))
    predicted_columns = list(zip(*predicted, strict=True))
    if Counter(gold_columns) == Counter(predicted_columns):
        return True
    if ordered:
        return False
    gold_signatures = [_signature(column) for column in gold_columns]
    predicted_signatures = [_signature(column) for column in predicted_columns]
    classes = Counter(gold_signatures)
    if classes != Counter(predicted_signatures):
        return False
    if Counter(map(tuple, gold)) == Counter(map(tuple, predicted)):
        return True
    # Columns with unique values come first: they have one candidate, and tell all rows apart.
    order = sorted(range(len(gold_columns)), key=lambda index: classes[gold_signatures[index]])
    candidates = [
        [other for other, signature in enumerate(predicted_signatures) if signature == gold_signatures[index]]
        for index in order
    ]
    start = [0] * len(gold)
    return _assign([gold_columns[index] for index in order], candidates, predicted_columns, start, start, deadline)


def arrangeable(
    gold: Sequence[Sequence[Hashable]],
    predicted: Sequence[Sequence[Hashable]],
    gold_groups: Sequence[int],
    predicted_groups: Sequence[int],
    *,
    deadline: float,
) -> bool:
    """Return whether under some permutation of columns each group's predicted rows are among the gold's.

    Args:
        gold: Rows, at least one; all of one width.
        predicted: Rows of the same width, at most as many.
        gold_groups: The group of each gold row.
        predicted_groups: The group of each predicted row.
        deadline: `time.monotonic()` at which to give up.

    Raises:
        OutOfTime: The deadline passed first.
    """
    gold_columns = list(zip(*gold, strict=True))
    predicted_columns = list(zip(*predicted, strict=True))
    start, predicted_start = list(gold_groups), list(predicted_groups)
    candidates = []
    for column in gold_columns:
        if time.monotonic() > deadline:
            raise OutOfTime
        fitting = [
            index
            for index, other in enumerate(predicted_columns)
            if _extend(start, column, predicted_start, other) is not None
        ]
        if not fitting:
            return False
        candidates.append(fitting)
    order = sorted(range(len(gold_columns)), key=lambda index: len(candidates[index]))
    return _assign(
        [gold_columns[index] for index in order],
        [candidates[index] for index in order],
        predicted_columns,
        start,
        predicted_start,
        deadline,
    )


def _signature(column: Sequence[Hashable]) -> Hashable:
    """Return the multiset of a column's values, which no permutation of rows changes."""
    return frozenset(Counter(column).items())


def _assign(
    gold_columns: list[tuple[Hashable, ...]],
    candidates: list[list[int]],
    predicted_columns: list[tuple[Hashable, ...]],
    gold_classes: list[int],
    predicted_classes: list[int],
    deadline: float,
) -> bool:
    """Give each gold column one of its candidates, depth first, as long as the partial rows agree.

    A row's class represents its cells in the columns assigned so far; a candidate fits if the multiset
    of the prediction's (class, cell) pairs is within the gold's. Of candidates that are equal cell by
    cell only one is tried, so that dozens of identical columns are not permuted.
    """
    # A stack of generators instead of recursion: results may have 2000 columns.
    depth, used = 0, set[int]()
    stack: list[tuple[list[int], list[int], list[int], set[tuple[Hashable, ...]]]] = []
    stack.append((list(candidates[0]), gold_classes, predicted_classes, set()))
    chosen: list[int] = []
    while stack:
        if time.monotonic() > deadline:
            raise OutOfTime
        left, gold_now, predicted_now, tried = stack[-1]
        depth = len(stack) - 1
        if len(chosen) > depth:
            used.discard(chosen.pop())
        extended = None
        while left and extended is None:
            other = left.pop(0)
            column = predicted_columns[other]
            if other in used or column in tried:
                continue
            tried.add(column)
            extended = _extend(gold_now, gold_columns[depth], predicted_now, column)
            if extended is not None:
                chosen.append(other)
                used.add(other)
        if extended is None:
            stack.pop()
        elif depth + 1 == len(gold_columns):
            return True
        else:
            stack.append((list(candidates[depth + 1]), *extended, set()))
    return False


def _extend(
    gold_classes: list[int],
    gold_column: Sequence[Hashable],
    predicted_classes: list[int],
    predicted_column: Sequence[Hashable],
) -> tuple[list[int], list[int]] | None:
    """Return the finer row classes after one more column; None where the gold lacks a predicted one."""
    names: dict[Hashable, int] = {}
    gold_next = [names.setdefault(pair, len(names)) for pair in zip(gold_classes, gold_column, strict=True)]
    predicted_next = []
    for pair in zip(predicted_classes, predicted_column, strict=True):
        name = names.get(pair)
        if name is None:
            return None
        predicted_next.append(name)
    wanted, found = Counter(gold_next), Counter(predicted_next)
    if wanted != found if len(gold_next) == len(predicted_next) else not found <= wanted:
        return None
    return gold_next, predicted_next
