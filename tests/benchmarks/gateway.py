"""The gateway: CPU per call beside a direct call, and rollouts a second of the stub benchmark through one gateway.

    python tests/benchmarks/gateway.py                        both
    python tests/benchmarks/gateway.py --calls 2000           CPU milliseconds a call, of the gateway's process
    python tests/benchmarks/gateway.py --rollouts 600         rollouts a second, through tap and gateway

The calls are those of the reference agent: prompts of 400 letters and answers of 30 tokens, from the replay server, by
clients in threads over connections that they keep. The gateway's seconds are its process's CPU time, read before and
after: what a call costs beside a direct one, which has no such process between.
Rollouts are those of `tests/benchmarks/rollouts.py`: the graph of langgraph-sql, one write and one check each.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.rollouts import ANSWERS, QUESTION, make_database
from replay_llm import replay_server

from agentrig.endpoints import Endpoint
from agentrig.gateway.client import Visit
from agentrig.gateway.process import Gateway
from agentrig.gateway.settings import GatewaySettings

PROMPT = "You answer questions about the database music:\n" + "CREATE TABLE band (id INTEGER, name TEXT);\n" * 8
PROMPT += f"Question: {QUESTION}"


def cpu_s(pid: int) -> float:
    """Return the CPU seconds that a process has used."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def ask(endpoint: Endpoint, calls: int, *, stream: bool, ids: bool) -> None:
    """Make calls over one kept connection, by the standard library: the least that a client costs."""
    import http.client
    from urllib.parse import urlsplit

    parts = urlsplit(endpoint.base_url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 80, timeout=60)
    body: dict[str, Any] = {"model": endpoint.model, "messages": [{"role": "user", "content": PROMPT}]}
    body |= {"temperature": 0.7, "max_tokens": 200} | ({"return_token_ids": True, "logprobs": True} if ids else {})
    data = json.dumps(body | ({"stream": True} if stream else {})).encode()
    headers = {"authorization": f"Bearer {endpoint.api_key}", "content-type": "application/json"}
    for _ in range(calls):
        connection.request("POST", f"{parts.path}/chat/completions", data, headers)
        reply = connection.getresponse()
        content = reply.read()
        assert reply.status == 200, content
    connection.close()


def at_once(endpoint: Endpoint, calls: int, clients: int, **how: Any) -> float:
    """Make calls from several threads; return the wall seconds."""
    threads = [threading.Thread(target=ask, args=(endpoint, calls // clients), kwargs=how) for _ in range(clients)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start


def cost_of_calls(address: str, calls: int) -> None:
    """Print the CPU time of the gateway's process for a call, and this process's for opening and closing a rollout."""
    direct = Endpoint(base_url=address, model="replay", api_key="k", token_ids=True)
    at_once(direct, 64, 8, stream=False, ids=True)
    print(f"{'clients':>8} {'gateway CPU ms/call':>20} {'calls/s':>9} {'direct calls/s':>15}")
    with Gateway(GatewaySettings()) as gateway:
        for clients in (1, 8, 32):
            visit = Visit(gateway.address, "calls")
            endpoint = visit.open(1, direct)
            at_once(endpoint, 4 * clients, clients, stream=False, ids=False)
            before = cpu_s(gateway.pid)
            wall = at_once(endpoint, calls, clients, stream=False, ids=False)
            spent = cpu_s(gateway.pid) - before
            plain = at_once(direct, calls, clients, stream=False, ids=True)
            found = visit.close()
            made = calls // clients * clients
            assert len(found.spans) == made + 4 * clients
            assert all(s.error is None and s.attributes["response_token_ids"] for s in found.spans)
            print(f"{clients:>8} {1e3 * spent / made:>20.3f} {made / wall:>9.0f} {made / plain:>15.0f}", flush=True)
        before, own = cpu_s(gateway.pid), time.process_time()
        for i in range(200):
            visit = Visit(gateway.address, f"r{i}")
            visit.open(1, direct)
            visit.close()
        spent, own = cpu_s(gateway.pid) - before, time.process_time() - own
        print(f"open and close: {1e3 * spent / 200:.3f} ms in the gateway, {1e3 * own / 200:.3f} ms in the runner")


def one_side(address: str, database: Path, runners: int, count: int, through: bool) -> dict[str, Any]:
    """Run rollouts; return their rate, how many have triplets, and the gateway's CPU seconds."""
    from contextlib import nullcontext

    from agentrig.plugins.loading import load
    from agentrig.plugins.specs import AdapterSpec, AgentSpec
    from agentrig.rewards import Score
    from agentrig.runners.engine import RolloutEngine
    from agentrig.runners.jobs import AgentPlan
    from agentrig.runners.processes import Pool
    from agentrig.runners.runtime import Runtime
    from agentrig.runners.scorer import Scorer
    from agentrig.tasks import Task

    registry = load()
    spec: Any = registry.get(AdapterSpec, "agent-match")
    agent: Any = registry.get(AgentSpec, "langgraph-sql")
    plan = AgentPlan(name="langgraph-sql", config={})
    pool = Pool(plan, n=runners, threads=2, deadline_s=60, retries=1, preload=agent.preload)
    endpoint = Endpoint(base_url=address, model="replay", sampling={"temperature": 0}, token_ids=True)
    given = {"question": QUESTION, "db_id": "music", "database": str(database)}
    tasks = [Task(id=str(i), input=given) for i in range(count)]
    found: dict[str, Any] = {}
    with Gateway(GatewaySettings()) if through else nullcontext() as gateway:
        runtime = Runtime(pool, gateway=gateway)
        scorer = Scorer(lambda task, outcome, budget: Score.ok(1.0), budget_s=5)
        engine = RolloutEngine(runtime, scorer=scorer, adapter=spec.build(spec.config()))

        def body() -> None:
            engine.run(tasks[: 4 * runners], n=1, endpoint=endpoint, step=0, mode="train")
            pids = [os.getpid(), *pool.processes(), *([gateway.pid] if gateway else [])]
            before = [cpu_s(pid) for pid in pids]
            rollouts = engine.run(tasks, n=1, endpoint=endpoint, step=1, mode="train")
            spent = [cpu_s(pid) - s for pid, s in zip(pids, before, strict=True)]
            first, last = min(r.start for r in rollouts), max(r.start + r.duration_s for r in rollouts)
            good = sum(r.failure is None and len(r.triplets) >= 1 for r in rollouts)
            found.update(rate=count / (last - first), good=good, gateway_ms=1e3 * spent[-1] / count if gateway else 0.0)
            found.update(runners_ms=1e3 * sum(spent[1 : 1 + runners]) / count)

        runtime.run(body)
    return found


def measure(runners: int, count: int, address: str, database: Path, *, through: bool) -> dict[str, Any]:
    """Run one side in a fresh process."""
    import subprocess

    command = [sys.executable, __file__, "--side", "gateway" if through else "tap", "--runners", str(runners)]
    command += ["--rollouts", str(count), "--address", address, "--database", str(database)]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=1800)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise SystemExit(f"it failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(lines[-1][7:])
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=0)
    parser.add_argument("--rollouts", type=int, default=0)
    parser.add_argument("--runners", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--side", choices=("tap", "gateway"))
    parser.add_argument("--address")
    parser.add_argument("--database", type=Path)
    options = parser.parse_args()
    if options.side:
        arguments = (options.address, options.database, options.runners[0], options.rollouts)
        print("RESULT " + json.dumps(one_side(*arguments, options.side == "gateway")), flush=True)
        return
    both = not options.calls and not options.rollouts
    with tempfile.TemporaryDirectory() as name, replay_server(ANSWERS, Path(name)) as address:
        if options.calls or both:
            cost_of_calls(address, options.calls or 2000)
        if not (options.rollouts or both):
            return
        database, count = make_database(Path(name)), options.rollouts or 600
        heads = ("runners", "tap", "gateway", "CPU ms/rollout: gateway", "runners, tap", "runners, gateway", "good")
        print("  ".join(heads))
        for runners in options.runners:
            sides: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
            for _ in range(options.repeats):
                for through, results in sides.items():
                    results.append(measure(runners, count, address, database, through=through))

            def median(through: bool, key: str, results: Any = sides) -> float:
                return statistics.median(r[key] for r in results[through])

            good = [r["good"] for results in sides.values() for r in results]
            print(
                f"{runners:>7}  {median(False, 'rate'):.1f}  {median(True, 'rate'):.1f}  "
                f"{median(True, 'gateway_ms'):.2f}  {median(False, 'runners_ms'):.1f}  "
                f"{median(True, 'runners_ms'):.1f}  {good}",
                flush=True,
            )


if __name__ == "__main__":
    main()
