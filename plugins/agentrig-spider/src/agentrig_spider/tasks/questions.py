"""Questions of `mini-sql`: sampled from intents, and kept if slightly wrong queries give other results."""

from __future__ import annotations

import random
import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from agentrig_spider.tasks.domains import Domain, Table
from agentrig_spider.tasks.wordings import CONDITION_SQL, CONDITIONS, INTENTS, Intent

_GAP = re.compile(r"\{(\w+)\}")
_WHERE = re.compile(r" WHERE .*| AND .*")


@attrs.frozen
class Condition:
    """A condition on one column: `kind` is a key of `CONDITIONS`, `value` as SQL and question spell it."""

    kind: str
    column: str
    value: str
    words: Mapping[str, str] = attrs.field(factory=dict, eq=False)

    @property
    def sql(self) -> str:
        """The condition as SQL."""
        return CONDITION_SQL[self.kind].format(c=self.column, v=self.value, x=self.value)

    def wordings(self) -> dict[int, str]:
        """Return every wording, by its position in `CONDITIONS`."""
        fields = {"c": self.column, "v": self.value, "x": self.value, **self.words}
        said = {}
        for index, text in enumerate(CONDITIONS[self.kind]):
            names = _GAP.findall(text)
            implied = "c" not in names and self.words.get("label")
            if not implied and all(fields.get(name) for name in names):
                said[index] = text.format_map(fields)
        return said


@attrs.frozen
class Wording:
    """One wording of a question: the text, and the positions of its frame and conditions in the lists."""

    text: str
    frame: int
    conditions: Sequence[int]


@attrs.frozen
class Question:
    """A question before it is worded.

    Attributes:
        intent: Its kind.
        fields: Values for the intent's placeholders, except conditions.
        conditions: For the placeholders `where`/`cond`, `where2`/`cond2` or `pwhere`/`pcond`, in that order.
        words: Values for placeholders of the frames only (plurals, superlatives).
    """

    intent: Intent
    fields: Mapping[str, str]
    conditions: Sequence[Condition] = ()
    words: Mapping[str, str] = attrs.field(factory=dict, eq=False)

    @property
    def sql(self) -> str:
        """The gold query."""
        return fill(self.intent.sql, self.fields, self.conditions)

    def wordings(self) -> list[Wording]:
        """Return every wording that the question's columns allow."""
        found = []
        for index, frame in enumerate(self.intent.frames):
            text = frame.replace("<", "{").replace(">", "}")
            fields = {**self.fields, **self.words}
            if not all(fields.get(gap) for gap in _GAP.findall(text) if not gap.endswith(("cond", "cond2"))):
                continue
            if not self.conditions:
                found.append(Wording(text.format_map(fields), index, ()))
            first = self.conditions[0].wordings() if self.conditions else {}
            second = self.conditions[1].wordings() if len(self.conditions) > 1 else {-1: ""}
            for i, cond in first.items():
                for j, cond2 in second.items():
                    said = text.format_map({**fields, "cond": cond, "pcond": cond, "cond2": cond2})
                    found.append(Wording(said, index, (i,) if j < 0 else (i, j)))
        return found


def fill(template: str, fields: Mapping[str, str], conditions: Sequence[Condition]) -> str:
    """Return an intent's SQL with its placeholders filled."""
    where = [condition.sql for condition in conditions]
    named = dict(zip(("where", "where2"), where, strict=False))
    return template.format_map({**fields, **named, "pwhere": where[0] if where else ""})


def draw(domain: Domain, intent: Intent, rows: Mapping[str, Sequence[Any]], rng: random.Random) -> Question:
    """Return a question of one kind with random arguments; `rows` has the values of each `table.column`."""
    gaps = set(_GAP.findall(intent.sql))
    joined = "p" in gaps
    table = domain.child if joined else rng.choice((domain.parent, domain.child))
    number = rng.choice([n for n in table.numbers if n.adds or not intent.name.startswith("sum")])
    category = rng.choice(table.categories)
    conditions: list[Condition] = []
    if "where" in gaps:
        conditions.append(_condition(table, rows, rng, without=number.name if "n" in gaps else ""))
    if "where2" in gaps:
        conditions = [_condition(table, rows, rng, kinds=("is",)), _condition(table, rows, rng, kinds=_BOUNDS)]
    if "pwhere" in gaps:
        conditions = [_condition(domain.parent, rows, rng, label=True)]
    taken = {c.column for c in conditions if "pwhere" not in gaps} | ({number.name} if "n" in gaps else set())
    if intent.name == "lookup":
        taken.add(table.label)
    column = _column(table, taken, rng)
    words = {"T": table.plural, "cs": _plural(table, column), "gs": category.plural}
    words |= {"P": domain.parent.plural, "most": number.most, "least": number.least}
    fields = {
        "t": table.name,
        "c": column,
        "n": number.name,
        "g": category.name,
        "k": str(rng.randint(2, 6)),
        "label": table.label,
        "v": str(rng.choice(rows[f"{table.name}.{table.label}"])),
        "p": domain.parent.name,
        "key": domain.key,
        "plabel": domain.parent.label,
        "pc": _column(domain.parent, set(), rng),
    }
    asked = gaps | set(_GAP.findall(" ".join(intent.frames)))
    return Question(intent, {k: v for k, v in fields.items() if k in asked}, conditions, words)


_BOUNDS = ("above", "below")


def _condition(
    table: Table,
    rows: Mapping[str, Sequence[Any]],
    rng: random.Random,
    *,
    kinds: Sequence[str] = ("is", "above", "below"),
    label: bool = False,
    without: str = "",
) -> Condition:
    """Return a random condition, not on the column `without`; `label` allows the table's label for `is`."""
    kind = rng.choice(kinds)
    if kind == "is":
        if label and rng.random() < 0.5:
            value = rng.choice(rows[f"{table.name}.{table.label}"])
            return Condition("is", table.label, value, {"label": "yes"})
        category = rng.choice(table.categories)
        value = rng.choice(category.values)
        return Condition("is", category.name, value, {"phrase": category.phrase.format(v=value)})
    number = rng.choice([n for n in table.numbers if n.name != without])
    values = sorted(rows[f"{table.name}.{number.name}"])
    inner = values[len(values) // 5 : -len(values) // 5]
    # No row has the bound itself, so words like "past" are not ambiguous.
    bounds = [x for x in range(inner[0], inner[-1]) if x not in set(values)]
    value = str(rng.choice(bounds))
    return Condition(kind, number.name, value)


def _names(table: Table) -> list[str]:
    return [table.label, *(c.name for c in table.categories), *(n.name for n in table.numbers)]


def _column(table: Table, taken: set[str], rng: random.Random) -> str:
    """Return a random column; half of the time, the label."""
    free = [name for name in _names(table) if name not in taken]
    return table.label if table.label in free and rng.random() < 0.5 else rng.choice(free)


def _plural(table: Table, column: str) -> str:
    for category in table.categories:
        if category.name == column:
            return category.plural
    return f"{column[:-1]}ies" if column.endswith("y") else f"{column}s"


def mutants(question: Question, domain: Domain) -> Iterator[str]:
    """Yield queries that are wrong in one place: another intent, column, value, bound, or a condition less."""
    sql, fields, conditions = question.intent.sql, question.fields, question.conditions
    gaps = set(_GAP.findall(sql))
    for other in INTENTS:
        if set(_GAP.findall(other.sql)) == gaps and other is not question.intent:
            yield fill(other.sql, fields, conditions)
    if conditions:
        yield fill(_WHERE.sub("", sql), fields, conditions)
        if len(conditions) > 1:
            yield fill(re.sub(r"\{where\} AND ", "", sql), fields, conditions)
            yield fill(re.sub(r" AND .*", "", sql), fields, conditions)
    if "LIMIT" in sql:
        yield fill(re.sub(r" LIMIT .*", "", sql), fields, conditions)
    table = domain.child if fields["t"] == domain.child.name else domain.parent
    for gap, swaps in _swaps(table, domain, question).items():
        if gap in gaps:
            for swap in swaps:
                if swap != fields[gap]:
                    yield fill(sql, {**fields, gap: swap}, conditions)
    owner = domain.parent if "pwhere" in gaps else table
    for place, condition in enumerate(conditions):
        for wrong in _wrong(condition, owner):
            changed = [*conditions]
            changed[place] = wrong
            yield fill(sql, fields, changed)


def _swaps(table: Table, domain: Domain, question: Question) -> dict[str, list[str]]:
    names = _names(table)
    k = int(question.fields.get("k", 0))
    v = question.fields.get("v", "")
    others = [label for label in table.labels if label != v][:3]
    return {
        "c": [*names, domain.key],
        "n": [n.name for n in table.numbers],
        "k": [str(k - 1), str(k + 1)],
        "v": others,
        "pc": _names(domain.parent),
        # A wrong table is an error only if it lacks the column.
        "t": [domain.parent.name, domain.child.name] if "p" not in _GAP.findall(question.intent.sql) else [],
    }


def _wrong(condition: Condition, table: Table) -> Iterator[Condition]:
    if condition.kind == "is":
        pools: list[tuple[str, Sequence[str]]] = [(c.name, c.values) for c in table.categories]
        pools.append((table.label, table.labels[:4]))
        for name, values in pools:
            if name == condition.column:
                yield from (Condition("is", name, v) for v in values if v != condition.value)
            else:
                yield Condition("is", name, condition.value)
        return
    other = "below" if condition.kind == "above" else "above"
    yield Condition(other, condition.column, condition.value)
    yield from (Condition(condition.kind, n.name, condition.value) for n in table.numbers if n.name != condition.column)
    tens = int(condition.value)
    yield from (Condition(condition.kind, condition.column, str(tens + d)) for d in (-10, 10))


def run(connection: sqlite3.Connection, sql: str) -> list[tuple[Any, ...]] | None:
    """Return a query's rows, or None where it is an error."""
    try:
        return connection.execute(sql).fetchall()
    except sqlite3.Error:
        return None


def discriminates(question: Question, domain: Domain, connection: sqlite3.Connection) -> bool:
    """Return whether the gold query has exactly one result that no mutant has."""
    gold = run(connection, question.sql)
    if not gold or gold in ([(0,)], [(None,)]) or _tied(question.sql, connection):
        return False
    ordered = "ORDER BY" in question.sql
    key = _key(gold, ordered)
    for sql in mutants(question, domain):
        rows = run(connection, sql)
        if rows is not None and _key(rows, ordered) == key:
            return False
    return True


def _key(rows: list[tuple[Any, ...]], ordered: bool) -> list[str]:
    keys = [repr(row) for row in rows]
    return keys if ordered else sorted(keys)


def _tied(sql: str, connection: sqlite3.Connection) -> bool:
    """Return whether the largest groups tie, so that their order is arbitrary."""
    if "GROUP BY" not in sql or "LIMIT" not in sql:
        return False
    counts = run(connection, re.sub(r"SELECT .*? FROM", "SELECT count ( * ) FROM", sql).replace("LIMIT 1", "LIMIT 2"))
    return counts is None or len(counts) < 2 or counts[0] == counts[1]


def values_of(domain: Domain, connection: sqlite3.Connection) -> dict[str, list[Any]]:
    """Return every column's values, keyed `table.column`."""
    found = {}
    for table in (domain.parent, domain.child):
        for name in _names(table):
            found[f"{table.name}.{name}"] = [v for (v,) in connection.execute(f"SELECT {name} FROM {table.name}")]
    return found


def questions_of(domain: Domain, connection: sqlite3.Connection, scale: int, rng: random.Random) -> list[Question]:
    """Return a database's questions, no gold query twice, `scale * intent.share` of each intent if there are as many.

    They come intent by intent, in the order in which they were sampled.
    """
    rows = values_of(domain, connection)
    found: list[Question] = []
    seen: set[str] = set()
    for intent in INTENTS:
        wanted = scale * intent.share
        for _ in range(20 * wanted):
            question = draw(domain, intent, rows, rng)
            if question.sql not in seen and discriminates(question, domain, connection):
                seen.add(question.sql)
                found.append(question)
                wanted -= 1
                if not wanted:
                    break
    return found
