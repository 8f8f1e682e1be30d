"""The training data of tests/benchmarks/verl_spider, on a database made here and, if available, on real Spider."""

# ruff: noqa: E402  (what the imports need may be missing)
import json
import random
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "benchmarks" / "verl_spider"
sys.path.insert(0, str(FOLDER))
pytest.importorskip("sqlglot")
pytest.importorskip("torch")

import data
from agentrig_spider.tasks.spider import read_rows
from renaming import Pool
from schemas import read_schemas, value_pool

from agentrig.plan import resolve


def test_no_question_or_database_of_dev_is_shown(spider_dir):
    train, dev = (read_rows(spider_dir / f"{name}.parquet") for name in ("train_spider", "dev"))
    shown, rewarded = data.split(sorted({row["db_id"] for row in train}), 0.6, 0)
    assert not set(shown) & set(rewarded)
    assert not (set(shown) | set(rewarded)) & {row["db_id"] for row in dev}
    few = [row for row in train if row["db_id"] in shown[:3]]
    schemas = read_schemas(spider_dir, [*shown, *rewarded])
    items = data.labelled(spider_dir, few, schemas)
    assert sum(item.styled for item in items) > 0.95 * len(items)
    pool = Pool.of(list(schemas.values()), value_pool(list(schemas.values())))
    rng = random.Random(0)
    made = [
        *data.with_own_names(items, rng, 2),
        *data.with_other_names(items[:50], pool, rng, 2),
        *data.made(list(schemas.values()), pool, rng, 200, whole=False),
        *data.later_turns(items[:20], rng),
    ]
    text = "\n".join(turn.prompt + turn.reply for turn in made)
    held = {row["question"] for row in dev} - {row["question"] for row in few}
    assert not [question for question in held if len(question) > 40 and question in text]
    described = {d["db_id"]: d for d in json.loads((spider_dir / "tables.json").read_text())}
    for db_id in {row["db_id"] for row in dev}:
        tables = [f"table {name}:" for name in described[db_id]["table_names_original"]]
        assert len(tables) < 2 or not any(all(t in turn.prompt for t in tables) for turn in made), db_id


def test_the_run_file_has_what_its_figures_were_made_with():
    """The recipe that it builds on may change; what the model was trained on may not."""
    agent = resolve(str(FOLDER / "run.toml")).configs["agent"]
    assert (agent.prompts, agent.table_info_truncate, agent.execution_truncate) == ("short", 2048, 64)
    assert (agent.max_turns, agent.sample_rows) == (2, 0)
