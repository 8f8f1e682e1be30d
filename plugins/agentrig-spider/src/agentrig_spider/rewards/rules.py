"""The errors, and the interface of a mode, shared by both modes."""

from __future__ import annotations

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

    def difference(self, query: Query, gold: Gold, predicted: Fetched, deadline: float) -> str:
        """Return how the results differ; empty if they match.

        Raises:
            matching.OutOfTime: The deadline passed first.
        """
        ...
