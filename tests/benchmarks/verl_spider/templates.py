"""Questions made from schemas: many wordings of the things that people ask of databases, with their queries.

They need no labels. Their use is to teach a new model to read a schema, to copy names and values, and SQL itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
from agentrig_langgraph_sql.schema import quoted
from canonical import spaced
from phrases import AGGREGATES, COUNTS, SHOW, Phrases, at, names, of, own, singular, turned
from renaming import plural


@attrs.frozen
class Asked:
    """A question and its query, in the style of `canonical`."""

    question: str
    query: str


class Asker(Phrases):
    """Draws questions about one schema."""

    def draw(self) -> Asked | None:
        """Return a question, or None where the schema lacks what the drawn kind needs."""
        kinds, weights = zip(*KINDS, strict=True)
        kind = self.rng.choices(kinds, weights)[0]
        try:
            found = kind(self)
        except IndexError:  # nothing to choose from
            return None
        question = " ".join(found.question.split()).replace(" ,", ",").replace(" ?", "?").replace(" .", ".")
        if self.rng.random() < 0.1:
            question = question.rstrip("?.")
        return Asked(question[:1].upper() + question[1:], spaced(found.query))

    # Kinds of questions.

    def columns(self) -> Asked:
        """Some columns of all rows, or of those that meet a condition."""
        t = self.table()
        chosen, ts = self.several(t), self.noun(t)
        where, said = self.maybe(t, own, 0.6)
        distinct = self.rng.random() < 0.12
        said_columns = f"{self.one('different', 'distinct', 'unique') if distinct else ''} {self.listed(chosen)}"
        every = "" if said else self.one("", "all ", "all the ", "each of the ")
        question = self.rng.choice(
            [
                lambda: self.opened(f"the {said_columns} of {every}{ts}{said}"),
                lambda: self.opened(f"the {said_columns} of the {ts}{said}"),
                lambda: self.opened(f"the {said_columns} for {every}{ts}{said}"),
                lambda: self.opened(f"{said_columns} of {every}{ts}{said}"),
                lambda: self.opened(f"all {singular(t.words)} {said_columns}{said}"),
                lambda: f"Which {ts}{said or ' are there'}? {self.one(*SHOW)} the {said_columns}.",
                lambda: f"For {every}{ts}{said}, {self.one('what are', 'show', 'list')} the {said_columns}?",
                lambda: f"What is the {said_columns} of {every or 'each of the '}{ts}{said}?",
            ]
        )()
        return Asked(
            question, f"SELECT {'DISTINCT ' if distinct else ''}{names(chosen, own)} FROM {quoted(t.name)}{where}"
        )

    def count(self) -> Asked:
        """How many rows, or different values."""
        t = self.table()
        where, said = self.maybe(t, own, 0.6)
        ts = self.noun(t)
        if self.rng.random() < 0.25:
            c = self.rng.choice(self.plain(t))
            word, cs = self.one("different", "distinct", "unique"), self.name(c, many=True)
            question = self.one(
                f"How many {word} {cs} are there for the {ts}{said}?",
                f"How many {word} {cs} do the {ts}{said} have?",
                f"What is the number of {word} {cs} of {ts}{said}?",
                f"Count the number of {word} {cs} of the {ts}{said}.",
                f"How many {word} {cs} of {ts}{said} are there?",
            )
            return Asked(question, f"SELECT COUNT ( DISTINCT {own(c)} ) FROM {quoted(t.name)}{where}")
        question = self.one(
            f"How many {ts} are there{said}?", f"How many {ts}{said} are there?", f"Count the number of {ts}{said}.",
            f"What is the number of {ts}{said}?", f"What is the total number of {ts}{said}?", f"Count the {ts}{said}.",
            f"{self.one(*SHOW)} the number of {ts}{said}.", f"How many {ts} do we have{said}?",
            f"Return the total count of {ts}{said}.", f"How many {ts} exist{said}?",
        )  # fmt: skip
        return Asked(question, f"SELECT COUNT ( * ) FROM {quoted(t.name)}{where}")

    def aggregate(self) -> Asked:
        """Averages, sums and extremes."""
        t = self.table(lambda t: bool(self.numbers(t)))
        where, said = self.maybe(t, own, 0.4)
        c, ts = self.rng.choice(self.numbers(t)), self.noun(t)
        parts = self.rng.sample(list(AGGREGATES), self.rng.choices([1, 2, 3], [6, 3, 1])[0])
        words = [self.one(*AGGREGATES[p]) for p in parts]
        said_parts = words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
        question = self.one(
            self.opened(f"the {said_parts} {c.words} of {self.one('', 'all ', 'the ')}{ts}{said}", what="What is"),
            self.opened(
                f"the {said_parts} {self.name(c)} for {self.one('', 'all ', 'the ')}{ts}{said}", what="What is"
            ),
            self.opened(f"the {said_parts} {self.name(c)} across all {ts}{said}"),
            f"What is the {said_parts} {singular(t.words)} {c.words}{said}?",
        )
        selected = " , ".join(f"{p} ( {own(c)} )" for p in parts)
        return Asked(question, f"SELECT {selected} FROM {quoted(t.name)}{where}")

    def ordered(self) -> Asked:
        """Rows in an order, perhaps only the first."""
        t = self.table()
        chosen, ts = self.several(t), self.noun(t)
        numbers = self.numbers(t)
        top = bool(numbers) and self.rng.random() < 0.6
        c = self.rng.choice(numbers if top else self.plain(t))
        down = self.rng.random() < 0.6
        where, said = self.maybe(t, own, 0.2)
        sql = f"SELECT {names(chosen, own)} FROM {quoted(t.name)}{where} ORDER BY {own(c)}{' DESC' if down else ''}"
        listed = self.listed(chosen)
        if not top:
            order = self.one("descending", "decreasing") if down else self.one("ascending", "increasing")
            tail = self.rng.choice(
                [
                    f"in {order} order of {c.words}", f"sorted by {c.words} in {order} order",
                    f"ordered by {c.words} {order}", f"ordered by their {c.words} in {order} order",
                    f"sorted by {c.words} from {'high to low' if down else 'low to high'}",
                    f"in {'reverse ' if down else ''}alphabetical order of {c.words}" if c.type == "text" else
                    f"from the {'largest to the smallest' if down else 'smallest to the largest'} {c.words}",
                    f"in {order} order of {c.words}" if down else f"ordered by {c.words}",
                ]
            )  # fmt: skip
            every = "" if said else self.one("", "all ", "the ")
            return Asked(self.opened(f"the {listed} of {every}{ts}{said} {tail}"), sql)
        most = self.one("highest", "largest", "most", "greatest", "maximum", "top") if down else self.one(
            "lowest", "smallest", "least", "minimum", "fewest"
        )  # fmt: skip
        if c.words == "age" and self.rng.random() < 0.6:
            most, extreme = "", self.one("oldest") if down else "youngest"
        else:
            extreme = ""
        k = self.rng.choice([3, 5, 2, 10, 4]) if self.rng.random() < 0.25 else 1
        single = singular(t.words)
        if k > 1:
            number = self.one(str(k), COUNTS[k])
            question = self.opened(f"the {listed} of the {extreme or 'top' if not most or down else 'bottom'} {number} "
                                   f"{ts}{said} with the {most or 'highest'} {c.words}")  # fmt: skip
            most = most or ("highest" if down else "lowest")
            question = self.one(question, self.opened(f"the {listed} of the {number} {ts}{said} with {most} {c.words}"))
        elif extreme:
            question = self.opened(f"the {listed} of the {extreme} {single}{said}", what="What is")
        else:
            question = self.one(
                self.opened(f"the {listed} of the {single}{said} with the {most} {c.words}", what="What is"),
                self.opened(f"the {listed} of the {single}{said} that has the {most} {c.words}"),
                f"Which {single}{said} has the {most} {c.words}? {self.one(*SHOW)} its {listed}.",
                self.opened(f"{listed} for the {single}{said} with {most} {c.words}"),
            )
        return Asked(question, f"{sql} LIMIT {k}")

    def grouped(self) -> Asked:
        """A count or another aggregate for each value of a column."""
        t = self.table(lambda t: bool(self.texts(t)))
        c, ts = self.rng.choice(self.texts(t)), self.noun(t)
        where, said = self.maybe(t, own, 0.12)
        numbers = [n for n in self.numbers(t) if n != c]
        if numbers and self.rng.random() < 0.35:
            n, part = self.rng.choice(numbers), self.rng.choice(list(AGGREGATES))
            value, words = f"{part} ( {own(n)} )", f"the {self.one(*AGGREGATES[part])} {n.words} of {ts}{said}"
        else:
            value, words = "COUNT ( * )", self.one(f"the number of {ts}{said}", f"how many {ts}{said} there are")
        each = self.one("each", "every", "each different")
        value_of = self.one(f"the {c.words}", plural(c.words), f"different {plural(c.words)}")
        question = self.one(
            f"For {each} {c.words}, {self.one('show', 'return', 'find', 'list')} {words}.",
            f"{self.one(*SHOW)} {words} for {each} {c.words}.",
            f"{self.one(*SHOW)} {value_of} and {words}.",
            f"What are the {plural(c.words)} and {words} for {each} {c.words}?",
            f"What is {words.replace('how many', 'the number of').replace(' there are', '')} for {each} {c.words}?",
            f"{self.one(*SHOW)} {words} grouped by {c.words}.",
        )
        return Asked(question, f"SELECT {own(c)} , {value} FROM {quoted(t.name)}{where} GROUP BY {own(c)}")

    def common(self) -> Asked:
        """The values with the most rows, or with more than so many."""
        t = self.table(lambda t: bool(self.texts(t)))
        c, ts = self.rng.choice(self.texts(t)), self.noun(t)
        sql = f"SELECT {own(c)} FROM {quoted(t.name)} GROUP BY {own(c)}"
        if self.rng.random() < 0.5:
            down = self.rng.random() < 0.75
            most = "most" if down else self.one("fewest", "least")
            question = self.one(
                f"Which {c.words} has the {most} {ts}?", f"What is the {most} common {c.words} of the {ts}?".replace(
                    "fewest", "least"),
                self.opened(f"the {c.words} with the {most} number of {ts}", what="What is"),
                self.opened(f"the {most} common {c.words} across all {ts}", what="What is").replace("fewest", "least"),
                self.opened(f"the {c.words} shared by the {most} {ts}", what="What is"),
                f"Which {c.words} is the {most} frequent one among {ts}?".replace("fewest", "least"),
            )  # fmt: skip
            return Asked(question, f"{sql} ORDER BY COUNT ( * ){' DESC' if down else ''} LIMIT 1")
        sql_having, said = self.having(ts)
        question = self.one(
            f"Which {plural(c.words)} have {said}?", self.opened(f"the {plural(c.words)} that have {said}"),
            self.opened(f"the {plural(c.words)} with {said}"), self.opened(f"the {plural(c.words)} shared by {said}"),
            f"Which {c.words} has {said}?",
        )  # fmt: skip
        return Asked(question, f"{sql} HAVING {sql_having}")

    def having(self, things: str) -> tuple[str, str]:
        """Return a condition on a count and its words."""
        k = self.rng.choice([1, 2, 2, 3, 3, 4, 5, 10])
        number = self.one(str(k), COUNTS[k])
        op = self.rng.choice([">", ">", ">=", ">=", "<", "<=", "="])
        word = {">": "more than", ">=": "at least", "<": "fewer than", "<=": "at most", "=": "exactly"}[op]
        return f"COUNT ( * ) {op} {k}", f"{word} {number} {things}"

    def related(self) -> Asked:
        """Columns of one table by a condition on, or beside columns of, another that it is joined to."""
        child, parent, on = self.joined()
        here, there = (child, parent) if self.rng.random() < 0.5 else (parent, child)
        chosen = self.several(here, 2)
        source = f"{quoted(here.name)} JOIN {quoted(there.name)} ON {turned(on, here)}"
        hs, s = self.noun(here), singular(there.words)
        if self.rng.random() < 0.4:
            more = self.several(there, 1)
            first, second, h = self.listed(chosen), self.listed(more), singular(here.words)
            question = self.one(
                self.opened(f"the {first} of {hs} and the {second} of their {self.noun(there)}"),
                self.opened(f"the {first} of each {h} and the {second} of the {s}"),
                f"For each {h}, {self.one('show', 'return')} its {first} and the {s} {second}.",
                self.opened(f"the {first} of all {hs} together with the {second} of the corresponding {s}"),
            )
            selected = f"{names(chosen, of(here))} , {names(more, of(there))}"
            return Asked(question, f"SELECT {selected} FROM {source}")
        sql, said = self.conditions(there, of(there))
        distinct = self.rng.random() < 0.15
        listed = f"{self.one('different ', 'distinct ') if distinct else ''}{self.listed(chosen)}"
        link = self.one("of", "for", "that belong to", "associated with", "related to", "that have")
        question = self.one(
            self.opened(f"the {listed} of {hs} {link} the {s} {said}"),
            self.opened(f"the {listed} of {hs} {link} {self.noun(there)} {said}"),
            self.opened(f"the {listed} of the {hs} {link} {s} {said}"),
            f"For {self.noun(there)} {said}, {self.one('what are', 'show')} the {listed} of their {hs}?",
            f"Which {hs} {link} a {s} {said}? {self.one(*SHOW)} the {listed}.",
        )
        if self.rng.random() < 0.2:
            question = self.one(
                f"How many {hs} are {link} the {s} {said}?", f"Count the {hs} {link} {self.noun(there)} {said}."
            )
            return Asked(question, f"SELECT COUNT ( * ) FROM {source} WHERE {sql}")
        return Asked(
            question, f"SELECT {'DISTINCT ' if distinct else ''}{names(chosen, of(here))} FROM {source} WHERE {sql}"
        )

    def related_counts(self) -> Asked:
        """How many children each parent has; the one with the most; those with so many."""
        child, parent, on = self.joined()
        chosen = [self.label(parent)] if self.rng.random() < 0.7 else self.several(parent, 2)
        cs, p, ps = self.noun(child), singular(parent.words), self.noun(parent)
        key = on.split(" = ")[0]
        source = f"FROM {quoted(parent.name)} JOIN {quoted(child.name)} ON {on} GROUP BY {key}"
        listed = self.listed(chosen)
        kind = self.rng.random()
        selected = names(chosen, of(parent))
        if kind < 0.34:
            question = self.one(
                self.opened(f"the {listed} of each {p} and the number of {cs}"),
                self.opened(f"the {listed} of {ps} and the number of {cs} they have"),
                f"How many {cs} does each {p} have? {self.one(*SHOW)} the {listed} and the count.",
                f"For each {p}, {self.one('show', 'return')} the {listed} and the number of {cs}.",
                f"What are the {listed} of every {p}, and how many {cs} does each have?",
            )
            return Asked(question, f"SELECT {selected} , COUNT ( * ) {source}")
        if kind < 0.7:
            down = self.rng.random() < 0.8
            most = "most" if down else self.one("fewest", "least number of")
            question = self.one(
                f"Which {p} has the {most} {cs}? {self.one(*SHOW)} its {listed}.",
                self.opened(f"the {listed} of the {p} with the {most} {cs}", what="What is"),
                self.opened(f"the {listed} of the {p} that has the {most} {cs}"),
                self.opened(f"the {listed} of the {p} with the {'largest' if down else 'smallest'} number of {cs}"),
            )
            return Asked(question, f"SELECT {selected} {source} ORDER BY COUNT ( * ){' DESC' if down else ''} LIMIT 1")
        sql, said = self.having(cs)
        question = self.one(
            self.opened(f"the {listed} of {ps} with {said}"), self.opened(f"the {listed} of {ps} that have {said}"),
            f"Which {ps} have {said}? {self.one(*SHOW)} their {listed}.",
            self.opened(f"the {listed} of all {ps} having {said}"),
        )  # fmt: skip
        return Asked(question, f"SELECT {selected} {source} HAVING {sql}")

    def linked(self) -> Asked:
        """Through a table that links two others."""
        one, two = self.rng.choice(self._links)
        here, link, there = (self.schema.table(n) for n in (one[1][0], one[0][0], two[1][0]))
        chosen = self.several(here, 2)
        source = (
            f"{quoted(here.name)} JOIN {quoted(link.name)} ON {at(one[1])} = {at(one[0])}"
            f" JOIN {quoted(there.name)} ON {at(two[0])} = {at(two[1])}"
        )
        hs, listed = self.noun(here), self.listed(chosen)
        if self.rng.random() < 0.3:
            more = [self.label(there)]
            question = self.opened(
                f"the {listed} of {hs} and the {self.listed(more)} of the {self.noun(there)} they have {link.words}"
            )
            return Asked(question, f"SELECT {names(chosen, of(here))} , {names(more, of(there))} FROM {source}")
        sql, said = self.condition(there, of(there))
        question = self.one(
            self.opened(f"the {listed} of {hs} that have {self.noun(there)} {said}"),
            self.opened(f"the {listed} of {hs} with the {singular(there.words)} {said}"),
            self.opened(f"the {listed} of the {hs} {link.words} {self.noun(there)} {said}"),
            f"Which {hs} have a {singular(there.words)} {said}? {self.one(*SHOW)} the {listed}.",
        )
        return Asked(question, f"SELECT {names(chosen, of(here))} FROM {source} WHERE {sql}")

    def without(self) -> Asked:
        """Parents that no child points to."""
        child, parent = self.rng.choice(self.schema.foreign_keys)
        p, c = self.schema.table(parent[0]), self.schema.table(child[0])
        chosen = self.several(p, 2)
        ps, cs, s = self.noun(p), self.noun(c), singular(c.words)
        inner = f"( SELECT {quoted(child[1])} FROM {quoted(child[0])} )"
        if self.rng.random() < 0.25:
            question = self.one(f"How many {ps} do not have any {s}?", f"Count the number of {ps} without {cs}.",
                                f"How many {ps} have no {cs}?")  # fmt: skip
            return Asked(question, f"SELECT COUNT ( * ) FROM {quoted(p.name)} WHERE {quoted(parent[1])} NOT IN {inner}")
        listed = self.listed(chosen)
        question = self.one(
            self.opened(f"the {listed} of {ps} that do not have any {s}"),
            self.opened(f"the {listed} of {ps} that have no {cs}"),
            self.opened(f"the {listed} of {ps} without {self.one('any ', '')}{cs}"),
            self.opened(f"the {listed} of {ps} who do not have a {s}"),
            f"Which {ps} are not in any {s}? {self.one(*SHOW)} the {listed}.",
            f"Which {ps} have never had a {s}? List their {listed}.",
        )
        return Asked(
            question, f"SELECT {names(chosen, own)} FROM {quoted(p.name)} WHERE {quoted(parent[1])} NOT IN {inner}"
        )

    def sets(self) -> Asked:
        """Values that rows of both kinds have, or of one kind only."""
        t = self.table()
        c, ts = self.rng.choice(self.plain(t)), self.noun(t)
        first, said = self.condition(t, own)
        second, also = self.condition(t, own)
        cs = plural(c.words)
        kind = self.one("INTERSECT", "INTERSECT", "EXCEPT", "UNION")
        table = quoted(t.name)
        if kind == "EXCEPT" and self.rng.random() < 0.5:
            question = self.one(
                self.opened(f"the {cs} of {ts} except for those {said}"),
                self.opened(f"the {cs} that are not used by any {ts} {said}"),
                f"Which {cs} have no {ts} {said}?",
            )
            return Asked(question, f"SELECT {own(c)} FROM {table} EXCEPT SELECT {own(c)} FROM {table} WHERE {first}")
        words = {
            "INTERSECT": [f"both {ts} {said} and {ts} {also}", f"{ts} {said} and also {ts} {also}"],
            "EXCEPT": [f"{ts} {said} but not {ts} {also}"],
            "UNION": [f"{ts} {said} or {ts} {also}", f"either {ts} {said} or {also}"],
        }[kind]
        question = self.one(
            self.opened(f"the {cs} of {self.one(*words)}"),
            self.opened(f"the {cs} shared by {self.one(*words)}") if kind == "INTERSECT" else
            self.opened(f"the {cs} with {self.one(*words)}"),
            f"Which {cs} have {self.one(*words)}?",
        )  # fmt: skip
        return Asked(
            question,
            f"SELECT {own(c)} FROM {table} WHERE {first} {kind} SELECT {own(c)} FROM {table} WHERE {second}",
        )

    def nested(self) -> Asked:
        """Rows compared with an average or an extreme of all."""
        t = self.table(lambda t: bool(self.numbers(t)))
        n, ts = self.rng.choice(self.numbers(t)), self.noun(t)
        chosen = [c for c in self.several(t) if c != n] or [self.label(t)]
        listed, table, c = self.listed(chosen), quoted(t.name), own(n)
        if self.rng.random() < 0.6:
            op = self.one(">", "<")
            side = self.one("above", "greater than", "higher than", "more than") if op == ">" else self.one(
                "below", "less than", "lower than"
            )  # fmt: skip
            question = self.one(
                self.opened(f"the {listed} of {ts} whose {n.words} is {side} the average"),
                self.opened(f"the {listed} of {ts} with {n.words} {side} the average {n.words}"),
                self.opened(f"the {listed} of all {ts} with {side} average {n.words}"),
            )
            return Asked(
                question, f"SELECT {names(chosen, own)} FROM {table} WHERE {c} {op} ( SELECT AVG ( {c} ) FROM {table} )"
            )
        part = self.one("MAX", "MIN")
        word = self.one(*AGGREGATES[part])
        question = self.one(
            self.opened(f"the {listed} of the {ts} whose {n.words} equals the {word}"),
            self.opened(f"the {listed} of all {ts} that have the {word} {n.words} of all"),
        )
        return Asked(
            question, f"SELECT {names(chosen, own)} FROM {table} WHERE {c} = ( SELECT {part} ( {c} ) FROM {table} )"
        )

    def present(self) -> Asked:
        """Parents that some child points to."""
        child, parent, on = self.joined()
        chosen, ps, s = self.several(parent, 2), self.noun(parent), singular(child.words)
        listed = self.listed(chosen)
        question = self.one(
            self.opened(
                f"the {self.one('different', 'distinct')} {listed} of {ps} that have {self.one('some', 'any', 'a')} {s}"
            ),
            self.opened(f"the {listed} of all the distinct {ps} who have {self.noun(child)}"),
            self.opened(f"the {self.one('distinct', 'unique')} {listed} of {ps} with at least one {s}"),
        )
        source = f"{quoted(parent.name)} JOIN {quoted(child.name)} ON {on}"
        return Asked(question, f"SELECT DISTINCT {names(chosen, of(parent))} FROM {source}")


KINDS: Sequence[tuple[Callable[[Asker], Asked], float]] = (
    (Asker.columns, 16),
    (Asker.count, 9),
    (Asker.aggregate, 8),
    (Asker.ordered, 12),
    (Asker.grouped, 8),
    (Asker.common, 8),
    (Asker.related, 14),
    (Asker.related_counts, 11),
    (Asker.linked, 5),
    (Asker.without, 5),
    (Asker.sets, 4),
    (Asker.nested, 4),
    (Asker.present, 2),
)
"""Kinds of questions with their weights."""
