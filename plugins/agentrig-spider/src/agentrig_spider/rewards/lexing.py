"""Changes the text of a query as the official evaluator does before it runs the query.

The official evaluator passes every query to the package sqlparse, keeps the first statement, and joins its tokens again
without the tokens `distinct`. This module does the same with the lexer and the splitter of sqlparse. Most queries
contain neither `distinct` nor an inner `;` and need no lexing. `tests/test_spider_exec_lexing.py` compares both.
"""

from __future__ import annotations

import re

# Text that consists only of these needs no tokens: strings are closed, and there are no comments or placeholders.
_TAME = re.compile(r"""(?>[\w\s,.()=<>!*+;|]+|'[^'\\]*'|"[^"\\]*"|-(?!-)|/(?!\*))*+""")
_TAME_DISTINCT = re.compile(r"""'[^']*'|"[^"]*"|\bdistinct\b""", re.IGNORECASE)
_GLUED_DISTINCT = re.compile(r"\wdistinct|distinct\w", re.IGNORECASE)

_CURRENT_YEAR = re.compile(r"YEAR\s*\(\s*CURDATE\s*\(\s*\)\s*\)\s*", re.IGNORECASE)


MAX_CHARACTERS = 1_000_000
"""Longest query."""

MAX_LEXED = 10_000
"""Longest query that is passed to sqlparse: unclosed quotes and comments make its lexer quadratic."""


class TooLong(Exception):
    """The query is too long."""


def official_text(sql: str, *, keep_distinct: bool = False) -> str | None:
    """Return the text that the official evaluator runs instead of `sql`; None if there is no statement.

    It removes spaces inside `> =`, `< =` and `! =` (inside strings too), all statements after the first, and every
    unquoted token `distinct`; `YEAR(CURDATE())` becomes `2020`. With `keep_distinct` (an option
    of the official evaluator too) nothing is lexed: all statements and all tokens stay.

    Raises:
        TooLong: It has more than `MAX_CHARACTERS` characters, or more than `MAX_LEXED` and needs the lexer.
    """
    if len(sql) > MAX_CHARACTERS:
        raise TooLong(f"the query has {len(sql)} characters; at most {MAX_CHARACTERS} are allowed")
    sql = sql.replace("> =", ">=").replace("< =", "<=").replace("! =", "!=")
    lowered = sql.lower()
    inner = sql.rstrip()
    if keep_distinct:
        return _CURRENT_YEAR.sub("2020", sql)
    if not inner:
        return None
    if "GO" in sql or ";" in inner[:-1]:
        sql = _first_statement(sql)
    elif "distinct" in lowered:
        if _TAME.fullmatch(sql) and not _GLUED_DISTINCT.search(sql):
            sql = _TAME_DISTINCT.sub(_keep_strings, sql)
        else:
            sql = _first_statement(sql)
    if "curdate" in lowered:
        sql = _CURRENT_YEAR.sub("2020", sql)
    return sql


def _keep_strings(match: re.Match[str]) -> str:
    value = match.group()
    return value if value[0] in "'\"" else ""


def order_matters(gold: str) -> bool:
    """Return whether the official evaluator compares row order for this (official text of a) gold query."""
    return "order by" in gold.lower()


def _first_statement(sql: str) -> str:
    """Return the first statement without its `distinct` tokens."""
    if len(sql) > MAX_LEXED:
        raise TooLong(f"the query has {len(sql)} characters; the limit with inner `;` or comments is {MAX_LEXED}")
    # Without sqlparse's grouping, which takes most of the time, refuses deep nesting, and changes no token.
    from sqlparse.engine import FilterStack

    statement = next(FilterStack().run(sql), None)
    return "".join(token.value for token in statement.tokens if token.value.lower() != "distinct") if statement else ""
