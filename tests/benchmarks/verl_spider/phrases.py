"""How questions name tables, columns, values and conditions, beside their form in queries."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence

from agentrig_langgraph_sql.schema import quoted
from renaming import Pool, plural
from schemas import Column, Place, Schema, Table

SHOW = ("Show", "List", "Find", "Give", "Return", "Give me", "Tell me", "Show me", "Display", "Please show", "Get")
AGGREGATES = {
    "AVG": ("average", "mean"),
    "MAX": ("maximum", "highest", "largest", "greatest"),
    "MIN": ("minimum", "lowest", "smallest"),
    "SUM": ("total", "sum of the", "total sum of"),
}
_COMPARE = {
    ">": ("greater than", "more than", "higher than", "above", "over", "larger than", "bigger than", "exceeding"),
    "<": ("less than", "below", "under", "smaller than", "lower than", "fewer than"),
    ">=": ("at least", "no less than", "greater than or equal to"),
    "<=": ("at most", "no more than", "less than or equal to"),
}
COUNTS = {1: "one", 2: "two", 3: "three", 4: "four", 5: "five", 6: "six", 10: "ten"}
_PLACES = re.compile(r"\b(city|country|state|location|nationality|county|region|district)\b")


def singular(words: str) -> str:
    """Return words in the singular, as far as spelling tells."""
    if words.endswith("ies") and len(words) > 4:
        return f"{words[:-3]}y"
    if words.endswith(("ches", "shes", "xes", "sses")):
        return words[:-2]
    return words[:-1] if words.endswith("s") and not words.endswith(("ss", "us", "is")) else words


class Phrases:
    """Draws parts of questions about one schema."""

    def __init__(self, schema: Schema, pool: Pool, rng: random.Random) -> None:
        self.schema, self.pool, self.rng = schema, pool, rng
        pointing = {place for pair in schema.foreign_keys for place in pair}
        self._keys = pointing | {(t.name, c) for t in schema.tables for c in t.primary}
        self._links = [
            (one, two)
            for one in schema.foreign_keys
            for two in schema.foreign_keys
            if one != two and one[0][0] == two[0][0] and len({one[0][0], one[1][0], two[1][0]}) == 3
        ]

    # Small parts.

    def one(self, *options: str) -> str:
        """Return one of some wordings."""
        return self.rng.choice(options)

    def table(self, need: Callable[[Table], bool] = lambda _: True) -> Table:
        """Return a table at random."""
        return self.rng.choice([t for t in self.schema.tables if t.columns and need(t)])

    def is_key(self, table: Table, column: Column) -> bool:
        """Return whether a column is part of a key or looks like it."""
        return (table.name, column.name) in self._keys or column.words.endswith("id")

    def numbers(self, table: Table) -> list[Column]:
        """Return the columns that can be compared and summed."""
        return [c for c in table.columns if c.type == "number" and not self.is_key(table, c)]

    def texts(self, table: Table) -> list[Column]:
        """Return the columns of text that are no keys."""
        return [c for c in table.columns if c.type not in ("number", "time") and not self.is_key(table, c)]

    def plain(self, table: Table) -> list[Column]:
        """Return the columns that people ask for, keys among them now and then."""
        rest = [c for c in table.columns if not self.is_key(table, c)]
        return rest if rest and self.rng.random() < 0.8 else list(table.columns)

    def label(self, table: Table) -> Column:
        """Return the column that names a row."""
        texts = self.texts(table)
        named = [c for c in texts if re.search(r"\b(name|title)\b", c.words)]
        return self.rng.choice(named if named and self.rng.random() < 0.8 else texts or list(table.columns))

    def several(self, table: Table, most: int = 3) -> list[Column]:
        """Return one column or more."""
        columns = self.plain(table)
        k = self.rng.choices([1, 2, 3], [5, 4, 2])[0]
        return self.rng.sample(columns, min(k, most, len(columns)))

    def noun(self, table: Table) -> str:
        """Return a table's rows as people speak of them."""
        return plural(singular(table.words))

    def name(self, column: Column, *, many: bool | None = None) -> str:
        """Return a column's words, in the plural or not."""
        many = self.rng.random() < 0.5 if many is None else many
        return plural(column.words) if many else column.words

    def listed(self, columns: Sequence[Column], *, many: bool | None = None) -> str:
        """Return several columns' words."""
        many = self.rng.random() < 0.5 if many is None else many
        words = [self.name(c, many=many) for c in columns]
        if len(words) == 1:
            return words[0]
        return ", ".join(words[:-1]) + self.one(" and ", ", and ", " and ") + words[-1]

    def opened(self, rest: str, *, what: str = "What are") -> str:
        """Return `rest` as a question or as a command."""
        if self.rng.random() < 0.45:
            return f"{what} {rest}?"
        return f"{self.one(*SHOW)} {rest}."

    def literal(self, value: str | float) -> tuple[str, str]:
        """Return a value in SQL and as text."""
        if not isinstance(value, str):
            return str(value), str(value)
        mark = self.one("", "", "", '"', "'")
        return "'" + value.replace("'", "''") + "'", f"{mark}{value}{mark}"

    def number(self, column: Column) -> int | float:
        """Return a value of a column of numbers."""
        found = [v for v in column.values if isinstance(v, int | float)]
        if found and self.rng.random() < 0.6:
            value = self.rng.choice(found)
            return value if isinstance(value, int) else round(value, 2)
        return self.rng.choice([self.rng.randint(1, 20), self.rng.randint(10, 3000), self.rng.choice([5, 10, 50, 100])])

    def text(self, column: Column) -> str:
        """Return a value of a column of text."""
        found = [v for v in column.values if isinstance(v, str) and v]
        return self.rng.choice(found) if found and self.rng.random() < 0.7 else self.pool.value(self.rng)

    # Conditions: SQL, and words that follow the noun.

    def condition(self, table: Table, at: Callable[[Column], str]) -> tuple[str, str]:
        """Return a condition on a table."""
        numbers, texts = self.numbers(table), self.texts(table)
        if numbers and (not texts or self.rng.random() < 0.5):
            return self._on_number(self.rng.choice(numbers), at)
        if not texts:
            texts = [c for c in table.columns if c.values and isinstance(c.values[0], str)]
        return self._on_text(self.rng.choice(texts), at)

    def _on_number(self, column: Column, at: Callable[[Column], str]) -> tuple[str, str]:
        c, low, n = at(column), column.words, self.number(column)
        kind = self.rng.random()
        if kind < 0.12:
            a, b = sorted((n, self.number(column)))
            return f"{c} BETWEEN {a} AND {b}", self.one(
                f"whose {low} is between {a} and {b}",
                f"with {low} between {a} and {b}",
                f"with a {low} from {a} to {b}",
            )
        if kind < 0.27:
            if "year" in low and self.rng.random() < 0.5:
                return f"{c} = {n}", f"in {n}"
            return f"{c} = {n}", self.one(
                f"whose {low} is {n}", f"with {low} {n}", f"with {n} {low}", f"that have {low} equal to {n}",
                f"where {low} is {n}", f"with a {low} of {n}",
            )  # fmt: skip
        op = self.rng.choices(list(_COMPARE), [5, 4, 2, 1])[0]
        said = self.one(*_COMPARE[op])
        if low == "age" and op in "<>" and self.rng.random() < 0.5:
            return f"{c} {op} {n}", f"{'older' if op == '>' else 'younger'} than {n}"
        if re.search(r"year|date", low) and op in "<>" and self.rng.random() < 0.6:
            return f"{c} {op} {n}", self.one(
                f"with {low} {'after' if op == '>' else 'before'} {n}",
                f"whose {low} is {'after' if op == '>' else 'before'} {n}",
            )
        return f"{c} {op} {n}", self.one(
            f"whose {low} is {said} {n}", f"with {low} {said} {n}", f"with a {low} {said} {n}",
            f"with {said} {n} {low}", f"that have {said} {n} {low}", f"having {low} {said} {n}",
            f"where the {low} is {said} {n}",
        )  # fmt: skip

    def _on_text(self, column: Column, at: Callable[[Column], str]) -> tuple[str, str]:
        c, low, value = at(column), column.words, self.text(column)
        sql, said = self.literal(value)
        kind = self.rng.random()
        if kind < 0.1:
            return f"{c} <> {sql}", self.one(
                f"whose {low} is not {said}", f"that do not have {low} {said}", f"with {low} other than {said}"
            )
        if kind < 0.22:
            word = self.rng.choice(re.findall(r"\w+", value) or [value])
            part, mark = word if self.rng.random() < 0.5 else word[:1], self.one('"', "'")
            shown = f"{mark}{part}{mark}"
            like, words = self.rng.choice(
                [
                    (f"'%{part}%'", f"whose {low} contains {shown}"),
                    (f"'%{part}%'", f"with the substring {shown} in their {low}"),
                    (f"'%{part}%'", f"whose {low} contains the word {shown}"),
                    (f"'{part}%'", f"whose {low} starts with {shown}"),
                    (f"'{part}%'", f"with {low} starting with the letter {shown}"),
                    (f"'%{part}'", f"whose {low} ends with {shown}"),
                ]
            )
            return f"{c} LIKE {like}", words
        if kind < 0.32:
            other, also = self.literal(self.text(column))
            return f"{c} = {sql} OR {c} = {other}", self.one(
                f"whose {low} is {said} or {also}",
                f"with {low} {said} or {also}",
                f"with either {low} {said} or {also}",
            )
        if _PLACES.search(low) and self.rng.random() < 0.5:
            return f"{c} = {sql}", self.one(f"from {said}", f"in {said}", f"in the {low} {said}", f"from {low} {said}")
        return f"{c} = {sql}", self.one(
            f"whose {low} is {said}", f"with {low} {said}", f"with the {low} {said}", f"that have {low} {said}",
            f"where {low} is {said}", f"of {low} {said}", f"with {said} as {low}", f"having the {low} {said}",
            f"named {said}" if low.endswith("name") else f"whose {low} is {said}",
        )  # fmt: skip

    def conditions(self, table: Table, at: Callable[[Column], str]) -> tuple[str, str]:
        """Return one condition, or two."""
        sql, said = self.condition(table, at)
        if " OR " in sql or self.rng.random() < 0.75:
            return sql, said
        more, also = self.condition(table, at)
        if " OR " in more or more.split()[0] == sql.split()[0]:
            return sql, said
        word = self.one("and", "and", "or")
        return f"{sql} {word.upper()} {more}", f"{said} {word} {also}"

    def maybe(self, table: Table, at: Callable[[Column], str], chance: float) -> tuple[str, str]:
        """Return ` WHERE …` and its words, or nothing."""
        if self.rng.random() >= chance or not (self.numbers(table) or self.texts(table)):
            return "", ""
        sql, said = self.conditions(table, at)
        return f" WHERE {sql}", f" {said}"

    def joined(self) -> tuple[Table, Table, str]:
        """Return child, parent and `ON …` of a foreign key."""
        child, parent = self.rng.choice(self.schema.foreign_keys)
        return self.schema.table(child[0]), self.schema.table(parent[0]), f"{at(parent)} = {at(child)}"


def at(place: Place) -> str:
    """Return `table . column`."""
    return f"{quoted(place[0])} . {quoted(place[1])}"


def own(column: Column) -> str:
    """Return a column's name as a query of one table has it."""
    return quoted(column.name)


def of(table: Table) -> Callable[[Column], str]:
    """Return how a query of several tables names a table's columns."""
    return lambda column: at((table.name, column.name))


def names(columns: Sequence[Column], how: Callable[[Column], str]) -> str:
    """Return columns as a list in SQL."""
    return " , ".join(map(how, columns))


def turned(on: str, first: Table) -> str:
    """Return `a = b` with the column of the table that comes first in front."""
    left, right = on.split(" = ")
    return on if left.split(" . ")[0] == quoted(first.name) else f"{right} = {left}"
