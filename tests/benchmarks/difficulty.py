"""Spider's classes of difficulty: `agentrig_spider.difficulty` beside the official evaluator, on every gold query.

    AGENTRIG_SPIDER_DIR=… python tests/benchmarks/difficulty.py --official DIR [--split dev]

`--official` is the reader's own copy of the official code (the folder that holds `evaluation.py` and `process_sql.py`);
it needs nltk. The exit status is 1 if one query has another class.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from agentrig_spider.difficulty import CLASSES, difficulty


def official(folder: Path, databases: Path) -> Any:
    """Return the official evaluator's function from a query and a database to a class."""
    import nltk
    from nltk.tokenize.destructive import NLTKWordTokenizer

    nltk.word_tokenize = NLTKWordTokenizer().tokenize  # one sentence: the model that finds sentences is not needed
    sys.path.insert(0, str(folder.parent))
    sys.path.insert(0, str(folder))
    evaluation = __import__(f"{folder.name}.evaluation", fromlist=["Evaluator"])
    process = __import__(f"{folder.name}.process_sql", fromlist=["get_sql"])
    process.word_tokenize = nltk.word_tokenize
    evaluator = evaluation.Evaluator()
    schemas: dict[str, Any] = {}

    def of(query: str, database: str) -> str:
        if database not in schemas:
            file = databases / database / f"{database}.sqlite"
            schemas[database] = process.Schema(process.get_schema(str(file)))
        found: str = evaluator.eval_hardness(process.get_sql(schemas[database], query))
        return found

    return of


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--official", type=Path, required=True)
    parser.add_argument("--split", default="dev")
    options = parser.parse_args()
    spider = Path(os.environ["AGENTRIG_SPIDER_DIR"])
    theirs = official(options.official.resolve(), spider / "database")
    counts: Counter[str] = Counter()
    other, unread = [], 0
    for row in pq.read_table(spider / f"{options.split}.parquet").to_pylist():
        try:
            wanted = theirs(row["query"], row["db_id"])
        except Exception:  # its parser does not know every query
            unread += 1
            continue
        counts[wanted] += 1
        if difficulty(row["query"]) != wanted:
            other.append((wanted, difficulty(row["query"]), row["query"]))
    for line in other[:40]:
        print(*line, sep=" | ")
    print(json.dumps({"classes": {name: counts[name] for name in CLASSES}, "other": len(other), "unread": unread}))
    raise SystemExit(bool(other))


if __name__ == "__main__":
    main()
