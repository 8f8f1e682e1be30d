"""What the turns of the agent did in each measure of a run on Spider dev; prints a line of JSON for each.

    python tests/benchmarks/verl_spider/measures.py RUN --spider DIR

RUN is a run directory with tasks of Spider dev, DIR the Spider folder with dev.parquet and the databases.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import pyarrow.parquet as pq
from agentrig_spider.rewards import ExecMatch
from agentrig_spider.tasks.spider import read_rows
from data import database_of

NODES = ("write_query", "check_query", "rewrite_query")


@attrs.frozen
class Measured:
    """One question: whether its first and last query are right and run, and whether the first check rejected."""

    right: Sequence[bool]
    runs: Sequence[bool]
    rejected: bool


def outputs(spans: Sequence[Mapping[str, Any]], key: str) -> list[Any]:
    """Return what the graph's nodes put under a key, in order; the whole graph's own output left out."""
    nodes = [s["attributes"].get("output") or {} for s in spans if s["attributes"].get("langchain.chain.type") in NODES]
    return [output[key] for output in nodes if key in output]


def measured(file: Path, spider: Path, match: ExecMatch) -> dict[str, Measured]:
    """Judge every query of a file of rollouts; returns task id to what was seen.

    Raises:
        ValueError: A query can't be run, because its database is missing.
    """
    golds = {f"dev-{i:05d}": row for i, row in enumerate(read_rows(spider / "dev.parquet"))}
    found = {}
    for row in pq.read_table(file, columns=["task_id", "spans"]).to_pylist():
        gold, spans = golds[row["task_id"]], json.loads(row["spans"])
        database = database_of(spider, gold["db_id"])
        scores = [match.score(query, gold["query"], database) for query in outputs(spans, "query")]
        unjudged = [score.details["reason"] for score in scores if score.status == "invalid"]
        if unjudged:
            raise ValueError(f"{row['task_id']} can't be judged: {unjudged[0]}")
        found[row["task_id"]] = Measured(
            right=[score.value == 1.0 for score in (scores[0], scores[-1])],
            runs=[bool(score.components.get("executes")) for score in (scores[0], scores[-1])],
            rejected=not outputs(spans, "correct")[0],
        )
    return found


def sign_test(won: int, lost: int) -> float:
    """Return the two-sided p of the exact sign test."""
    tail = sum(math.comb(won + lost, i) for i in range(min(won, lost) + 1))
    return min(1.0, 2 * tail / 2 ** (won + lost))


def figures(now: Mapping[str, Measured], start: Mapping[str, Measured]) -> dict[str, Any]:
    """Return the counts of one measure, and the questions won and lost against the first."""
    every = list(now.values())
    right = [(start[task].right[1], m.right[1]) for task, m in now.items()]
    runs = [(start[task].runs[1], m.runs[1]) for task, m in now.items()]
    won, lost = right.count((False, True)), right.count((True, False))
    return {
        "n": len(every),
        "right": sum(m.right[1] for m in every),
        "runs": sum(m.runs[1] for m in every),
        "first_right": sum(m.right[0] for m in every),
        "rejected_failing": sum(m.rejected and not m.runs[0] for m in every),
        "rejected_running": sum(m.rejected and m.runs[0] for m in every),
        "right_lost_by_rewrite": sum(m.right[0] and not m.right[1] for m in every),
        "won": won,
        "lost": lost,
        "p": round(sign_test(won, lost), 3),
        "runs_won": runs.count((False, True)),
        "runs_lost": runs.count((True, False)),
    }


def main() -> None:
    """Print the figures of every measure of a run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--spider", type=Path, required=True)
    arguments = parser.parse_args()
    match = ExecMatch("official")
    folder = arguments.run / "rollouts"
    files = [*sorted(folder.glob("report-*.parquet")), *sorted(folder.glob("validation-*.parquet"))]
    measures = {file.stem: measured(file, arguments.spider, match) for file in files}
    start = measures[files[0].stem]
    for name, now in measures.items():
        print(json.dumps({"measure": name, **figures(now, start)}))


if __name__ == "__main__":
    main()
