"""Mode `strict`: a single SELECT, compared by the meaning of its gold query instead of its text."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import attrs

from agentrig_spider.rewards.golds import Gold, Ties
from agentrig_spider.rewards.matching import arrangeable
from agentrig_spider.rewards.rules import Difference, Query, Refused, Run, Unsound, difference_of
from agentrig_spider.rewards.sql import NotAQuery, Select, Token, read_select
from agentrig_spider.sandbox import Fetched, QueryFailed, Row

RELATIVE_TOLERANCE = 1e-9
"""Relative tolerance of two numbers of which at least one is a float."""

MAX_TIED_ROWS = 100_000
"""Most rows of a gold without its LIMIT that are fetched to find tied rows."""


@attrs.frozen
class StrictQuery(Query):
    """A gold query with its structure."""

    select: Select | None = None


class Strict:
    """The rules that correct the official evaluator's weaknesses; `docs/exec-match.md` lists them."""

    def read_gold(self, sql: str) -> Query:
        """Read a single SELECT; the order matters if its outermost query has ORDER BY."""
        try:
            select = read_select(sql)
        except NotAQuery as error:
            raise Unsound(f"the gold query is not a single SELECT: {error}") from None
        return StrictQuery(select.text, bool(select.order), select)

    def read_prediction(self, sql: str) -> str:
        """Read a single SELECT."""
        try:
            return read_select(sql).text
        except NotAQuery as error:
            raise Refused(f"the prediction is not a single SELECT: {error}") from None

    def run_gold(self, query: Query, run: Run, max_rows: int) -> Gold:
        """Run it, and run it again with the sort keys, to find tied rows."""
        fetched = run(query.text, max_rows)
        assert isinstance(query, StrictQuery)
        assert query.select is not None
        ties = _ties(query.select, fetched, run) if query.ordered and fetched.rows else None
        return Gold(fetched=fetched, ties=ties)

    def difference(self, query: Query, gold: Gold, predicted: Fetched, deadline: float) -> Difference | None:
        """Compare columns, tables read and rows; tied rows may come in any order."""
        wanted = gold.fetched
        assert wanted is not None
        if wanted.tables and not wanted.tables & predicted.tables:
            return Difference("tables", "the prediction reads no table of the gold query")
        if wanted.columns != predicted.columns or len(wanted.rows) != len(predicted.rows):
            return difference_of(wanted, predicted)
        if wanted.rows == predicted.rows:
            return None
        if gold.ties is None:
            rows: Sequence[Row] = wanted.rows
            groups = predicted_groups = [0] * len(rows)
        else:
            rows, groups = gold.ties.rows, list(gold.ties.groups)
            predicted_groups = groups[gold.ties.offset : gold.ties.offset + len(predicted.rows)]
        gold_rows, predicted_rows = _rounded(rows, predicted.rows)
        same = arrangeable(gold_rows, predicted_rows, groups, predicted_groups, deadline=deadline)
        return None if same else difference_of(wanted, predicted)


def _ties(select: Select, fetched: Fetched, run: Run) -> Ties:
    """Return the gold's rows without its LIMIT, grouped by equal sort keys.

    The sort keys that are result columns are read from the rows; for the others one column is added,
    their `dense_rank()`. If that is impossible (DISTINCT or compound queries that sort by something
    else, an OFFSET that is not a number), only the gold's own order is correct.
    """
    exact = Ties(rows=fetched.rows, groups=range(len(fetched.rows)), offset=0)
    offset = _offset(select)
    columns: list[int] = []
    expressions: list[str] = []
    for term, text in zip(select.order, select.order_texts, strict=True):
        column = _result_column(select, fetched, term)
        if column is not None:
            columns.append(column)
        else:
            expressions.append(text)
    if offset is None or (expressions and (select.compound or select.distinct)):
        return exact
    text = select.text[: select.order_end]
    if expressions:
        rank = f", dense_rank() OVER (ORDER BY {', '.join(expressions)}) "
        text = text[: select.items_end] + rank + text[select.items_end :]
    try:
        keyed = run(text, MAX_TIED_ROWS + 1)
    except QueryFailed:
        return exact
    width = fetched.columns
    if len(keyed.rows) > MAX_TIED_ROWS or len(keyed.rows) < offset + len(fetched.rows):
        return exact
    groups: list[int] = []
    last: Any = None
    for row in keyed.rows:
        key = (*(row[column] for column in columns), *row[width:])
        groups.append(groups[-1] + (key != last) if groups else 0)
        last = key
    ties = Ties(rows=[row[:width] for row in keyed.rows], groups=groups, offset=offset)
    # A query with another plan may return other rows (bare columns of a GROUP BY); then its result is not used.
    own = Counter(zip(groups[offset:], fetched.rows, strict=False))
    return ties if own <= Counter(zip(groups, ties.rows, strict=True)) else exact


def _offset(select: Select) -> int | None:
    """Return how many rows LIMIT skips; None if that is not a plain number."""
    behind = [token for token in select.tokens if token.start >= select.order_end and token.depth == 0]
    texts = [token.text for token in behind]
    if "OFFSET" not in texts and "," not in texts:
        return 0
    at = texts.index("OFFSET") + 1 if "OFFSET" in texts else 1
    number = texts[at : at + 1 if "OFFSET" in texts else texts.index(",")]
    return int(number[0]) if len(number) == 1 and number[0].isdecimal() else None


def _result_column(select: Select, fetched: Fetched, term: Sequence[Token]) -> int | None:
    """Return the result column of an ORDER BY term, or None."""
    if len(term) == 1:
        token = term[0]
        if token.kind == "number" and token.text.isdecimal():
            index = int(token.text) - 1
            return index if index < fetched.columns else None
        name = token.text[1:-1] if token.kind == "quoted" else token.text
        names = [other.upper() for other in fetched.names]
        if token.kind in ("quoted", "word") and names.count(name.upper()) == 1:
            return names.index(name.upper())
    if select.items is not None:
        wanted = [token.text for token in term]
        for index, item in enumerate(select.items):
            if [token.text for token in item] == wanted:
                return index
    return None


def _rounded(gold: Sequence[Row], predicted: Sequence[Row]) -> tuple[Sequence[Row], Sequence[Row]]:
    """Return both with numbers that are equal within the tolerance replaced by one of them.

    Different whole numbers are never equal, whatever their size; a float is compared with its neighbours
    among all numbers of both results.
    """
    numbers = {cell: type(cell) for rows in (gold, predicted) for row in rows for cell in row if type(cell) is float}
    if not numbers:
        return gold, predicted
    for rows in (gold, predicted):
        for row in rows:
            for cell in row:
                if type(cell) is int:
                    numbers.setdefault(cell, int)
    names: dict[float, float] = {}
    last: float | None = None
    for number in sorted(numbers):
        close = last is not None and math.isclose(last, number, rel_tol=RELATIVE_TOLERANCE)
        if close and last is not None and float in (numbers[last], numbers[number]):
            names[number] = names[last]
        else:
            names[number] = number
        last = number

    def renamed(rows: Sequence[Row]) -> list[Row]:
        return [tuple(names[cell] if type(cell) in (int, float) else cell for cell in row) for row in rows]

    return renamed(gold), renamed(predicted)
