"""The structure of a query by SQLite's own lexical rules: where its clauses start, and at which depth."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple

import attrs

_TOKEN = re.compile(
    r"""
      (?P<skip>\s+|--[^\n]*|/\*(?s:.*?)(?:\*/|\Z))
    | (?P<string>'(?:[^']|'')*')
    | (?P<quoted>"(?:[^"]|"")*"|`(?:[^`]|``)*`|\[[^\[\]]*\])
    | (?P<number>\d[\w.]*|\.\d[\w.]*)
    | (?P<word>[^\W\d][\w$]*)
    | (?P<sign>[<>!=]=|<>|<<|>>|\|\||->>|->|.)
    """,
    re.VERBOSE | re.DOTALL,
)

MAX_CHARACTERS = 100_000
"""Longest accepted query: about a tenth of a second of lexing."""

_SPLIT_SIGN = re.compile(r"[<>!]\s+=")


class NotAQuery(Exception):
    """The text is not a single SELECT; the message says what it is."""


class Token(NamedTuple):
    """One token that is not space or a comment.

    Attributes:
        kind: `string`, `quoted`, `number`, `word` or `sign`.
        text: As written; words in upper case.
        start: Its position in the source.
        end: The position after it.
        depth: The number of open parentheses around it.
    """

    kind: str
    text: str
    start: int
    end: int
    depth: int


def tokens(sql: str) -> list[Token]:
    """Return the tokens of a text."""
    found: list[Token] = []
    depth = 0
    for match in _TOKEN.finditer(sql):
        kind = match.lastgroup
        if kind == "skip" or kind is None:
            continue
        text = match.group()
        if kind == "word":
            text = text.upper()
        if text == ")" and kind == "sign":
            depth -= 1
        found.append(Token(kind, text, match.start(), match.end(), depth))
        if text == "(" and kind == "sign":
            depth += 1
    return found


@attrs.frozen(kw_only=True)
class Select:
    """A single SELECT statement, plain or compound, with or without WITH.

    Attributes:
        text: The statement without the text after it; `> =` and similar are joined.
        tokens: Its tokens; positions are those in `text`.
        items: The result columns as tokens, without their aliases; None for a compound, or if there is a `*`.
        compound: Whether UNION, INTERSECT or EXCEPT joins several.
        distinct: Whether it is a SELECT DISTINCT.
        items_end: Position in `text` after the result columns.
        order: The terms of the outermost ORDER BY as tokens, without ASC, DESC and NULLS.
        order_texts: The same terms as written, with ASC and DESC.
        order_end: Position in `text` after the ORDER BY clause.
    """

    text: str
    tokens: Sequence[Token]
    items: Sequence[Sequence[Token]] | None
    compound: bool
    distinct: bool
    items_end: int
    order: Sequence[Sequence[Token]]
    order_texts: Sequence[str]
    order_end: int


_COMPOUND = frozenset({"UNION", "INTERSECT", "EXCEPT"})
_AFTER_ITEMS = frozenset({"FROM", "WHERE", "GROUP", "HAVING", "WINDOW", "ORDER", "LIMIT", *_COMPOUND})
_VERBS = frozenset({"SELECT", "INSERT", "UPDATE", "DELETE"})


def read_select(sql: str) -> Select:
    """Read a single SELECT.

    Raises:
        NotAQuery: It is empty, more than one statement, not a SELECT, or has VALUES.
    """
    if len(sql) > MAX_CHARACTERS:
        raise NotAQuery(f"it has {len(sql)} characters; at most {MAX_CHARACTERS} are allowed")
    text = _joined(sql)
    found = tokens(text)
    while found and found[-1].text == ";":
        found.pop()
    if not found:
        raise NotAQuery("it is empty")
    if any(token.text == ";" and token.kind == "sign" for token in found):
        raise NotAQuery("it is more than one statement")
    if any(token.text == "VALUES" for token in found):
        raise NotAQuery("it has VALUES")
    text = text[: found[-1].end]
    if found[0].text not in ("SELECT", "WITH"):
        raise NotAQuery(f"it begins with {found[0].text[:40]}, not with SELECT or WITH")
    top = [index for index, token in enumerate(found) if token.depth == 0 and token.kind == "word"]
    main = next((index for index in top if found[index].text in _VERBS), None)
    if main is None or found[main].text != "SELECT":
        raise NotAQuery("its main statement is not a SELECT")
    top = [index for index in top if index > main]
    compound = any(found[index].text in _COMPOUND for index in top)
    order_at = next((index for index in top if found[index].text == "ORDER"), None)
    limit_at = next((index for index in top if found[index].text == "LIMIT"), len(found))
    items_from = main + 1
    distinct = items_from < len(found) and found[items_from].text == "DISTINCT"
    if items_from < len(found) and found[items_from].text in ("DISTINCT", "ALL"):
        items_from += 1
    items_to = next((index for index in top if _ends_items(found, index)), len(found))
    items = [_without_alias(item) for item in _split(found[items_from:items_to])]
    known = not compound and not any(item and item[-1].text == "*" and len(item) in (1, 3) for item in items)
    order: list[list[Token]] = []
    if order_at is not None:
        order = _split(found[order_at + 2 : limit_at])
    return Select(
        text=text,
        tokens=found,
        items=items if known else None,
        compound=compound,
        distinct=distinct,
        items_end=found[items_to].start if items_to < len(found) else len(text),
        order=[_without_direction(term) for term in order],
        order_texts=[text[term[0].start : term[-1].end] for term in order if term],
        order_end=found[limit_at].start if limit_at < len(found) else len(text),
    )


def _joined(sql: str) -> str:
    """Join `> =`, `< =` and `! =` outside strings: golds and models write them, but SQLite rejects them."""
    if not _SPLIT_SIGN.search(sql):
        return sql
    found = tokens(sql)
    cuts = [
        (left.end, right.start)
        for left, right in itertools.pairwise(found)
        if left.text in ("<", ">", "!") and right.text == "=" and left.end < right.start
    ]
    for start, end in reversed(cuts):
        sql = sql[:start] + sql[end:]
    return sql


def _ends_items(found: Sequence[Token], index: int) -> bool:
    word = found[index].text
    if word == "FROM":  # IS [NOT] DISTINCT FROM compares
        return found[index - 1].text != "DISTINCT"
    return word in _AFTER_ITEMS


def _split(found: Sequence[Token]) -> list[list[Token]]:
    """Split at the commas outside parentheses."""
    parts: list[list[Token]] = [[]]
    for token in found:
        if token.depth == 0 and token.text == "," and token.kind == "sign":
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


def _without_alias(item: list[Token]) -> list[Token]:
    if len(item) >= 3 and item[-2].text == "AS":
        return item[:-2]
    return item


def _without_direction(term: list[Token]) -> list[Token]:
    words = [token.text for token in term]
    if len(words) >= 2 and words[-2] == "NULLS" and words[-1] in ("FIRST", "LAST"):
        term, words = term[:-2], words[:-2]
    return term[:-1] if words and words[-1] in ("ASC", "DESC") else term
