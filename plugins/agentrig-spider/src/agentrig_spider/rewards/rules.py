"""The errors, and the interface of a mode, shared by both modes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Protocol

import attrs

from agentrig_spider.rewards.golds import Gold
from agentrig_spider.sandbox import Fetched

Run = Callable[[str, int], Fetched]
"""`run(sql, max_rows)` on one database; raises what `execution.run_query` raises."""


class Unsound(Exception):
    """The data or the machine failed, not the prediction; the message says what."""


class Refused(Exception):
    """The prediction is not a valid answer, whatever it returns; the message says why."""


@attrs.frozen
class Query:
    """A query as parsed by a mode.

    Attributes:
        text: The SQL to run.
        ordered: Whether the order of its rows matters.
    """

    text: str
    ordered: bool = False


@attrs.frozen
class Difference:
    """Why a prediction is wrong.

    Attributes:
        kind: `columns`, `rows`, `empty`, `order`, `values` or `tables`.
        words: One sentence.
    """

    kind: str
    words: str


def _rows(n: int) -> str:
    return "1 row" if n == 1 else f"{n} rows"


def difference_of(gold: Fetched, predicted: Fetched) -> Difference:
    """Return how two results that do not match differ, the plainest difference first."""
    if gold.columns != predicted.columns:
        return Difference("columns", f"the prediction has {predicted.columns} columns, the gold query {gold.columns}")
    wanted, found = len(gold.rows), len(predicted.rows)
    if not found:
        return Difference("empty", f"the prediction returns no row, the gold query returns {_rows(wanted)}")
    if wanted != found:
        more = "more than " if found > wanted else ""  # no further row was fetched
        return Difference(
            "rows",
            f"the prediction returns {more}{_rows(min(wanted, found))}, the gold query {wanted}",
        )
    if Counter(map(repr, gold.rows)) == Counter(map(repr, predicted.rows)):
        return Difference("order", "the rows are those of the gold query in another order")
    return Difference("values", "the prediction returns other values than the gold query")


class Rules(Protocol):
    """The interface of a mode."""

    def read_gold(self, sql: str) -> Query:
        """Read a gold query.

        Raises:
            Unsound: It is not a valid gold query.
        """
        ...

    def read_prediction(self, sql: str) -> str:
        """Return the query to run for a prediction.

        Raises:
            Refused: It is not a valid answer.
        """
        ...

    def run_gold(self, query: Query, run: Run, max_rows: int) -> Gold:
        """Run a gold query on one database."""
        ...

    def difference(self, query: Query, gold: Gold, predicted: Fetched, deadline: float) -> Difference | None:
        """Return how the results differ; None if they match.

        Raises:
            matching.OutOfTime: The deadline passed first.
        """
        ...
