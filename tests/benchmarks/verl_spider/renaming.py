"""New names for tables, columns and values, the same in schema, question and query.

A model that is to answer questions about databases that it has never seen must copy names from the schema in front of
it. So labelled questions are shown again and again with names drawn from other train databases, or made up.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence

import attrs
from agentrig_langgraph_sql.schema import quoted
from canonical import bare, tokens_of
from schemas import Column, Schema, Table, words_of

_ONSETS = "b br c ch d dr f fl g gr h j k l m n p pr qu r s st t tr v w z"
_SYLLABLES = [onset + vowel for onset in _ONSETS.split() for vowel in "aeiou"]
_COMMON = "id name names type date year code description number title address status other"
_GENERIC = frozenset(_COMMON.split())
_SMALL = "the a an of in on at by for to is are was all each and or with from that which who how many"
_STOP = frozenset(_SMALL.split())


@attrs.frozen
class Pool:
    """Names to draw from, each with its words: of tables, and of columns by Spider's type; and text values."""

    tables: Sequence[tuple[str, str]]
    columns: Mapping[str, Sequence[tuple[str, str]]]
    values: Sequence[str]

    @classmethod
    def of(cls, schemas: Sequence[Schema], values: Sequence[str]) -> Pool:
        """Return the pool of some databases."""
        columns: dict[str, list[tuple[str, str]]] = {}
        for schema in schemas:
            for table in schema.tables:
                for column in table.columns:
                    columns.setdefault(column.type, []).append((column.name, column.words))
        tables = [(t.name, t.words) for s in schemas for t in s.tables]
        return cls(sorted(set(tables)), {k: sorted(set(v)) for k, v in sorted(columns.items())}, values)

    def table(self, rng: random.Random) -> tuple[str, str]:
        """Return a table's name and words."""
        return made_up(rng) if rng.random() < 0.2 else rng.choice(self.tables)

    def column(self, kind: str, rng: random.Random) -> tuple[str, str]:
        """Return a column's name and words."""
        return made_up(rng) if rng.random() < 0.2 else rng.choice(self.columns.get(kind) or self.columns["text"])

    def value(self, rng: random.Random) -> str:
        """Return a text value."""
        if rng.random() < 0.2:
            return made_up(rng)[1].title()
        return rng.choice(self.values)


def made_up(rng: random.Random) -> tuple[str, str]:
    """Return a name of syllables, in one of the usual forms, and its words."""
    words = ["".join(rng.choices(_SYLLABLES, k=rng.randint(2, 3))) + rng.choice(["", "", "n", "r", "s"])]
    if rng.random() < 0.3:
        words.append(rng.choice(["name", "id", "type", "code", "year", "count", "date"]))
    form = rng.randrange(4)
    if form == 0:
        name = "_".join(words)
    elif form == 1:
        name = "_".join(w.capitalize() for w in words)
    elif form == 2:
        name = words[0] + "".join(w.capitalize() for w in words[1:])
    else:
        name = "".join(w.capitalize() for w in words)
    return name, " ".join(words)


def with_names(schema: Schema, names: Mapping[str, tuple[str, str]]) -> Schema:
    """Return the schema with new names and words for some of its names (keys in small letters)."""

    def new(name: str) -> str:
        return names[name.lower()][0] if name.lower() in names else name

    def column(old: Column) -> Column:
        found = names.get(old.name.lower())
        return old if found is None else attrs.evolve(old, name=found[0], words=found[1])

    def table(old: Table) -> Table:
        words = names.get(old.name.lower(), ("", old.words))[1]
        primary = frozenset(map(new, old.primary))
        return Table(new(old.name), words, tuple(map(column, old.columns)), primary)

    keys = tuple(((new(a), new(b)), (new(c), new(d))) for (a, b), (c, d) in schema.foreign_keys)
    return Schema(schema.db_id, tuple(map(table, schema.tables)), keys)


def new_names(schema: Schema, which: Sequence[str], pool: Pool, rng: random.Random) -> dict[str, tuple[str, str]]:
    """Return new names for some of a schema's names, none of which the schema has already."""
    taken = {name.lower() for name in schema.names()}
    tables = {t.name.lower() for t in schema.tables}
    kinds = {c.name.lower(): c.type for t in schema.tables for c in t.columns}
    found = {}
    for name in sorted({name.lower() for name in which}):
        for _ in range(20):
            new = pool.table(rng) if name in tables else pool.column(kinds[name], rng)
            if new[0].lower() not in taken:
                taken.add(new[0].lower())
                found[name] = new
                break
    return found


def renamed_schema(schema: Schema, pool: Pool, rng: random.Random, share: float) -> Schema:
    """Return the schema with a share of its names sampled again."""
    which = [name for name in sorted(schema.names()) if rng.random() < share]
    return with_names(schema, new_names(schema, which, pool, rng))


def _mentions(question: str, words: str) -> Iterator[re.Match[str]]:
    """Yield where a question speaks of a name, in the singular or the plural."""
    parts = words.split()
    stem = re.escape(parts[-1])
    if len(parts[-1]) > 3:
        if stem.endswith("s") and not stem.endswith("ss"):
            stem = f"{stem[:-1]}s?"
        elif stem.endswith("y"):
            stem = f"{stem[:-1]}(?:y|ies)"
        else:
            stem = f"{stem}(?:s|es)?"
    body = r"[\s_-]+".join([*map(re.escape, parts[:-1]), stem])
    yield from re.finditer(rf"(?<!\w){body}(?!\w)", question, re.IGNORECASE)


def plural(words: str) -> str:
    """Return words in the plural, as far as spelling tells."""
    if words.endswith("s"):
        return words if not words.endswith("ss") else f"{words}es"
    if words.endswith("y") and words[-2:-1] not in "aeiou":
        return f"{words[:-1]}ies"
    return f"{words}es" if words.endswith(("ch", "sh", "x")) else f"{words}s"


def renamed(
    schema: Schema, question: str, query: str, pool: Pool, rng: random.Random, *, share: float = 0.7
) -> tuple[Schema, str, str]:
    """Return schema, question and query with other names and values, or as they are where nothing can change.

    Names that the query uses change only where the question speaks of them, so that it still says what the query asks;
    columns that join tables may change in any case, since the schema shows them at both. All others are free.

    Args:
        schema: As shown.
        question: The text.
        query: In the style of `canonical`.
        pool: The names and values to draw from.
        rng: The source of chance.
        share: The chance of each name and value to change.
    """
    tokens = tokens_of(query)
    used = {bare(t).lower() for t in tokens if not t.startswith("'")}
    words: dict[str, list[str]] = {}
    for table in schema.tables:
        words.setdefault(table.name.lower(), []).append(table.words)
        for column in table.columns:
            words.setdefault(column.name.lower(), []).append(column.words)
    joins = {a[1].lower() for a, b in schema.foreign_keys if a[1].lower() == b[1].lower()}
    spoken: dict[str, list[tuple[int, int]]] = {}
    held: list[tuple[int, int]] = [m.span() for t in tokens if t.startswith("'") for m in _literal(question, t)]
    for name in sorted(words, key=lambda n: -max(map(len, words[n]))):
        for text in dict.fromkeys([*words[name], words_of(name), name.replace("_", " ")]):
            if text in _STOP or len(text) < 2:
                continue
            for match in _mentions(question, text):
                if not any(a < match.end() and match.start() < b for a, b in held):
                    held.append(match.span())
                    spoken.setdefault(name, []).append(match.span())
    which = []
    for name in words:
        free = name not in used or name in spoken or name in joins
        chance = share * 0.5 if name in _GENERIC else share
        if free and rng.random() < chance:
            which.append(name)
    names = new_names(schema, which, pool, rng)
    edits = [
        (span, _as_spoken(question[slice(*span)], names[n][1])) for n, s in spoken.items() if n in names for span in s
    ]
    for at, token in enumerate(tokens):
        if token.startswith("'"):
            new = _new_value(token, pool, rng) if rng.random() < share else None
            places = list(_literal(question, token)) if new is not None else []
            if new is not None and places and tokens.count(token) == 1:
                tokens[at] = "'" + new.replace("'", "''") + "'"
                edits += [(m.span(), new) for m in places]
        elif re.fullmatch(r"\d+", token) and tokens[at - 1] != "LIMIT" and tokens.count(token) == 1:
            places = list(re.finditer(rf"(?<![\w.]){token}(?![\w.,]\d)(?!\w)", question))
            if len(places) == 1 and rng.random() < share:
                tokens[at] = str(rng.randint(10 ** (len(token) - 1), 10 ** len(token) - 1))
                edits.append((places[0].span(), tokens[at]))
        elif bare(token).lower() in names and (token == quoted(bare(token)) or token.startswith('"')):
            tokens[at] = quoted(names[bare(token).lower()][0])
    return with_names(schema, names), _edited(question, edits), " ".join(tokens)


def _literal(question: str, token: str) -> Iterator[re.Match[str]]:
    text = token[1:-1].replace("''", "'").strip("%")
    if text:
        yield from re.finditer(rf"(?<!\w){re.escape(text)}(?!\w)", question)


def _new_value(token: str, pool: Pool, rng: random.Random) -> str | None:
    """Return another text; none for patterns and for what looks like a number or a date."""
    if "%" in token or re.search(r"\d", token):
        return None
    return pool.value(rng)


def _as_spoken(old: str, words: str) -> str:
    """Return words in the number and with the capital of what they replace."""
    new = plural(words) if old.endswith("s") and not old.endswith("ss") else words
    return new[0].upper() + new[1:] if old[0].isupper() and new else new


def _edited(text: str, edits: Sequence[tuple[tuple[int, int], str]]) -> str:
    done, at = [], 0
    for (begin, end), new in sorted(edits):
        if begin < at:
            continue
        done += [text[at:begin], new]
        at = end
    return "".join([*done, text[at:]])
