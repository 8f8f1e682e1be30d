"""What `mini` is warmed up on: the agent's own prompts, filled with questions about databases with random names.

Random names teach copying from the schema rather than the schemas themselves.
"""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
from agentrig_grpo.warmup import Example
from agentrig_langgraph_sql.database import Result
from agentrig_langgraph_sql.prompts import SHORT
from agentrig_langgraph_sql.schema import render, tables_of
from agentrig_spider.tasks.databases import create_statement, rows_of
from agentrig_spider.tasks.domains import SEEN, Category, Domain, Number, Table
from agentrig_spider.tasks.questions import Question, Wording, draw, mutants, values_of
from agentrig_spider.tasks.wordings import INTENTS
from words import names, values

RESULT_LIMIT = 64
"""`execution_truncate` of the recipe: results are read by a model with little room."""


@attrs.frozen(kw_only=True)
class Share:
    """How many of the wordings the warm-up sees: the first so many of each list."""

    frames: int = 2
    conditions: int = 2

    def allows(self, frame: int, conditions: Sequence[int]) -> bool:
        """Return whether a wording is among them."""
        return frame < self.frames and all(c < self.conditions for c in conditions)


def chat(template: Any, completion: str, **fields: str) -> dict[str, Any]:
    """Return one example as the warm-up takes it."""
    return {"messages": template.messages(**fields), "completion": completion}


def encode(tokenizer: Any, example: dict[str, Any]) -> Example:
    """Return one example as token ids; the completion ends with the tokenizer's end-of-sequence token."""
    text = tokenizer.apply_chat_template(example["messages"], add_generation_prompt=True, tokenize=False)
    prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
    completion = tokenizer(example["completion"], add_special_tokens=False)["input_ids"]
    return Example(prompt, [*completion, tokenizer.eos_token_id])


class Database:
    """A domain's database, as the agent would see it."""

    def __init__(self, domain: Domain, connection: sqlite3.Connection) -> None:
        self.domain = domain
        self.connection = connection
        self.schema = render(tables_of(connection), style=SHORT.schema_style, limit=2048)
        self.rows = values_of(domain, connection)

    @classmethod
    def new(cls, domain: Domain, rng: random.Random) -> Database:
        """Return a database in memory with rows at random."""
        connection = sqlite3.connect(":memory:")
        for table, rows in zip((domain.parent, domain.child), rows_of(domain, rng), strict=True):
            connection.execute(create_statement(domain, table))
            marks = ", ".join("?" * len(rows[0]))
            connection.executemany(f"INSERT INTO {table.name} VALUES ({marks})", rows)
        return cls(domain, connection)

    def run(self, sql: str) -> tuple[list[Any] | None, str]:
        """Return a query's rows (None for an error) and what the model would read of them."""
        try:
            cursor = self.connection.execute(sql)
            rows = cursor.fetchall()
        except sqlite3.Error as error:
            return None, Result(error=str(error)).text(RESULT_LIMIT, header=SHORT.header)
        return rows, Result(columns=(), rows=rows).text(RESULT_LIMIT, header=SHORT.header)


def renamed(domain: Domain, rng: random.Random) -> Domain:
    """Return a domain of the same form whose names and values are words at random."""
    pool = names()
    words = iter(rng.sample(pool, len(pool)))
    texts = values()

    def table(old: Table) -> Table:
        categories = []
        for category in old.categories:
            name = next(words)
            categories.append(Category(name, _plural(name), "", rng.sample(texts, len(category.values))))
        numbers = [Number(next(words), *rng.choice(((10, 99), (10, 99), (1950, 2019)))) for _ in old.numbers]
        return Table(next(words), next(words), rng.sample(texts, old.rows), categories, numbers, old.rows)

    return Domain("renamed", table(domain.parent), table(domain.child))


def _plural(name: str) -> str:
    return f"{name[:-1]}ies" if name.endswith("y") else f"{name}s"


def plain(question: Question, share: Share, rng: random.Random) -> Wording | None:
    """Return one of the question's wordings that the warm-up may see."""
    allowed = [w for w in question.wordings() if share.allows(w.frame, w.conditions)]
    return rng.choice(allowed) if allowed else None


def on_renamed(n: int, share: Share, rng: random.Random) -> Iterator[tuple[Database, Question, str]]:
    """Yield `n` questions on databases with random names, twelve on each."""
    weights = [intent.share for intent in INTENTS]
    while n > 0:
        database = Database.new(renamed(rng.choice(SEEN), rng), rng)
        for intent in rng.choices(INTENTS, weights, k=12):
            question = draw(database.domain, intent, database.rows, rng)
            wording = plain(question, share, rng)
            if wording is not None and n > 0:
                n -= 1
                yield database, question, wording.text


def reading(tokenizer: Any, schema: str, question: str) -> Example:
    """Return an example of reading: the question is predicted from the schema; no answer is shown."""
    before = f"{schema}\n"
    messages = SHORT.write.messages(schema=schema, question=question)
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=False, return_dict=False)
    opening = SHORT.write.messages(schema=schema, question="")
    start = len(tokenizer.apply_chat_template(opening, add_generation_prompt=False, return_dict=False))
    assert tokenizer.decode(ids[:start]).endswith(before), "the question must begin a token of its own"
    return Example(ids[:start], ids[start:])


def turns(
    database: Database, question: Question, text: str, rng: random.Random, *, others: float
) -> Iterator[dict[str, Any]]:
    """Yield a question's write turn, and by the chance `others` a check and a rewrite of a right or wrong query."""
    yield chat(SHORT.write, question.sql, schema=database.schema, question=text)
    for kind in ("check", "rewrite"):
        if rng.random() < others:
            query, right = tried(database, question, rng)
            yield later_turn(kind, database, text, question.sql, query, right=right)


def later_turn(kind: str, database: Database, text: str, gold: str, query: str, *, right: bool) -> dict[str, Any]:
    """Return a check of a query or its rewrite, after what running it really gave."""
    fields = {"schema": database.schema, "question": text, "query": query, "result": database.run(query)[1]}
    if kind == "check":
        return chat(SHORT.check, SHORT.correct if right else SHORT.incorrect, **fields)
    return chat(SHORT.rewrite, gold, **fields)


def tried(database: Database, question: Question, rng: random.Random) -> tuple[str, bool]:
    """Return the gold query or one that goes wrong, and whether its result is right."""
    if rng.random() < 0.5:
        return question.sql, True
    wrong = rng.choice(list(mutants(question, database.domain)))
    rows, gold = database.run(wrong)[0], database.run(question.sql)[0]
    return wrong, same(rows, gold, question.sql)


def same(rows: Sequence[Any] | None, gold: Sequence[Any] | None, sql: str) -> bool:
    """Return whether two results are equal, in order where the gold query orders; an error (None) never is."""
    if rows is None or gold is None:
        return False
    keys = [repr(row) for row in rows], [repr(row) for row in gold]
    return keys[0] == keys[1] if "ORDER BY" in sql else sorted(keys[0]) == sorted(keys[1])
