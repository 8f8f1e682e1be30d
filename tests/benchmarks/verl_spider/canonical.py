"""One style for queries: keywords in capitals, names as the schema spells them, tables in full, a space at every token.

People write the same query in many ways. A model that is made from nothing learns one way far sooner, and where every
name follows a space it has the same tokens in the query as in the schema.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import sqlglot
from agentrig_langgraph_sql.database import run_query
from agentrig_langgraph_sql.schema import quoted
from schemas import Schema
from sqlglot import exp
from sqlglot.optimizer.scope import Scope, traverse_scope

_FUNCTIONS = {"COUNT", "SUM", "AVG", "MIN", "MAX", "ABS", "ROUND", "LENGTH", "CAST"}


class NotCanonical(Exception):
    """The query can't be put into the style."""


def canonical(query: str, schema: Schema) -> str:
    """Return a query in the style.

    Raises:
        NotCanonical: It does not parse, or names what the schema lacks.
    """
    try:
        tree = sqlglot.parse_one(query.strip().rstrip(";"), read="sqlite")
        for scope in traverse_scope(tree):
            _rewrite(scope, schema)
        return " ".join(_natural(tokens_of(tree.sql(dialect="sqlite"))))
    except (sqlglot.errors.SqlglotError, KeyError, RecursionError) as error:
        raise NotCanonical(str(error)) from error


def _rewrite(scope: Scope, schema: Schema) -> None:
    """Spell a scope's names as the schema does, and put tables' names for their aliases."""
    tables = {t.name.lower(): t for t in schema.tables}
    nodes: dict[str, exp.Table] = {}
    renamed: dict[str, str] = {}
    real = [source for _, (_, source) in scope.selected_sources.items() if isinstance(source, exp.Table)]
    once = len({s.name.lower() for s in real}) == len(real)
    inner = [s for s in scope.selected_sources.values() if not isinstance(s[1], exp.Table)]
    for alias, (_, source) in scope.selected_sources.items():
        if not isinstance(source, exp.Table):
            renamed[alias.lower()] = alias
            continue
        if source.name.lower() not in tables:
            raise NotCanonical(f"no table {source.name}")
        name = tables[source.name.lower()].name
        nodes[alias.lower()] = source
        # A table that is joined to itself needs its aliases.
        renamed[alias.lower()] = name if once else alias.upper()
        source.set("this", _identifier(name))
        source.set("alias", None if once else exp.TableAlias(this=exp.to_identifier(alias.upper())))
    owners = {a: {c.name.lower(): c.name for c in tables[n.name.lower()].columns} for a, n in nodes.items()}
    outputs = {p.alias.lower() for p in scope.expression.selects if p.alias}
    single = len(renamed) == 1
    for column in list(scope.expression.find_all(exp.Column)):
        if column.parent_select is not scope.expression:
            continue  # of a subquery, which is a scope of its own
        _spell(column, owners, renamed, outputs, single=single, known=not inner)
    for join in scope.expression.args.get("joins") or []:
        _turn(join)


def _spell(
    column: exp.Column,
    owners: dict[str, dict[str, str]],
    renamed: dict[str, str],
    outputs: set[str],
    *,
    single: bool,
    known: bool,
) -> None:
    name, alias = column.name.lower(), column.table.lower()
    if isinstance(column.this, exp.Star):
        if alias:
            column.set("table", None if single else _identifier(renamed[alias]))
        return
    if alias:
        if alias in renamed:
            spelled = owners[alias][name] if alias in owners else column.name
            column.set("this", _identifier(spelled))
            column.set("table", None if single else _identifier(renamed[alias]))
        return  # of an outer query: left as it is, and refused later if it no longer runs
    holders = [a for a, columns in owners.items() if name in columns]
    if holders:
        if len(holders) > 1:
            raise NotCanonical(f"{column.name} is ambiguous")
        column.set("this", _identifier(owners[holders[0]][name]))
        column.set("table", None if single else _identifier(renamed[holders[0]]))
    elif column.this.quoted and known:
        column.replace(exp.Literal.string(column.name))  # SQLite takes "text" for text where no column is so called
    elif known and name not in outputs and column.parent_select is not None and column.parent_select.depth == 0:
        raise NotCanonical(f"no column {column.name}")


def _turn(join: exp.Join) -> None:
    """Put the side of the table that came earlier first in `ON a = b`."""
    on = join.args.get("on")
    if isinstance(on, exp.EQ) and isinstance(on.left, exp.Column) and isinstance(on.right, exp.Column):
        new = join.this.alias_or_name.lower()
        if on.left.table.lower() == new and on.right.table.lower() != new:
            left, right = on.left.copy(), on.right.copy()
            on.set("this", right)
            on.set("expression", left)


def _natural(tokens: list[str]) -> list[str]:
    """Undo what sqlglot writes otherwise than people: `NOT a IN`, `NOT a IS NULL`, `JOIN b ON TRUE`."""
    found: list[str] = []
    for at, token in enumerate(tokens):
        if token == "TRUE" and found and found[-1] == "ON":
            found.pop()
            continue
        if token == "ASC":
            continue  # as without it
        found.append(token)
        if token not in ("IN", "LIKE", "BETWEEN", "IS"):
            continue
        begin = len(found) - (4 if len(found) > 3 and found[-3] == "." else 2)
        if found[begin - 1 : begin] == ["NOT"]:
            if token != "IS":
                found[-1:] = ["NOT", token]
            elif tokens[at + 1 : at + 2] == ["NULL"]:
                found.append("NOT")
            else:
                continue
            del found[begin - 1]
    return found


def _identifier(name: str) -> exp.Identifier:
    return exp.to_identifier(name, quoted=quoted(name) != name)


def spaced(query: str) -> str:
    """Return a query with one space between any two of its tokens, functions and keywords in capitals."""
    return " ".join(tokens_of(query))


def tokens_of(query: str) -> list[str]:
    """Return the texts of a query's tokens, quotes included."""
    found = []
    for token in sqlglot.tokenize(query, read="sqlite"):
        text = query[token.start : token.end + 1]
        if text.upper() in _FUNCTIONS and query[token.end + 1 :].lstrip().startswith("("):
            text = text.upper()
        found.append(text)
    return found


def same_rows(one: Any, two: Any, *, ordered: bool) -> bool:
    """Return whether two results are equal; an error never is."""
    if one.error is not None or two.error is not None or one.more or two.more:
        return False
    rows = [list(map(repr, one.rows)), list(map(repr, two.rows))]
    return rows[0] == rows[1] if ordered else sorted(rows[0]) == sorted(rows[1])


def checked(query: str, schema: Schema, database: Path) -> tuple[str, bool]:
    """Return a gold query in the style where that gives the same rows, else as it is with plain spaces.

    Returns:
        The query, and whether it is in the style.
    """
    plain = " ".join(query.strip().rstrip(";").split())
    try:
        styled = canonical(query, schema)
    except NotCanonical:
        return plain, False
    results = [run_query(database, q, max_rows=20_000, max_chars=10**8) for q in (query, styled)]
    if not same_rows(*results, ordered="ORDER BY" in styled):
        return plain, False
    return styled, True


def bare(token: str) -> str:
    """Return a token without double quotes around it."""
    return token[1:-1].replace('""', '"') if len(token) > 1 and token[0] == token[-1] == '"' else token
