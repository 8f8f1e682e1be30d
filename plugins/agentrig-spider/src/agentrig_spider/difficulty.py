"""Spider's four classes of difficulty, by the parts that a query has.

The rule is that of the benchmark's evaluator (https://yale-lily.github.io/spider). It counts three kinds of parts of
the query itself, not of its subqueries:

- first: WHERE, GROUP BY, ORDER BY, LIMIT, each table after the first, each OR, each LIKE;
- nested: each subquery in a condition, and a UNION, INTERSECT or EXCEPT;
- others, one each: more than one aggregate (a negated condition of WHERE counts as one), more than one selected
  column, more than one condition in WHERE, more than one column in GROUP BY.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

CLASSES = ("easy", "medium", "hard", "extra")

_TOKEN = re.compile(r"""'(?:[^']|'')*'|"[^"]*"|`[^`]*`|\w+|[^\s\w]""")
_AGGREGATES = frozenset({"max", "min", "count", "sum", "avg"})
_SET = frozenset({"union", "intersect", "except"})
_CLAUSES = {"select", "from", "where", "group", "having", "order", "limit", "on"}


def difficulty(query: str) -> str:
    """Return the class of a query: `easy`, `medium`, `hard` or `extra`."""
    parts, nested = _parts(_TOKEN.findall(query.lower()))
    where, group, order, limit = (parts.get(name, []) for name in ("where", "group", "order", "limit"))
    conditions = [*parts.get("on", []), *where, *parts.get("having", [])]
    first = sum(map(bool, (where, group, order, limit)))
    first += parts.get("from", []).count("join") + parts.get("from", []).count(",")
    first += conditions.count("or") + conditions.count("like")
    items = _items(parts.get("select", []))
    aggregates = sum(_aggregated(item) for item in (*items, *_items(group), *_items(order)))
    aggregates += where.count("not")
    others = (aggregates > 1) + (len(items) > 1) + (_conditions(where) > 1) + (len(_items(group)) > 1)
    if first <= 1 and not others and not nested:
        return "easy"
    if not nested and ((others <= 2 and first <= 1) or (first <= 2 and others < 2)):
        return "medium"
    if (not nested and ((others > 2 and first <= 2) or (2 < first <= 3 and others <= 2))) or (
        first <= 1 and not others and nested <= 1
    ):
        return "hard"
    return "extra"


def _parts(tokens: Sequence[str]) -> tuple[dict[str, list[str]], int]:
    """Return the tokens of each clause of the outermost query, up to a set operation, and how many it nests."""
    parts: dict[str, list[str]] = {}
    clause, nested = "", 0
    brackets: list[bool] = []
    for token, after in zip(tokens, [*tokens[1:], ""], strict=True):
        inside = any(brackets)
        if token == "(":
            brackets.append(after == "select")
            nested += after == "select" and not inside and clause in ("on", "where", "having")
        elif token == ")" and brackets:
            brackets.pop()
        if inside:
            continue
        if token in _SET:
            return parts, nested + 1
        if token == "join" and clause == "on":
            clause = "from"
        if token in _CLAUSES:
            clause = token
            parts.setdefault(clause, [])
            if token == "limit":
                parts[clause].append(token)
        else:
            parts.setdefault(clause, []).append(token)
    return parts, nested


def _items(tokens: Sequence[str]) -> list[list[str]]:
    """Return what the commas of a clause separate; those inside brackets separate nothing."""
    found: list[list[str]] = [[]]
    depth = 0
    for token in tokens:
        depth += (token == "(") - (token == ")")
        if token == "," and not depth:
            found.append([])
        elif token not in ("by", "distinct"):
            found[-1].append(token)
    return [item for item in found if item]


def _aggregated(item: Sequence[str]) -> bool:
    return item[0] in _AGGREGATES and item[1:2] == ["("]


def _conditions(where: Sequence[str]) -> int:
    """Return how many conditions a WHERE has; the AND of a BETWEEN separates none."""
    return bool(where) + sum(where.count(word) for word in ("and", "or")) - where.count("between")
