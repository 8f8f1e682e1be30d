"""Rollouts a second: agentrig beside bare Agent Lightning 0.3, with the same agent and the same model server.

    python tests/benchmarks/rollouts.py                       1, 2 and 8 runners, 300 rollouts each, both sides
    python tests/benchmarks/rollouts.py --memory 5000         agentrig's memory over 5000 rollouts

Both sides run the graph of langgraph-sql (one write and one check a rollout) with LangChain's `ChatOpenAI` against the
replay server. The script fails unless every rollout of both sides succeeded with both its calls recorded. The bare
side is Agent Lightning's Trainer with its default tracer, strategy and runner, an algorithm that enqueues all
rollouts and waits, and a LitAgent that calls the graph with the tracer's LangChain handler. Timed is the span from
the first rollout's start to the last one's end, so Agent Lightning's 5 s polls while idle do not count against it.
Sides alternate; each figure is the median of the repeats.
"""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from replay_llm import replay_server

QUESTION = "How many bands are there?"
CALLS = 2
"""Calls of a rollout: a query and its check."""

ANSWERS = {"*": "SELECT count(*) FROM band"}


def make_database(folder: Path) -> Path:
    path = folder / "music.sqlite"
    if not path.exists():
        connection = sqlite3.connect(path)
        connection.execute("CREATE TABLE band (id INTEGER PRIMARY KEY, name TEXT, country TEXT)")
        connection.executemany("INSERT INTO band (name, country) VALUES (?, ?)", [("A", "x"), ("B", "y")])
        connection.commit()
        connection.close()
    return path


def agentrig_side(address: str, database: Path, runners: int, count: int, *, memory: bool) -> dict[str, Any]:
    """Run rollouts; return their rate, or the memory of the processes."""
    from agentrig.endpoints import Endpoint
    from agentrig.plugins.loading import load
    from agentrig.rewards import Score
    from agentrig.runners.engine import RolloutEngine
    from agentrig.runners.jobs import AgentPlan
    from agentrig.runners.processes import Pool
    from agentrig.runners.runtime import Runtime
    from agentrig.runners.scorer import Scorer
    from agentrig.tasks import Task

    registry = load()
    preload = registry.find("agent", "langgraph-sql").spec.preload
    spec = registry.find("adapter", "agent-match").spec
    plan = AgentPlan(name="langgraph-sql", config={})
    pool = Pool(plan, n=runners, threads=1, deadline_s=60, retries=1, preload=preload)
    endpoint = Endpoint(base_url=address, model="replay", sampling={"temperature": 0}, token_ids=True)
    tasks = [
        Task(id=str(i), input={"question": QUESTION, "db_id": "music", "database": str(database)}) for i in range(count)
    ]
    found: dict[str, Any] = {}

    runtime = Runtime(pool)
    engine = RolloutEngine(
        runtime,
        scorer=Scorer(lambda task, outcome, budget: Score.ok(1.0), budget_s=5),
        adapter=spec.build(spec.config()),
    )

    def body() -> None:
        engine.run(tasks[: 4 * runners], n=1, endpoint=endpoint, step=0, mode="train")
        if memory:
            found["memory"] = []
            for i in range(0, count, 250):
                engine.run(tasks[i : i + 250], n=1, endpoint=endpoint, step=1, mode="train")
                sizes = [resident(os.getpid()), *(resident(p) for p in pool.processes())]
                found["memory"].append((i + 250, sizes[0], max(sizes[1:])))
            return
        rollouts = engine.run(tasks, n=1, endpoint=endpoint, step=1, mode="train")
        first = min(r.start for r in rollouts)
        last = max(r.start + r.duration_s for r in rollouts)
        good = [r for r in rollouts if r.failure is None and r.triplets and len(r.trace.llm_calls()) == CALLS]
        found.update(rollouts=len(rollouts), good=len(good), rate=len(rollouts) / (last - first))

    runtime.run(body)
    return found


def resident(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


def lightning_side(address: str, database: Path, runners: int, count: int) -> dict[str, Any]:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    import agentlightning as agl
    from agentrig_langgraph_sql.graph import build_graph
    from langchain_openai import ChatOpenAI

    found: dict[str, Any] = {}

    class Agent(agl.LitAgent[Any]):
        graph: Any = None

        def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
            if self.graph is None:  # once a runner, as agentrig's side
                endpoint = resources["main_llm"]
                llm = ChatOpenAI(
                    base_url=endpoint.endpoint, model=endpoint.model, api_key="none", **endpoint.sampling_parameters
                )
                Agent.graph = build_graph(llm)
            handler = self.tracer.get_langchain_handler()
            self.graph.invoke(task, config={"callbacks": [handler]})
            return 1.0

    class Enqueue(agl.Algorithm):
        async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
            import asyncio

            store = self.get_store()
            endpoint = agl.LLM(endpoint=address, model="replay", sampling_parameters={"temperature": 0})
            await store.add_resources({"main_llm": endpoint})
            rollouts = [await store.enqueue_rollout(task) for task in train_dataset]
            ids = [r.rollout_id for r in rollouts]
            while len(await store.wait_for_rollouts(rollout_ids=ids, timeout=0)) < len(ids):
                await asyncio.sleep(0.5)
            attempts = [await store.get_latest_attempt(i) for i in ids]
            warm = sorted(attempts, key=lambda a: a.start_time)[2 * runners :]
            spans = [await store.query_spans(i) for i in ids]
            calls = [sum(s.name == "openai.chat.completion" for s in trace) for trace in spans]
            seconds = max(a.end_time for a in warm) - min(a.start_time for a in warm)
            good = sum(a.status == "succeeded" and c == CALLS for a, c in zip(attempts, calls, strict=True))
            found.update(rollouts=len(ids), good=good, rate=len(warm) / seconds)

    tasks = [{"question": QUESTION, "database": str(database)} for _ in range(count + 2 * runners)]
    trainer = agl.Trainer(n_runners=runners, algorithm=Enqueue(), port=free_port())
    trainer.fit(Agent(), train_dataset=tasks)
    return found


def free_port() -> int:
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def measure(
    side: str, runners: int, count: int, address: str, database: Path, *, memory: bool = False
) -> dict[str, Any]:
    """Run one side, `agentrig` or `lightning`, in a fresh process; with `memory` measure that instead."""
    command = [sys.executable, __file__, "--side", side, "--runners", str(runners), "--rollouts", str(count)]
    command += ["--address", address, "--database", str(database)] + (["--with-memory"] if memory else [])
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=1800)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise SystemExit(f"{side} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(lines[-1][7:])
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runners", type=int, nargs="*", default=[1, 2, 8])
    parser.add_argument("--rollouts", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--memory", type=int, default=0, metavar="ROLLOUTS")
    parser.add_argument("--side", choices=("agentrig", "lightning"))
    parser.add_argument("--address")
    parser.add_argument("--database", type=Path)
    parser.add_argument("--with-memory", action="store_true")
    options = parser.parse_args()
    if options.side:
        started = time.time()
        arguments = (options.address, options.database, options.runners[0], options.rollouts)
        if options.side == "lightning":
            result = lightning_side(*arguments)
        else:
            result = agentrig_side(*arguments, memory=options.with_memory)
        print("RESULT " + json.dumps({**result, "wall_s": time.time() - started}), flush=True)
        return
    with tempfile.TemporaryDirectory() as name, replay_server(ANSWERS, Path(name)) as address:
        database = make_database(Path(name))
        if options.memory:
            result = measure("agentrig", 2, options.memory, address, database, memory=True)
            for done, main_mib, runner_mib in result["memory"]:
                print(f"{done:>6} rollouts: {main_mib:7.1f} MiB main process, {runner_mib:7.1f} MiB largest runner")
            return
        heads = f"{'runners':>8} {'agentrig':>10} {'bare':>10} {'ratio':>7}"
        print(f"{heads}   rollouts/s; then rollouts and good ones of each measurement")
        for runners in options.runners:
            sides: dict[str, list[dict[str, Any]]] = {"agentrig": [], "lightning": []}
            for _ in range(options.repeats):
                for side, results in sides.items():
                    results.append(measure(side, runners, options.rollouts, address, database))
            ours, bare = (statistics.median(r["rate"] for r in sides[s]) for s in ("agentrig", "lightning"))
            lost = [(r["rollouts"], r["good"]) for s in sides.values() for r in s]
            if any(rollouts != good for rollouts, good in lost):
                raise SystemExit(f"not the same work: rollouts and those with {CALLS} recorded calls, in turn: {lost}")
            print(f"{runners:>8} {ours:>10.1f} {bare:>10.1f} {ours / bare:>6.2f}x   {lost}", flush=True)


if __name__ == "__main__":
    main()
