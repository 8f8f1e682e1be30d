"""Runs each hostile query in a separate process and prints the results as JSON lines; not a test itself.

Usage: hostile_queries.py BUDGET_S MODE [few]. With `few`, one query runs of those whose names begin alike.
If a query or its gold ends late, it runs up to three times: on a busy machine any process may have to wait, but hardly
three times by chance. Each line has the name, the status, value and reason of the score, the wall seconds, and the peak
memory in MiB of the process and of its worker processes together.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import sqlite3
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from agentrig_spider import ExecMatch
from agentrig_spider.sandbox.pool import WORKERS

ENDLESS = "WITH RECURSIVE r(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM r) "
TEXT8M = "replace(hex(zeroblob(4000000)), '00', 'aa')"


def chain(*, tables: int, levels: int) -> str:
    """Return common table expressions that each use the one before several times."""
    parts = ["c0 AS (SELECT 1 AS x)"]
    for level in range(levels):
        uses = ", ".join(f"c{level} u{use}" for use in range(tables))
        parts.append(f"c{level + 1} AS (SELECT 1 AS x FROM {uses})")
    return f"WITH {', '.join(parts)} SELECT count(*), 1 FROM c{levels}"


def queries(folder: str) -> dict[str, str]:
    """Return the hostile queries; they have two columns like the gold, so that their width does not end them early."""
    return {
        "endless recursion": ENDLESS + "SELECT count(*), 1 FROM r",
        "endless rows": ENDLESS + "SELECT i, i FROM r",
        "endless sort": ENDLESS + "SELECT i, i FROM r ORDER BY i DESC",
        "endless blobs sorted": ENDLESS + "SELECT i, zeroblob(1000000) FROM r ORDER BY 1 DESC",
        "endless text": ENDLESS + "SELECT group_concat(hex(zeroblob(1000)) || i), 1 FROM r",
        "endless distinct": "WITH RECURSIVE r(x) AS (SELECT 'a' UNION SELECT x || 'b' FROM r) SELECT max(x), 1 FROM r",
        "doubling text": "WITH RECURSIVE r(i, x) AS (SELECT 1, 'ab' UNION ALL SELECT i + 1, x || x FROM r LIMIT 60) "
        "SELECT length(x), 1 FROM r",
        "cross join of 14": "SELECT count(*), 1 FROM " + ", ".join(f"big b{index}" for index in range(14)),
        "cross join sorted": "SELECT a.b, c.b FROM big a, big b, big c ORDER BY c.b COLLATE NOCASE, b.a",
        "cross join grouped": "SELECT a.b || b.b, count(*) FROM big a, big b GROUP BY 1",
        "cross join distinct": "SELECT count(*), 1 FROM (SELECT a.b, b.b FROM big a, big b UNION SELECT 1, 2)",
        "cross join window": "SELECT sum(a.a) OVER (ORDER BY b.b), 1 FROM big a, big b",
        "cross join text": "SELECT group_concat(a.b), 1 FROM big a, big b",
        "cross join like": "SELECT count(*), 1 FROM big a, big b WHERE a.b || b.b LIKE '%t%n%t%n%t%n%t%z'",
        "blob of 1 GB": "SELECT zeroblob(1000000000), 1",
        "blobs by the hundred": f"SELECT {', '.join(['zeroblob(16000000)'] * 400)}",
        "hex of a blob": "SELECT hex(zeroblob(900000000)), 1",
        "randomblob": "SELECT randomblob(1000000000), 1",
        "randomblobs": f"SELECT {', '.join(['hex(randomblob(7000000))'] * 100)}",
        "printf of 1 GB": "SELECT printf('%.*c', 1000000000, 'x'), 1",
        "quadratic instr": f"SELECT instr({TEXT8M}, substr({TEXT8M}, 1, 4000000) || 'b'), 1",
        "quadratic replace": f"SELECT replace({TEXT8M}, substr({TEXT8M}, 1, 4000000) || 'b', 'c'), 1",
        "quadratic trim": f"SELECT trim({TEXT8M}, replace(substr({TEXT8M}, 1, 4000000), 'a', 'b') || 'a'), 1",
        "quadratic like": f"SELECT {TEXT8M} LIKE '%{'a%' * 2000}b', 1",
        "quadratic glob": f"SELECT {TEXT8M} GLOB '*{'a*' * 2000}b', 1",
        "json product": f"SELECT count(*), 1 FROM json_tree('[{'1,' * 9000}1]') a, json_tree('[{'1,' * 9000}1]') b",
        "json text": "SELECT json_group_array(a.b || b.b), 1 FROM big a, big b",
        "deep parentheses": f"SELECT {'(' * 5000}1{')' * 5000}, 1",
        "deep NOT": f"SELECT {'NOT ' * 50000}1, 1",
        "deep CASE": f"SELECT {'CASE WHEN 1 THEN ' * 900}1{' END' * 900}, 1",
        "deep subqueries": f"SELECT * FROM {'(SELECT * FROM ' * 90}band{')' * 90}",
        "long OR": f"SELECT 1, 1 WHERE {' OR '.join(f'1 = {index}' for index in range(20000))}",
        "list of 12000": f"SELECT id, name FROM band WHERE id IN ({','.join(map(str, range(12000)))})",
        "600 compounds": " UNION ALL ".join(["SELECT 1, 1"] * 600),
        "doubling table expressions": chain(tables=2, levels=24),
        "sixty-fold table expressions": chain(tables=60, levels=3),
        "attach": f"ATTACH '{folder}/other.sqlite' AS other",
        "attach memory": "ATTACH ':memory:' AS other",
        "vacuum into": f"VACUUM INTO '{folder}/copy.sqlite'",
        "writable schema": "PRAGMA writable_schema = 1",
        "heap pragma": "PRAGMA hard_heap_limit = 1",
        "journal": "PRAGMA journal_mode = WAL",
        "delete returning": "DELETE FROM band RETURNING id, name",
        "insert": "INSERT INTO band VALUES (1000, 'x')",
        "drop": "DROP TABLE band",
        "temporary table": "CREATE TEMP TABLE t AS SELECT id, name FROM band",
        "stacked": "SELECT 1, 1; DROP TABLE band",
        "NUL": "SELECT 'a\0b', 1",
        "NUL and more": "SELECT 1, 1\0; DROP TABLE band",
        "lone surrogate": "SELECT '\udcff', 1",
        "invalid UTF-8": "SELECT CAST(x'61FF62' AS TEXT), 1",
        "load_extension": "SELECT load_extension('x'), 1",
        "fts3_tokenizer": "SELECT fts3_tokenizer('simple'), 1",
        "unclosed comments": "SELECT DISTINCT 1, 1; " + "/*" * 400_000,
        "unclosed quotes": "SELECT DISTINCT 1, 1; " + "'\\" * 4_900,
        "unclosed brackets": "SELECT DISTINCT 1, 1 " + "[" * 900_000,
        "unclosed dollars": "SELECT DISTINCT 1, 1; " + "$a$ $b" * 1_500,
        "four million characters": "SELECT 1, 1 " + "-" * 4_000_000,
        "40 identical columns": f"SELECT {', '.join(f'c{39 - index}' for index in range(40))} FROM wide",
        "a column too few": f"SELECT {', '.join(f'c{index}' for index in range(39))}, c1 + 1 FROM wide",
    }


def build(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE band (id INTEGER PRIMARY KEY, name TEXT)")
    connection.executemany("INSERT INTO band VALUES (?, ?)", [(index, f"name {index}") for index in range(200)])
    connection.execute("CREATE TABLE big (a INTEGER, b TEXT)")
    rows = [(index, f"text number {index} " * 6) for index in range(20000)]
    connection.executemany("INSERT INTO big VALUES (?, ?)", rows)
    connection.execute(f"CREATE TABLE wide ({', '.join(f'c{index} INTEGER' for index in range(40))})")
    wide = [(index % 7,) * 40 for index in range(50)]
    connection.executemany(f"INSERT INTO wide VALUES ({', '.join('?' * 40)})", wide)
    connection.commit()
    connection.close()


def hashes(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def in_child(match: ExecMatch, title: str, sql: str, gold: str, database: Path) -> dict[str, Any]:
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        with open(reading, "rb") as stream:
            line: dict[str, Any] = json.loads(stream.read())
        os.waitpid(child, 0)
        return line
    start = time.monotonic()
    score = match.score(sql, gold, database)
    seconds = time.monotonic() - start
    WORKERS.close()
    peaks = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    line = {
        "name": title,
        "status": score.status,
        "value": score.value,
        "reason": score.details["reason"],
        "seconds": seconds,
        "mebibytes": sum(peaks) / 1024,
    }
    os.write(writing, json.dumps(line).encode())
    os._exit(0)


def main() -> None:
    budget, mode = float(sys.argv[1]), sys.argv[2]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        database = folder / "band.sqlite"
        build(database)
        before = hashes(folder)
        match = ExecMatch("strict" if mode == "strict" else "official", timeout_s=budget)
        asked = queries(name)
        if "few" in sys.argv:
            asked = {title: asked[title] for title in {title.split()[0]: title for title in asked}.values()}
        for title, sql in asked.items():
            gold = "SELECT * FROM wide" if "column" in title else "SELECT id, name FROM band ORDER BY name"
            for _ in range(3):
                line = in_child(match, title, sql, gold, database)
                if line["seconds"] <= budget + 0.5 and line["status"] != "invalid":
                    break
            print(json.dumps(line), flush=True)
        print(json.dumps({"unchanged": hashes(folder) == before}), flush=True)


if __name__ == "__main__":
    main()
