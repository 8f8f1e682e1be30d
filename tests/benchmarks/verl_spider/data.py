"""Makes training data for the starting model and the Spider folder of the run from real Spider. See README.md.

python tests/benchmarks/verl_spider/data.py --spider DIR --out DIR
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import byte_tokenizer
import pyarrow as pa
import pyarrow.parquet as pq
import turns
from agentrig_langgraph_sql.database import run_query
from agentrig_langgraph_sql.prompts import SHORT
from agentrig_langgraph_sql.schema import quoted
from agentrig_spider import ExecMatch
from agentrig_spider.tasks.spider import COLUMNS, read_rows
from canonical import bare, checked, tokens_of
from renaming import Pool, renamed, renamed_schema
from schemas import Schema, read_schemas, shuffled, thinned, value_pool
from templates import Asker
from turns import Turn

VOCABULARY = 6000
NOTICE = """\
Part of Spider 1.0 (Yu et al., EMNLP 2018, https://yale-lily.github.io/spider), CC BY-SA 4.0, and what was made of it.
If you pass it on, name the source and keep the licence.
"""


@attrs.frozen
class Labelled:
    """A question of the labelled part with its gold query, in the style of `canonical` where `styled`."""

    schema: Schema
    database: Path
    question: str
    gold: str
    styled: bool


@attrs.frozen(kw_only=True)
class Amounts:
    """How much of everything.

    Attributes:
        templates: Sequences of made questions in the first stage; half of them hold three questions.
        renamed: Variants of each labelled question with other names, in the first stage and in the second.
        shown: Variants of each labelled question with its own names, in the second stage.
        fresh: Made questions on whole schemas in the second stage.
    """

    templates: int = 170_000
    renamed: tuple[int, int] = (12, 5)
    shown: int = 3
    fresh: int = 12_000

    def scaled(self, share: float) -> Amounts:
        """Return a share of it, for trials."""
        return Amounts(
            templates=round(self.templates * share),
            renamed=(max(1, round(self.renamed[0] * share)), max(1, round(self.renamed[1] * share))),
            shown=max(1, round(self.shown * share)),
            fresh=round(self.fresh * share),
        )


def split(db_ids: Sequence[str], share: float, seed: int) -> tuple[list[str], list[str]]:
    """Return the databases whose gold queries are shown, and the others."""
    mixed = random.Random(f"spider {seed} split").sample(sorted(db_ids), len(db_ids))
    cut = round(len(mixed) * share)
    return sorted(mixed[:cut]), sorted(mixed[cut:])


def database_of(spider: Path, db_id: str) -> Path:
    """Return a database's file."""
    return spider / "database" / db_id / f"{db_id}.sqlite"


def labelled(spider: Path, rows: Sequence[Mapping[str, str]], schemas: Mapping[str, Schema]) -> list[Labelled]:
    """Return labelled questions, their gold queries in one style where that gives the same rows."""
    found = []
    for row in rows:
        database = database_of(spider, row["db_id"])
        gold, styled = checked(row["query"], schemas[row["db_id"]], database)
        found.append(Labelled(schemas[row["db_id"]], database, row["question"], gold, styled))
    return found


def made(schemas: Sequence[Schema], pool: Pool, rng: random.Random, n: int, *, whole: bool) -> Iterator[Turn]:
    """Yield `n` sequences of made questions.

    Args:
        schemas: Of train databases.
        pool: Of names and values.
        rng: The source of chance.
        n: How many.
        whole: Real schemas as they are but for their order, one question each; else parts of schemas, most of them with
            other names, and half of the sequences with three questions.
    """
    while n > 0:
        schema = rng.choice(schemas)
        if not whole:
            schema = thinned(schema, rng, keep=rng.choice([1, 2, 3, 3, 4, 4, 5, 6, 20]))
            schema = _narrowed(schema, set(), rng)
            schema = renamed_schema(schema, pool, rng, rng.choice([0.0, 0.6, 0.9, 1.0, 1.0]))
        schema = shuffled(schema, rng)
        asker = Asker(schema, pool, rng)
        k = 3 if not whole and rng.random() < 0.5 else 1
        drawn = [asked for _ in range(3 * k) if (asked := asker.draw()) is not None][:k]
        if len(drawn) == k:
            n -= 1
            yield turns.conversation(schema.text(), [(a.question, a.query) for a in drawn])


def _narrowed(schema: Schema, used: set[str], rng: random.Random) -> Schema:
    """Return the schema without some of its columns; keys and used ones (names in small letters) stay."""
    keys = {place for pair in schema.foreign_keys for place in pair}
    most = rng.choice([4, 6, 8, 12, 99])
    tables = []
    for table in schema.tables:
        fixed = [c for c in table.columns if (table.name, c.name) in keys or c.name.lower() in used]
        rest = [c for c in table.columns if c not in fixed]
        kept = {c.name for c in fixed} | {c.name for c in rng.sample(rest, min(len(rest), max(1, most - len(fixed))))}
        tables.append(attrs.evolve(table, columns=tuple(c for c in table.columns if c.name in kept)))
    return attrs.evolve(schema, tables=tuple(tables))


def _fewer(schema: Schema, used: set[str], rng: random.Random) -> Schema:
    """Return the schema without some of the tables that a query does not use."""
    share = rng.choice([0.0, 0.0, 0.4, 0.8])
    tables = tuple(t for t in schema.tables if t.name.lower() in used or rng.random() >= share)
    kept = {t.name for t in tables}
    keys = tuple(k for k in schema.foreign_keys if k[0][0] in kept and k[1][0] in kept)
    return Schema(schema.db_id, tables or schema.tables, keys if tables else schema.foreign_keys)


def with_other_names(items: Sequence[Labelled], pool: Pool, rng: random.Random, times: int) -> Iterator[Turn]:
    """Yield each labelled question `times` times, with other names in schema, question and query."""
    for item in items:
        if not item.styled:
            continue
        used = {bare(t).lower() for t in tokens_of(item.gold)}
        for _ in range(times):
            schema = _narrowed(_fewer(item.schema, used, rng), used, rng)
            share = rng.choice([0.3, 0.6, 0.9])
            schema, question, query = renamed(schema, item.question, item.gold, pool, rng, share=share)
            yield turns.write(shuffled(schema, rng).text(), question, query)


def with_own_names(items: Sequence[Labelled], rng: random.Random, times: int) -> Iterator[Turn]:
    """Yield each labelled question as the agent shows it, then `times - 1` times with the schema in another order."""
    for item in items:
        yield turns.write(item.schema.text(), item.question, item.gold)
        for _ in range(times - 1):
            yield turns.write(shuffled(item.schema, rng).text(), item.question, item.gold)


def later_turns(items: Sequence[Labelled], rng: random.Random) -> Iterator[Turn]:
    """Yield checks of right and wrong queries and rewrites, after what running the queries really gave."""
    others: dict[str, list[str]] = {}
    for item in items:
        others.setdefault(item.schema.db_id, []).append(item.gold)
    tried = []
    for item in items:
        columns = {
            quoted(c.name): [quoted(o.name) for o in t.columns if o != c] for t in item.schema.tables for c in t.columns
        }
        tokens = tokens_of(item.gold)
        for way in ("mutant", "mutant", "other"):
            other = rng.choice(others[item.schema.db_id])
            tried.append((item, other if way == "other" else mutated(tokens, columns, rng)))
    scores = ExecMatch().score_many([(query, item.gold, item.database) for item, query in tried])
    for (item, query), score in zip(tried, scores, strict=True):
        result = run_query(item.database, query).text(turns.RESULT_LIMIT, header=SHORT.header)
        right = score.value == 1.0
        yield turns.check(item.question, query, result, right=right)
        if not right and rng.random() < 0.5:
            yield turns.rewrite(item.schema.text(), item.question, query, result, item.gold)
    for item in items:
        result = run_query(item.database, item.gold).text(turns.RESULT_LIMIT, header=SHORT.header)
        yield turns.check(item.question, item.gold, result, right=True)
        if rng.random() < 0.2:  # a check that errs must not lead away from what was right
            yield turns.rewrite(item.schema.text(), item.question, item.gold, result, item.gold)


def mutated(tokens: Sequence[str], columns: Mapping[str, Sequence[str]], rng: random.Random) -> str:
    """Return a query that went wrong in one place or two."""
    query = turns.mutant(tokens, columns, rng)
    return turns.mutant(tokens_of(query), columns, rng) if rng.random() < 0.3 else query


def write_folder(spider: Path, folder: Path, rows: Sequence[Mapping[str, str]]) -> None:
    """Write the run's Spider folder: these train questions, dev as it is, and the databases of both."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    pq.write_table(pa.table({c: [row[c] for row in rows] for c in COLUMNS}), folder / "train_spider.parquet")
    shutil.copyfile(spider / "dev.parquet", folder / "dev.parquet")
    for db_id in sorted({row["db_id"] for row in (*rows, *read_rows(spider / "dev.parquet"))}):
        target = database_of(folder, db_id)
        target.parent.mkdir(parents=True)
        shutil.copyfile(database_of(spider, db_id), target)
    (folder / "NOTICE.txt").write_text(NOTICE, "utf-8")
    with tarfile.open(folder.with_suffix(".tar.xz"), "w:xz") as tar:
        tar.add(folder, folder.name)


def check_loaders(directory: Path, tokenizer: Any, prompts: Sequence[str]) -> None:
    """Make sure that a model's loader cuts all prompts into the same tokens.

    Raises:
        ValueError: It does not.
    """
    import tempfile

    from transformers import Qwen2Config

    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(directory, folder, dirs_exist_ok=True)
        Qwen2Config().save_pretrained(folder)
        if not byte_tokenizer.served_alike(Path(folder), tokenizer, prompts):
            raise ValueError("transformers' AutoTokenizer cuts prompts otherwise than tokenizer.json says")


def lengths(tokenizer: Any, texts: Sequence[str]) -> dict[str, int]:
    """Return how many tokens texts have: the median, the 99th of a hundred and the most."""
    found = sorted(len(ids) for ids in tokenizer(list(texts), add_special_tokens=False)["input_ids"])
    return {"median": found[len(found) // 2], "p99": found[int(len(found) * 0.99)], "most": found[-1]}


def make(spider: Path, out: Path, *, seed: int, share: float, amounts: Amounts) -> dict[str, Any]:
    """Write everything and return figures about it."""
    start = time.perf_counter()
    train, dev = read_rows(spider / "train_spider.parquet"), read_rows(spider / "dev.parquet")
    shown, rewarded = split(sorted({row["db_id"] for row in train}), share, seed)
    schemas = read_schemas(spider, [*shown, *rewarded])
    everything = list(schemas.values())
    pool = Pool.of(everything, value_pool(everything))
    rng = random.Random(f"spider {seed} data")
    items = labelled(spider, [row for row in train if row["db_id"] in set(shown)], schemas)
    write_folder(spider, out / "rl", [row for row in train if row["db_id"] in set(rewarded)])
    (out / "split.json").write_text(json.dumps({"labelled": shown, "reward_only": rewarded}, indent=1) + "\n", "utf-8")

    first = [*made(everything, pool, rng, amounts.templates, whole=False)]
    sample = [
        t.prompt.removeprefix("<|user|>").removesuffix("<|assistant|>") for t in rng.sample(first, len(first) // 8)
    ]
    texts = [text for i in items for text in (i.question, i.gold)] + [s.text() for s in everything for _ in range(8)]
    tokenizer = byte_tokenizer.save(byte_tokenizer.build(texts + sample, VOCABULARY), out / "tokenizer", length=1280)

    first += with_other_names(items, pool, rng, amounts.renamed[0])
    second = [
        *with_own_names(items, rng, amounts.shown),
        *with_other_names(items, pool, rng, amounts.renamed[1]),
        *made(everything, pool, rng, amounts.fresh, whole=True),
        *later_turns(items, rng),
    ]
    stages = {"stage-1": turns.encoded(tokenizer, first), "stage-2": turns.encoded(tokenizer, second)}
    turns.save(out / "examples.npz", stages)
    prompts = {
        name: [turns.first_prompt(database_of(spider, row["db_id"]), row["question"]) for row in rows]
        for name, rows in (("train", train), ("dev", dev))
    }
    check_loaders(out / "tokenizer", tokenizer, [t.prompt for t in second] + prompts["train"] + prompts["dev"])
    return {
        "databases": {"labelled": len(shown), "reward_only": len(rewarded)},
        "questions": {
            "labelled": len(items),
            "in_style": sum(i.styled for i in items),
            "reward_only": len(train) - len(items),
        },
        "vocabulary": len(tokenizer),
        "examples": {name: len(pairs) for name, pairs in stages.items()},
        "tokens": {name: sum(len(p) + len(r) for p, r in pairs) for name, pairs in stages.items()},
        "reply_tokens": {name: sum(len(r) for _, r in pairs) for name, pairs in stages.items()},
        "longest_example": max(len(p) + len(r) for pairs in stages.values() for p, r in pairs),
        "prompt_tokens": {name: lengths(tokenizer, found) for name, found in prompts.items()},
        "later_prompt_tokens": lengths(tokenizer, [t.prompt for t in second]),
        "gold_tokens": lengths(tokenizer, [i.gold for i in items]),
        "bytes": {f: (out / f).stat().st_size for f in ("examples.npz", "rl.tar.xz")},
        "wall_s": round(time.perf_counter() - start, 1),
    }


def main() -> None:
    """Make it all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spider", type=Path, required=True, help="Spider's folder, with tables.json")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", type=float, default=0.6, help="share of the train databases that is labelled")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the usual amount of examples, for trials")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    amounts = Amounts() if arguments.scale == 1.0 else Amounts().scaled(arguments.scale)
    figures = make(arguments.spider, arguments.out, seed=arguments.seed, share=arguments.share, amounts=amounts)
    (arguments.out / "data.json").write_text(json.dumps(figures, indent=1) + "\n", "utf-8")
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
