"""CPU seconds a pair of the official evaluator's steps and of `ExecMatch`.

    python tests/benchmarks/exec_match.py [--pairs FILE] [--official PATH] [--repeat N] [--json]

The pairs are those of `exec_pairs.jsonl` in the Spider folder, each distinct (database, gold, prediction)
once. The official side is its algorithm reimplemented here for measuring (parse, open, run, compare); with
`--official` it is the reader's own copy of the official code (the folder that holds `exec_eval.py`).
CPU seconds count this process and its children, user and system. The exit status is 1 if one verdict differs from the
other side's, or from the `official_verdict` of the file, and `KNOWN` does not list the difference.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import resource
import sqlite3
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from agentrig.hardware import usable_cores

Pair = tuple[str, str, str]
Judge = Callable[[str, str, str], int]
KNOWN = re.compile(r"\s*(insert|update|delete|replace|create|drop|alter|pragma|attach|vacuum|reindex)\b", re.IGNORECASE)
"""Predictions whose verdicts may differ: the official code executes a query that writes, `ExecMatch` gives it 0."""

ROOT = Path(__file__).resolve().parents[2]


def spider_folder() -> Path:
    """Return the Spider folder: `AGENTRIG_SPIDER_DIR`, else `shared/spider` beside the repository."""
    return Path(os.environ.get("AGENTRIG_SPIDER_DIR", ROOT.parent / "shared" / "spider"))


# ---------------------------------------------------------------- the official steps


def strip_distinct(sql: str) -> str:
    """Parse with sqlparse and put the first statement's tokens together again without `distinct`."""
    import sqlparse

    leaves = sqlparse.parse(sql)[0].flatten()
    return "".join(leaf.value for leaf in leaves if leaf.value.lower() != "distinct")


def execute(path: str, sql: str) -> list[tuple[Any, ...]] | Exception:
    sql = re.sub(r"YEAR\s*\(\s*CURDATE\s*\(\s*\)\s*\)\s*", "2020", sql, flags=re.IGNORECASE)
    connection = sqlite3.connect(path)
    connection.text_factory = lambda data: data.decode(errors="ignore")
    try:
        return connection.execute(sql).fetchall()
    except Exception as error:
        return error
    finally:
        connection.close()


def permutations(gold: Sequence[tuple[Any, ...]], predicted: Sequence[tuple[Any, ...]]) -> Iterator[tuple[int, ...]]:
    """Yield the column orders that the official search tries, thinned by twenty sampled rows."""
    width = len(gold[0])
    allowed = [set(range(width)) for _ in range(width)]
    if width > 3:
        values = [{row[index] for row in gold} for index in range(width)]
        for _ in range(20):
            sample = random.choice(predicted)
            for index, other in itertools.product(range(width), range(width)):
                if sample[other] not in values[index]:
                    allowed[index].discard(other)
    return itertools.product(*allowed)


def same_denotation(gold: list[tuple[Any, ...]], predicted: list[tuple[Any, ...]], ordered: bool) -> bool:
    """Compare two results by search over column orders."""
    if not gold and not predicted:
        return True
    if len(gold) != len(predicted) or len(gold[0]) != len(predicted[0]):
        return False

    def sorted_cells(row: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(sorted(row, key=lambda cell: str(cell) + str(type(cell))))

    first, second = [sorted_cells(row) for row in gold], [sorted_cells(row) for row in predicted]
    if (first != second) if ordered else (set(first) != set(second)):
        return False
    for order in permutations(gold, predicted):
        if len(set(order)) < len(order):
            continue
        moved = [tuple(row[index] for index in order) for row in predicted]
        if ordered:
            if gold == moved:
                return True
        elif set(gold) == set(moved):
            counts: dict[tuple[Any, ...], int] = defaultdict(int)
            for row in gold:
                counts[row] += 1
            for row in moved:
                counts[row] -= 1
            if not any(count < 0 for count in counts.values()):
                return True
    return False


def official_steps(predicted: str, gold: str, database: str) -> int:
    """Judge one pair as the official evaluator does in its default settings."""
    texts = []
    for sql in (predicted, gold):
        for loose, tight in (("> =", ">="), ("< =", "<="), ("! =", "!=")):
            sql = sql.replace(loose, tight)
        texts.append(strip_distinct(sql))
    ordered = "order by" in texts[1].lower()
    folder = os.path.dirname(database)
    for name in os.listdir(folder):
        if ".sqlite" not in name:
            continue
        wanted = execute(os.path.join(folder, name), texts[1])
        got = execute(os.path.join(folder, name), texts[0])
        if isinstance(wanted, Exception):
            raise AssertionError(f"gold query fails: {wanted}")
        if isinstance(got, Exception) or not same_denotation(wanted, got, ordered):
            return 0
    return 1


def official_copy(folder: str) -> Judge:
    """Return the judge of a reader's own copy of the official code."""
    sys.path.insert(0, folder)
    from exec_eval import eval_exec_match  # type: ignore[import-not-found]

    def judge(predicted: str, gold: str, database: str) -> int:
        return int(
            eval_exec_match(
                db=database,
                p_str=predicted,
                g_str=gold,
                plug_value=False,
                keep_distinct=False,
                progress_bar_for_each_datapoint=False,
            )
        )

    return judge


# ---------------------------------------------------------------- measuring


def cpu_seconds() -> float:
    """Return user and system seconds of this process and of its children that have ended."""
    uses = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(use.ru_utime + use.ru_stime for use in uses)


def measure(judge: Judge, pairs: Sequence[Pair]) -> tuple[list[int], float, float]:
    """Return verdicts, CPU seconds and wall seconds of one pass."""
    cpu, wall = cpu_seconds(), time.perf_counter()
    verdicts = [judge(*pair) for pair in pairs]
    return verdicts, cpu_seconds() - cpu, time.perf_counter() - wall


def ours() -> Judge:
    """Return a judge with empty caches."""
    from agentrig_spider import ExecMatch

    match = ExecMatch()

    def judge(predicted: str, gold: str, database: str) -> int:
        score = match.score(predicted, gold, database)
        return -1 if score.value is None else int(score.value)

    return judge


def close_workers() -> None:
    """End ExecMatch's worker processes, so that their CPU time is counted."""
    from agentrig_spider.sandbox.pool import WORKERS

    WORKERS.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=Path, default=None, help="a JSON-lines file as exec_pairs.jsonl")
    parser.add_argument("--official", default=None, help="folder of the official code (exec_eval.py)")
    parser.add_argument("--repeat", type=int, default=3, help="passes; the fastest counts")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    folder = spider_folder()
    rows = [json.loads(line) for line in (options.pairs or folder / "exec_pairs.jsonl").read_text().splitlines()]
    recorded = {(row["pred"], row["gold"], str(folder / row["db"])): row.get("official_verdict") for row in rows}
    pairs = list(recorded)
    official = official_copy(options.official) if options.official else official_steps

    best: dict[str, tuple[float, float]] = {}
    verdicts: dict[str, list[int]] = {}

    def keep(name: str, judge: Judge) -> None:
        verdicts[name], cpu, wall = measure(judge, pairs)
        close_cpu = cpu_seconds()
        close_workers()
        cpu += cpu_seconds() - close_cpu
        best[name] = min(best.get(name, (cpu, wall)), (cpu, wall))

    for _ in range(options.repeat):
        keep("official", official)
        judge = ours()
        keep("cold", judge)
        keep("warm", judge)
    each = zip(pairs, recorded.values(), verdicts["official"], verdicts["cold"], verdicts["warm"], strict=True)
    differ = [(pair, of) for pair, *of in each if len({verdict for verdict in of if verdict is not None}) > 1]
    faults = [(pair, of) for pair, of in differ if not KNOWN.match(pair[0])]
    figures: dict[str, Any] = {
        "pairs": len(pairs),
        "differing_verdicts": len(differ),
        "official_cpu_ms": 1e3 * best["official"][0] / len(pairs),
        "cold_cpu_ms": 1e3 * best["cold"][0] / len(pairs),
        "warm_cpu_ms": 1e3 * best["warm"][0] / len(pairs),
        "cold_times_fewer": best["official"][0] / best["cold"][0],
        "warm_times_fewer": best["official"][0] / best["warm"][0],
        "cpus": usable_cores(),
        "sqlite": sqlite3.sqlite_version,
        "python": sys.version.split()[0],
    }
    print(json.dumps(figures, indent=None if options.json else 2))
    for (predicted, gold, database), (file, *measured) in faults[:10]:
        words = "%s in the file, %s official, %s and %s ExecMatch"
        print(f"{words % (file, *measured)}: {predicted!r} for {gold!r} on {database}", file=sys.stderr)
    if faults:
        raise SystemExit(f"{len(faults)} of {len(pairs)} verdicts differ, and KNOWN does not list them")


if __name__ == "__main__":
    main()
