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
from effects import Elsewhere, Flip, Settings, Together, config_of, folder, registry

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


def sheet(name: str) -> str:
    """Return a CSV file whose questions begin with its name."""
    file = folder() / f"{name}.csv"
    parts = ("train", "validation", "test")
    rows = [f"i{n},{name} {n},{n},{'easy' if n % 2 else 'hard'},{parts[n % 3]},00{n}" for n in range(12)]
    file.write_text("\n".join(["name,question,answer,level,part,code", *rows]) + "\n")
    return str(file)


def table(key: str, a: Any, b: Any, see: Any, shows: Any, split: str = "train", **beside: Any) -> Flip:
    """Return the entry of a key of `table`: what is seen of a split's tasks."""
    more = {"private": ["answer"], **({} if key == "file" else {"file": sheet("first")}), **beside}
    return Flip(a=a, b=b, look=lambda s: see(build("tasks.table", s).load(split)), shows=shows, beside=more)


def first_words(tasks: Any) -> set[str]:
    return {task.input["question"].split()[0] for task in tasks}


TABLE = {
    "file": table("file", sheet("first"), sheet("second"), first_words, lambda a, b: (a, b) == ({"first"}, {"second"})),
    "validation": table(
        "validation", sheet("second"), sheet("third"), first_words,
        lambda a, b: (a, b) == ({"second"}, {"third"}), "validation",
    ),
    "test": table(
        "test", sheet("second"), sheet("third"), first_words, lambda a, b: (a, b) == ({"second"}, {"third"}), "test"
    ),
    "input": table(
        "input", ["question"], ["level", "code"], lambda t: set(t[0].input),
        lambda a, b: (a, b) == ({"question"}, {"level", "code"}),
    ),
    "private": table(
        "private", ["answer"], ["level"], lambda t: set(t[0].private), lambda a, b: (a, b) == ({"answer"}, {"level"})
    ),
    "id": table(
        "id", "name", "question", lambda t: t[0].id.split("-", 1)[1][:2], lambda a, b: a[0] == "i" and b == "fi"
    ),
    "split": table("split", "", "part", lambda t: len(t), lambda a, b: b == 4 != a, shares=[1.0, 0.0, 0.0]),
    "shares": table(
        "shares", [1.0, 0.0, 0.0], [0.0, 0.5, 0.5], lambda t: len(t), lambda a, b: (a, b) == (12, 0)
    ),
    "text": table("text", [], ["answer"], lambda t: type(t[0].private["answer"]), lambda a, b: (a, b) == (int, str)),
    "slices": table(
        "slices", ["level"], ["part"], lambda t: set(t[0].slices), lambda a, b: (a, b) == ({"level"}, {"part"})
    ),
}  # fmt: skip

TABLES = {
    "tasks.table": TABLE,
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
        "dir": Flip(
            a=spider("first"),
            b=spider("second"),
            look=lambda s: build("tasks.spider", s).load("dev")[0].input["question"],
            shows=lambda a, b: (a, b) == ("first", "second"),
        ),
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
