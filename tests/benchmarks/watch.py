"""The live page on a large run: first view, filters, memory.

    python tests/benchmarks/watch.py [--rollouts 20000] [--tokens 1000]

The large run is made from the rollouts of a real one (`agentrig train mini`, four steps): each is repeated under new
ids, with prompts of `--tokens` tokens. "First view" is the first answer of a server that has just started, for the
run's page and for its newest traces; a filter goes over all rollouts.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

SMALL = [
    "train", "mini", "--json", "run.name=source", "runners.n=1", "algorithm.steps=4", "algorithm.tasks_per_step=8",
    "algorithm.group_size=4", "run.validation_tasks=8", "run.report_tasks=8", 'run.block=["report"]',
]  # fmt: skip

FILTERS = {
    "score": {"score": "wrong"},
    "score range": {"score": "0.2..0.8"},
    "failure": {"failure": "deadline"},
    "node": {"node": "write_query"},
    "length": {"shortest": "12", "longest": "40"},
    "text": {"text": "WHERE title"},
    "text nowhere": {"text": "zzz nobody said this"},
}


def large_run(source: Path, target: Path, rollouts: int, tokens: int) -> None:
    """Write a run directory with many rollouts, made from those of a small run."""
    (target / "rollouts").mkdir(parents=True)
    for name in ("config.toml", "manifest.json", "summary.json", "progress.json"):
        (target / name).write_bytes((source / name).read_bytes())
    files = sorted((source / "rollouts").glob("train-*.parquet"))
    schema = pq.read_schema(files[0])
    rows = [row for file in files for row in pq.read_table(file).to_pylist()]
    lines = [json.loads(text) for text in (source / "metrics.jsonl").read_text().splitlines()]
    rng = random.Random(0)
    size = 100
    for step in range(1, rollouts // size + 1):
        made = []
        for i in range(size):
            row = dict(rows[(step * size + i) % len(rows)])
            spans = json.loads(row["spans"])
            for span in spans:
                if "prompt_token_ids" in span["attributes"]:
                    span["attributes"]["prompt_token_ids"] = [rng.randrange(500) for _ in range(tokens)]
            failed = rng.random() < 0.03
            made.append(
                {
                    **row,
                    "id": f"ro-{step}-{i}",
                    "step": step,
                    "group": f"train-{step}-{i // 4}",
                    "failure": "deadline" if failed else None,
                    "value": None if failed else rng.choice((0.0, 0.3, 1.0)),
                    "prompt_tokens": tokens,
                    "spans": json.dumps(spans),
                }
            )
        table = pa.Table.from_pylist(made, schema=schema)
        pq.write_table(table, target / "rollouts" / f"train-{step:05d}.parquet", compression="zstd")
        with (target / "metrics.jsonl").open("a") as metrics:
            metrics.write(json.dumps({**lines[step % len(lines)], "step": step}) + "\n")


class Server:
    """`agentrig watch` in a process of its own."""

    def __init__(self, place: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "agentrig", "watch", str(place)], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        found = re.search(r"(http\S+)", self.process.stdout.readline())
        assert found is not None
        self.link = found[1]

    def rss_mb(self) -> float:
        return float(psutil.Process(self.process.pid).memory_info().rss / 1e6)

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(20)


def seconds(client: httpx.Client, path: str, **query: str) -> float:
    start = time.perf_counter()
    reply = client.get(path, params=query or None)
    assert reply.status_code == 200, reply.text
    return time.perf_counter() - start


def views(place: Path, name: str, repeats: int) -> dict[str, Any]:
    """Measure first views with new servers, filters with a warm one, and memory."""
    first: dict[str, list[float]] = {"run": [], "traces": []}
    for page, path in (("run", f"run/{name}"), ("traces", f"run/{name}/traces")):
        for _ in range(repeats):
            server = Server(place)
            with httpx.Client(base_url=server.link, timeout=60) as client:
                first[page].append(seconds(client, path))
            server.close()
    server = Server(place)
    with httpx.Client(base_url=server.link, timeout=60) as client:
        seconds(client, f"run/{name}/traces")
        found = {
            what: statistics.median(seconds(client, f"run/{name}/traces", **query) for _ in range(repeats))
            for what, query in FILTERS.items()
        }
        ids = re.findall(r'/rollout/([^"?#]+)"', client.get(f"run/{name}/traces").text)
        found["one rollout"] = statistics.median(seconds(client, f"run/{name}/rollout/{id}") for id in ids[1:4])
        memory = server.rss_mb()
    server.close()
    return {
        "first view, s": {page: statistics.median(times) for page, times in first.items()},
        "filter, s": found,
        "server, MB": memory,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=20_000)
    parser.add_argument("--tokens", type=int, default=1000, help="of each prompt in the large run")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        command = [sys.executable, "-m", "agentrig", *SMALL, f"run.directory={place / 'small'}"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        large_run(place / "small" / "source", place / "runs" / "large", given.rollouts, given.tokens)
        size = sum(file.stat().st_size for file in (place / "runs" / "large" / "rollouts").iterdir())
        print(f"{given.rollouts} rollouts, {size / 1e6:.0f} MB of Parquet")
        print(json.dumps(views(place / "runs", "large", given.repeats), indent=2))


if __name__ == "__main__":
    main()
