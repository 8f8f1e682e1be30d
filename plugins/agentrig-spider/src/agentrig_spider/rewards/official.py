"""Mode `official`: the verdicts of Spider's official evaluator in its default settings."""

from __future__ import annotations

from agentrig_spider.rewards.golds import Gold
from agentrig_spider.rewards.lexing import TooLong, official_text, order_matters
from agentrig_spider.rewards.matching import same_result
from agentrig_spider.rewards.rules import Difference, Query, Refused, Run, Unsound, difference_of
from agentrig_spider.sandbox import Fetched


class Official:
    """The rules of the official evaluator."""

    def __init__(self, *, keep_distinct: bool = False) -> None:
        self._keep_distinct = keep_distinct

    def read_gold(self, sql: str) -> Query:
        """Keep the first statement without DISTINCT; the order matters if `order by` is anywhere in it."""
        try:
            text = official_text(sql, keep_distinct=self._keep_distinct)
        except TooLong as error:
            raise Unsound(f"the gold query: {error}") from None
        if text is None:
            raise Unsound("the gold query is empty")
        return Query(text, order_matters(text))

    def read_prediction(self, sql: str) -> str:
        """Keep the first statement without DISTINCT."""
        try:
            text = official_text(sql, keep_distinct=self._keep_distinct)
        except TooLong as error:
            raise Refused(str(error)) from None
        if text is None:
            raise Refused("the prediction is empty")
        return text

    def run_gold(self, query: Query, run: Run, max_rows: int) -> Gold:
        """Run it unchanged."""
        return Gold(fetched=run(query.text, max_rows))

    def difference(self, query: Query, gold: Gold, predicted: Fetched, deadline: float) -> Difference | None:
        """Compare multisets, or lists if the order matters, for any order of columns."""
        assert gold.fetched is not None
        same = same_result(gold.fetched.rows, predicted.rows, ordered=query.ordered, deadline=deadline)
        return None if same else difference_of(gold.fetched, predicted)
