"""Changes the text of a query as the official evaluator does before it runs the query, with only a lexer.

The official evaluator passes every query to the `sqlparse` package, keeps the first statement, and
joins its tokens again without the tokens `distinct`. Only two results of that parser
matter: where tokens start and end, and where the first statement ends. Both come from its lexical
rules, which this module has as one regular expression (`tests/test_spider_exec_lexing.py`
compares the two on generated text). Most queries contain neither `distinct` nor an inner `;` and need
no lexing at all.
"""

from __future__ import annotations

import re

_WORD_START = "[A-ZÀ-Ü]"

# The order matters: the first alternative that matches at a position is used, as in sqlparse.
_TOKEN = re.compile(
    rf"""
      (?P<dollar>(?<![\w"$])(?P<tag>\$(?:[_A-ZÀ-Ü]\w*)?\$)(?s:.*?)(?P=tag))
    | /\*\+(?s:.*?)\*/
    | (?P<block>/\*(?s:.*?)\*/)
    | (?:--|\#\ )\+.*?(?:\r\n|\r|\n|\Z|$)
    | (?P<line>(?:--|\#\ ).*?(?:\r\n|\r|\n|\Z|$))
    | (?P<space>\s)
    | :=|::|\*
    | `(?:``|[^`])*`
    | \u00b4(?:\u00b4\u00b4|[^\u00b4])*\u00b4
    | \?
    | %(?:\(\w+\))?s
    | (?<!\w)[$:?]\w+
    | \\\w+
    | (?P<case>CASE|IN|VALUES|USING|FROM|AS)\b
    | (?:@|\#\#|\#){_WORD_START}\w+
    | (?P<name>{_WORD_START}\w*(?=\s*\.(?!\d))|(?<=\.){_WORD_START}\w*|{_WORD_START}\w*(?=\())
    | -?0x[\dA-F]+
    | -?\d+(?:\.\d+)?E-?\d+
    | (?![_A-ZÀ-Ü])-?(?:\d+\.\d*|\.\d+)(?![_A-ZÀ-Ü])
    | (?![_A-ZÀ-Ü])-?\d+(?![_A-ZÀ-Ü])
    | '(?:''|\\'|[^'])*'
    | "(?:""|\\"|[^"])*"
    | (?:""|".*?[^\\]")
    | (?<![\w\])])\[[^\]\[]+\]
    | (?:(?:(?:LEFT|RIGHT|FULL)\s+)?(?:(?:INNER|OUTER|STRAIGHT)\s+)?|(?:CROSS|NATURAL)\s+)JOIN\b
    | (?P<end>END(?:\s+(?:IF|LOOP|WHILE|FOR|CASE))?\b)
    | IF\s+(?:NOT\s+)?EXISTS\b | NOT\s+NULL\b | (?:ASC|DESC)(?:\s+NULLS\s+(?:FIRST|LAST))?\b
    | NULLS\s+(?:FIRST|LAST)\b | UNION\s+ALL\b
    | (?P<create>CREATE(?:\s+OR\s+REPLACE)?\b)
    | DOUBLE\s+PRECISION\b | (?:GROUP|ORDER)\s+BY\b | PRIMARY\s+KEY\b | HANDLER\s+FOR\b
    | (?P<go>GO\s\d+\b)
    | (?:AT|WITH')\s+TIME\s+ZONE\s+'[^']+'
    | LATERAL\s+VIEW\s+(?:EXPLODE|INLINE|PARSE_URL_TUPLE|POSEXPLODE|STACK)\b
    | (?:NOT\s+)?(?:LIKE|ILIKE|RLIKE)\b | (?:NOT\s+)?REGEXP(?:\s+BINARY)?\b
    | (?P<word>\w[$\#\w]*)
    | (?P<punctuation>[;:()\[\],.])
    | ->>?|\#>>?|@>|<@|\?\|?|\?&|-|\#-
    | [<>=~!]+
    | [+/@\#%^&|-]+
    """,
    re.IGNORECASE | re.VERBOSE,
)

# Text that consists only of these needs no tokens: strings are closed, and there are no comments or placeholders.
_TAME = re.compile(r"""(?>[\w\s,.()=<>!*+;|]+|'[^'\\]*'|"[^"\\]*"|-(?!-)|/(?!\*))*+""")
_TAME_DISTINCT = re.compile(r"""'[^']*'|"[^"]*"|\bdistinct\b""", re.IGNORECASE)
_GLUED_DISTINCT = re.compile(r"\wdistinct|distinct\w", re.IGNORECASE)

_CURRENT_YEAR = re.compile(r"YEAR\s*\(\s*CURDATE\s*\(\s*\)\s*\)\s*", re.IGNORECASE)
_TRANSACTION_WORDS = frozenset({"TRANSACTION", "WORK", "TRAN", "DISTRIBUTED", "DEFERRED", "IMMEDIATE", "EXCLUSIVE"})


MAX_CHARACTERS = 1_000_000
"""Longest query."""

MAX_LEXED = 10_000
"""Longest query that is lexed token by token; unclosed comments make lexing quadratic."""


class TooLong(Exception):
    """The query is too long."""


def official_text(sql: str, *, keep_distinct: bool = False) -> str | None:
    """Return the text that the official evaluator runs instead of `sql`; None if there is no statement.

    Spaces inside `> =`, `< =` and `! =` are removed (inside strings too), as are all statements but the first
    and every unquoted token `distinct`; `YEAR(CURDATE())` becomes `2020`. With `keep_distinct` (an option
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
    kept: list[str] = []
    blocks: list[str] = []
    level = 0
    at_begin = create = ended = False
    position, size = 0, len(sql)
    while position < size:
        match = _TOKEN.match(sql, position)
        if match is None:
            kind, value, position = "other", sql[position], position + 1
        else:
            kind, value, position = match.lastgroup or "other", match.group(), match.end()
        if kind == "tag":
            kind = "dollar"
        if ended and not (kind == "line" or (kind == "space" and value not in "\r\n")):
            break
        word = value.upper()
        if kind == "punctuation":
            if value == "(":
                level += 1
            elif value == ")":
                level -= 1
            elif value == ";":
                if at_begin and blocks and blocks[-1] == "BEGIN":
                    blocks.pop()
                    level -= 1
                at_begin = False
                ended = level <= 0 and "BEGIN" not in blocks
        elif kind == "end":
            # `END` closes any block; `END IF` and similar close only their own kind.
            opener = word.split()[-1]
            if opener == "END":
                level -= 1
                if blocks:
                    blocks.pop()
            elif blocks and blocks[-1] == opener:
                level -= 1
                blocks.pop()
        elif kind == "go" or (kind == "word" and value == "GO"):
            ended = value[:2] == "GO"
        elif kind == "create":
            create = True
        elif kind in ("word", "case"):
            if word == "DECLARE" and create and not blocks:
                blocks.append("DECLARE")
                level += 1
            elif word == "BEGIN":
                at_begin = True
                if blocks and blocks[-1] == "DECLARE":
                    blocks[-1] = "BEGIN"
                else:
                    blocks.append("BEGIN")
                    level += 1
            elif at_begin and word in _TRANSACTION_WORDS:
                if blocks and blocks[-1] == "BEGIN":
                    blocks.pop()
                    level -= 1
                at_begin = False
            elif "BEGIN" in blocks and word in ("IF", "CASE", "LOOP"):
                blocks.append(word)
                level += 1
        if kind not in ("space", "line", "block") and word != "BEGIN":
            at_begin = False
        if word != "DISTINCT":
            kept.append(value)
    return "".join(kept)
