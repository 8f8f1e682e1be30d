"""The keys of task sets, rewards and adapters, observed in generated databases, real queries and a trace."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from rollouts import trace_of

from agentrig import Outcome, Score, Task
from effects import Elsewhere, Flip, Settings, Together, config_of, exact, folder, registry, shown_by

ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"


def build(place: str, settings: Settings) -> Any:
    kind, _, name = place.partition(".")
    spec: Any = registry().find(kind, name).spec
    return spec.build(config_of(place, settings))


def generated(settings: Settings) -> Mapping[str, Any]:
    """Return the questions of `mini-sql`, its rows, and the folder of its files."""
    made = build("tasks.mini-sql", settings)
    tasks = made.load("dev")
    database = tasks[0].input["database"]
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
        (table,) = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' LIMIT 1").fetchone()
        rows = connection.execute(f"SELECT * FROM {table}").fetchall()
    connection.close()
    return {"questions": sorted(t.input["question"] for t in tasks), "rows": rows, "at": database}


MINI = Together(generated)


def spider(name: str) -> str:
    """Return a folder with Spider's layout and one question, which is its name."""
    root = folder() / f"spider-{name}"
    (root / "database" / "band").mkdir(parents=True)
    sqlite3.connect(root / "database" / "band" / "band.sqlite").close()
    row = {"db_id": ["band"], "question": [name], "query": ["SELECT 1"]}
    pq.write_table(pa.table(row), root / "dev.parquet")
    return str(root)


def database() -> Path:
    """Return a database of three rows; the folder `copies` beside it has a copy with another row."""
    root = folder() / "judged"
    path = root / "zoo" / "zoo.sqlite"
    for file, rows in ((path, 3), (root / "copies" / "zoo" / "zoo-1.sqlite", 4)):
        if not file.is_file():
            file.parent.mkdir(parents=True)
            connection = sqlite3.connect(file)
            connection.execute("CREATE TABLE t (a INTEGER)")
            connection.executemany("INSERT INTO t VALUES (?)", [(10 ** (i + 1),) for i in range(rows)])
            connection.commit()
            connection.close()
    return path


def judged(place: str, predicted: str, gold: str) -> Any:
    """Return a look: status, value and seconds of a verdict."""

    def look(settings: Settings) -> tuple[str, float | None, float]:
        reward = build(place, settings)
        task = Task(id="t", input={"database": str(database())}, private={"gold": gold})
        start = time.monotonic()
        score: Score = reward(task, Outcome(answer=predicted), 60.0)
        return score.status, score.value, time.monotonic() - start

    return look


def rewards(place: str) -> dict[str, Flip]:
    """Return the entries that both rewards of Spider share."""
    numbers = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 200000)"
    grouped = "SELECT 'a long text for each number ' || i AS x FROM n GROUP BY x"
    large = f"{numbers} SELECT count(*), a FROM ({grouped}), t WHERE a = 10"
    return {
        "timeout_s": Flip(
            a=0.3,
            b=1.5,
            look=judged(place, ENDLESS, "SELECT a FROM t"),
            shows=lambda a, b: a[0] == b[0] == "timeout" and 0.3 <= a[2] < 1.4 < b[2],
        ),
        "memory_mb": Flip(
            a=8.0,
            b=64.0,
            look=judged(place, large, "SELECT 200000, a FROM t WHERE a = 10"),
            shows=lambda a, b: (a[:2], b[:2]) == (("ok", 0.0), ("ok", 1.0)),
        ),
    }


TABLE = {
    "test_columns_are_what_they_are_named": ("file", "input", "private", "id", "slices", "split"),
    "test_files_are_splits_and_a_run_takes_them": ("validation", "test"),
    "test_shares_put_rows_with_one_input_into_one_split": ("shares",),
    "test_gold_is_of_one_kind_in_all_files": ("text",),
}

TABLES = {
    "tasks.table": shown_by("tests/test_tables.py", TABLE),
    "tasks.mini-sql": {
        "seed": MINI.flip(
            "seed", 0, 1, lambda seen: seen, lambda a, b: a["questions"] != b["questions"] and a["rows"] != b["rows"]
        ),
        "cache": MINI.flip(
            "cache",
            f"{folder()}/cache-a",
            f"{folder()}/cache-b",
            lambda seen: seen["at"],
            lambda a, b: a.startswith(f"{folder()}/cache-a/") and b.startswith(f"{folder()}/cache-b/"),
        ),
    },
    "tasks.spider": {
        "dir": exact(
            spider("first"),
            spider("second"),
            lambda s: build("tasks.spider", s).load("dev")[0].input["question"],
            ("first", "second"),
        )
    },
    "reward.spider-exec": rewards("reward.spider-exec"),
    "reward.spider-exec-strict": {
        **rewards("reward.spider-exec-strict"),
        "copies": Flip(
            a="",
            b=str(folder() / "judged" / "copies"),
            look=judged("reward.spider-exec-strict", "SELECT count(*) FROM t WHERE a < 9999", "SELECT count(*) FROM t"),
            shows=lambda a, b: (a[:2], b[:2]) == (("ok", 1.0), ("ok", 0.0)),
        ),
    },
    "adapter.agent-match": {
        "model": Elsewhere(
            "plugins/agentrig-agent-match/tests/test_agent_match.py::test_the_models_name_selects_calls_too",
            "it needs a trace with several models",
        ),
        "match": Flip(
            a="write",
            b="check",
            look=lambda s: [
                t.node for t in build("adapter.agent-match", s)(trace_of("write_query", "check_query", "rewrite_query"))
            ],
            shows=lambda a, b: a == ["write_query", "rewrite_query"] and b == ["check_query"],
        ),
    },
}
