"""The text that is run, compared with sqlparse, whose tokens the official evaluator uses."""

from __future__ import annotations

import re
import warnings

import pytest
import sqlparse
from agentrig_spider.rewards.lexing import MAX_LEXED, TooLong, official_text
from hypothesis import given, settings
from hypothesis import strategies as st

PIECES = [
    *"()[];,.*'\"`\\$#@%?:-+/|<>=~!&^ \t\n\r\xa0é¨\u00b4İ\u017fK_",
    *("distinct", "DISTINCT", "DiStInCt", "distinctrow", "xdistinct", "distinct1", "T1.distinct", "distinct("),
    *("--", "/*", "*/", "# ", "--+", "/*+", "''", '""', "\\'", '\\"', "$$", "$a$", "%s", "%(x)s", ":=", "::", "->>"),
    *("begin", "BEGIN", "end", "END IF", "end loop", "case", "CASE", "if", "loop", "for", "while", "do", "declare"),
    *("create", "CREATE OR REPLACE", "transaction", "immediate", "work", "GO", "go", "GO 2", "GO;"),
    *("select", "from", "AS", "in(", "values", "order by", "group  by", "not null", "union all", "left join"),
    *("1", "15", "1.5", "1.", ".5", "1e5", "1.5E-3", "0x1d", "-3", "5distinct", "1e5distinct", "0xdistinct"),
    *("> =", "< =", "! =", "at time zone 'x'", "[a b]", "a[1]", ":p", "$p", "?1", "@v", "##t", "x y", "é", "band"),
]


def reference(sql: str) -> str | None:
    """Do what the official evaluator does, with sqlparse."""
    for loose, tight in (("> =", ">="), ("< =", "<="), ("! =", "!=")):
        sql = sql.replace(loose, tight)
    statements = sqlparse.parse(sql)
    if not statements:
        return None
    kept = "".join(leaf.value for leaf in statements[0].flatten() if leaf.value.lower() != "distinct")
    return re.sub(r"YEAR\s*\(\s*CURDATE\s*\(\s*\)\s*\)\s*", "2020", kept, flags=re.IGNORECASE)


def assert_same(sql: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = reference(sql)
        except sqlparse.exceptions.SQLParseError:
            return  # too deep for sqlparse; official_text goes on
    found = official_text(sql)
    # Space after the first statement means nothing to SQLite.
    assert (found or "").rstrip() == (expected or "").rstrip()


@settings(max_examples=800, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(PIECES), st.sampled_from(["", "", " "])), max_size=14))
def test_agrees_with_sqlparse_on_token_soup(pieces: list[tuple[str, str]]) -> None:
    assert_same("".join(piece + space for piece, space in pieces))


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=30))
def test_agrees_with_sqlparse_on_any_text(text: str) -> None:
    assert_same(text)


HOSTILE = [
    "(",
    ")",
    "/*",
    "'",
    '"',
    "\\'",
    '\\"',
    "$a$",
    "$a",
    "[",
    "--",
    "`",
    "\u00b4",
    "begin ",
    "case ",
    "(select ",
    ";",
    "GO ",
]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("piece", HOSTILE)
def test_hostile_text_is_lexed_quickly(piece: str) -> None:
    """The longest text that is lexed takes a fraction of a second, whatever its content; a longer one is refused."""
    text = "SELECT DISTINCT 1 ;" + piece * MAX_LEXED
    assert official_text(text[:MAX_LEXED]).startswith("SELECT  1 ;")
    with pytest.raises(TooLong, match="comments is 10000"):
        official_text(text)
    one_string = f"SELECT '{'x' * 900_000}', DISTINCT a"
    assert official_text(one_string) == one_string.replace("DISTINCT", "")


def test_nesting_that_the_evaluator_refuses_is_left_to_sqlite() -> None:
    text = "SELECT DISTINCT " + "(" * 3000 + "1" + ")" * 3000 + ";"
    assert official_text(text + " SELECT 2") == text.replace("DISTINCT", "") + " "
