"""Generated schemas, rows and queries, judged by `ExecMatch` and by a separate slow implementation.

The slow one searches all permutations of columns, sorts nothing by signature, pools and caches nothing,
opens the file for each query, and drops DISTINCT with sqlparse.
"""

from __future__ import annotations

import itertools
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest
from agentrig_spider import ExecMatch
from agentrig_spider.rewards.matching import same_result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlite_files import sqlite_file

Row = tuple[Any, ...]


def slow_same(gold: list[Row], predicted: list[Row], ordered: bool) -> bool:
    """Decide by the definition: both empty, or equal under some permutation and the quick reject."""
    if not gold and not predicted:
        return True
    if len(gold) != len(predicted) or not gold or len(gold[0]) != len(predicted[0]):
        return False

    def by_text(row: Row) -> Row:
        return tuple(sorted(row, key=lambda cell: str(cell) + str(type(cell))))

    first, second = [by_text(row) for row in gold], [by_text(row) for row in predicted]
    if ordered and first != second:
        return False
    if not ordered and {*first} != {*second}:
        return False
    for order in itertools.permutations(range(len(gold[0]))):
        moved = [tuple(row[index] for index in order) for row in predicted]
        if ordered and moved == gold:
            return True
        if not ordered and bag_equal(moved, gold):
            return True
    return False


def bag_equal(left: list[Row], right: list[Row]) -> bool:
    rest = list(right)
    for row in left:
        if row not in rest:
            return False
        rest.remove(row)
    return not rest


@pytest.mark.alone
def test_dozens_of_equal_columns_take_no_time() -> None:
    gold = [tuple([index % 3] * 60) for index in range(40)]
    other = [(*row[:-1], row[-1] + 1) for row in gold]
    start = time.monotonic()
    assert same_result(gold, gold[::-1], ordered=False, deadline=start + 5)
    assert not same_result(gold, other, ordered=False, deadline=start + 5)
    assert not same_result(gold, other, ordered=True, deadline=start + 5)
    assert time.monotonic() - start < 0.5


def test_columns_that_only_their_rows_distinguish() -> None:
    # All columns have the same bag of values; only their rows distinguish them.
    gold = [tuple((value >> column) & 1 for column in range(12)) for value in range(1, 4096, 7)]
    order = [3, 11, 0, 7, 5, 1, 9, 2, 10, 4, 8, 6]
    moved = [tuple(row[column] for column in order) for row in reversed(gold)]
    start = time.monotonic()
    assert same_result(gold, moved, ordered=False, deadline=start + 5)
    moved[5] = tuple(1 - cell for cell in moved[5])
    assert not same_result(gold, moved, ordered=False, deadline=start + 5)


# ---------------------------------------------------------------- queries

COLUMNS = {"t": ["a", "b", "c"], "u": ["a", "d"]}
NUMBERS = st.one_of(st.none(), st.integers(0, 3), st.sampled_from([0.5, 1.0, 2.0]))
TEXTS = st.one_of(st.none(), st.sampled_from(["x", "y", "order by", "a > = b", "a >= b", "distinct", "1"]))


@st.composite
def databases(draw: st.DrawFn) -> dict[str, list[Row]]:
    return {
        "t": draw(st.lists(st.tuples(NUMBERS, NUMBERS, TEXTS), max_size=6)),
        "u": draw(st.lists(st.tuples(NUMBERS, TEXTS), max_size=4)),
    }


@st.composite
def queries(draw: st.DrawFn) -> str:
    """Draw a query like Spider's, which may hit the official evaluator's quirks."""
    joined = draw(st.booleans())
    columns = [f"{table}.{name}" for table in ("t", "u") if table == "t" or joined for name in COLUMNS[table]]
    column = st.sampled_from(columns)
    text = st.sampled_from(["'x'", '"y"', "'order by'", "'a > = b'", "'a >= b'", "'distinct'", "1", "2", "NULL"])
    condition = st.builds(
        "{} {} {}".format, column, st.sampled_from(["=", "> =", "< =", "! =", ">", "LIKE", "IS NOT"]), text
    )
    item = st.one_of(
        column,
        st.builds("{}({})".format, st.sampled_from(["count", "max", "sum", "avg", "min"]), column),
        st.builds("count(DISTINCT {})".format, column),
        st.just("count(*)"),
    )
    items = draw(st.lists(draw(st.sampled_from([item, column])), min_size=1, max_size=4))
    sql = f"SELECT {draw(st.sampled_from(['', 'DISTINCT ', 'distinct ']))}{', '.join(items)} FROM t"
    if joined:
        sql += f" {draw(st.sampled_from(['JOIN', 'LEFT JOIN']))} u ON t.a = u.a"
    if draw(st.booleans()):
        sql += f" WHERE {draw(condition)}"
        if draw(st.booleans()):
            sql += f" {draw(st.sampled_from(['AND', 'OR']))} {draw(condition)}"
    if draw(st.booleans()):
        sql += f" GROUP BY {draw(column)}"
    if draw(st.integers(0, 4)) == 0:
        sql += (
            f" UNION SELECT {', '.join(draw(st.lists(st.just('a'), min_size=len(items), max_size=len(items))))} FROM u"
        )
    elif draw(st.booleans()):
        order = draw(st.sampled_from(["ORDER BY", "order  by", "ORDER\nBY"]))
        sql += f" {order} {draw(column)}{draw(st.sampled_from(['', ' DESC']))}"
        if draw(st.booleans()):
            sql += f" LIMIT {draw(st.integers(1, 3))}"
    return sql + draw(st.sampled_from(["", "", ";", "; SELECT 1", " -- x", "; DROP TABLE t"]))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[str, str]:
    """Draw a gold query and a prediction: equal, almost equal, or different."""
    gold = draw(queries())
    kind = draw(st.sampled_from(["same", "near", "other"]))
    if kind == "same":
        return gold, draw(st.sampled_from([gold + " ", gold.replace("SELECT", "select"), "/* x */" + gold]))
    if kind == "near":
        swaps = [
            ("DISTINCT", ""),
            ("ORDER BY", "GROUP BY"),
            ("JOIN", "LEFT JOIN"),
            ("> =", ">="),
            ("'", '"'),
            ("a", "b"),
        ]
        old, new = draw(st.sampled_from(swaps))
        return gold, gold.replace(old, new, draw(st.integers(1, 3)))
    return gold, draw(queries())


def slow_verdict(predicted: str, gold: str, path: Path) -> int | None:
    """Judge by the official steps, one by one; None if the gold query fails."""
    import sqlparse

    def prepared(sql: str) -> str:
        for loose, tight in (("> =", ">="), ("< =", "<="), ("! =", "!=")):
            sql = sql.replace(loose, tight)
        leaves = sqlparse.parse(sql)[0].flatten()
        return "".join(leaf.value for leaf in leaves if leaf.value.lower() != "distinct")

    def run(sql: str) -> list[Row] | None:
        connection = sqlite3.connect(path)
        try:
            return connection.execute(sql).fetchall()
        except Exception:
            return None
        finally:
            connection.close()

    wanted, found = run(prepared(gold)), run(prepared(predicted))
    if wanted is None:
        return None
    return int(found is not None and slow_same(wanted, found, "order by" in prepared(gold).lower()))


@pytest.mark.slow
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=databases(), pair=pairs())
def test_verdicts_agree_with_a_slow_implementation(
    tmp_path_factory: pytest.TempPathFactory, rows: dict[str, list[Row]], pair: tuple[str, str]
) -> None:
    schema = "CREATE TABLE t (a, b, c); CREATE TABLE u (a, d)"
    path = sqlite_file(tmp_path_factory.mktemp("db") / "x.sqlite", schema, **rows)
    gold, predicted = pair
    expected = slow_verdict(predicted, gold, path)
    score = MATCH.score(predicted, gold, path)
    assert score.status == ("invalid" if expected is None else "ok"), score
    assert score.value == expected, score


MATCH = ExecMatch()
