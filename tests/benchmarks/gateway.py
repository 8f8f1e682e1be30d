"""The gateway: CPU milliseconds a call, of the gateway's process.

    python tests/benchmarks/gateway.py [--calls 2000]

The calls are those of the reference agent: prompts of 400 letters and answers of 30 tokens, from the replay server, by
clients in threads over connections that they keep. The gateway's seconds are its process's CPU time, read before and
after: what a call costs beside a direct one, which has no such process between.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.rollouts import ANSWERS, QUESTION
from replay_llm import replay_server

from agentrig.endpoints import Endpoint
from agentrig.gateway.client import GatewayAttempt
from agentrig.gateway.process import Gateway
from agentrig.gateway.settings import GatewaySettings

PROMPT = "You answer questions about the database music:\n" + "CREATE TABLE band (id INTEGER, name TEXT);\n" * 8
PROMPT += f"Question: {QUESTION}"


def ask(endpoint: Endpoint, calls: int, *, ids: bool) -> None:
    """Make calls over one kept connection, by the standard library."""
    parts = urlsplit(endpoint.base_url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 80, timeout=60)
    body: dict[str, Any] = {"model": endpoint.model, "messages": [{"role": "user", "content": PROMPT}]}
    body |= {"temperature": 0.7, "max_tokens": 200} | ({"return_token_ids": True, "logprobs": True} if ids else {})
    data = json.dumps(body).encode()
    headers = {"authorization": f"Bearer {endpoint.api_key}", "content-type": "application/json"}
    for _ in range(calls):
        connection.request("POST", f"{parts.path}/chat/completions", data, headers)
        reply = connection.getresponse()
        content = reply.read()
        assert reply.status == 200, content
    connection.close()


def cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def at_once(work: Callable[[int], None], clients: int) -> float:
    """Do work in several threads; return the wall seconds."""
    start = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(work, range(clients)))
    return time.perf_counter() - start


def cost_of_calls(address: str, calls: int) -> None:
    """Print the CPU time of the gateway's process for a call, and this process's for opening and closing a rollout."""
    direct = Endpoint(base_url=address, model="replay", api_key="k", token_ids=True)
    at_once(lambda _: ask(direct, 8, ids=True), 8)
    print(f"{'clients':>8} {'gateway CPU ms/call':>20} {'calls/s':>9} {'direct calls/s':>15}")
    with Gateway(GatewaySettings()) as gateway:
        for clients in (1, 8, 32):
            visit = GatewayAttempt(gateway.address, "calls")
            endpoint, each = visit.open(1, direct), calls // clients
            at_once(lambda _, e=endpoint: ask(e, 4, ids=False), clients)  # type: ignore[misc]
            before = cpu_s(gateway.pid)
            wall = at_once(lambda _, e=endpoint, n=each: ask(e, n, ids=False), clients)  # type: ignore[misc]
            spent = cpu_s(gateway.pid) - before
            plain = at_once(lambda _, n=each: ask(direct, n, ids=True), clients)  # type: ignore[misc]
            found = visit.close()
            made = each * clients
            assert len(found.spans) == made + 4 * clients
            assert all(s.error is None and s.attributes["response_token_ids"] for s in found.spans)
            print(f"{clients:>8} {1e3 * spent / made:>20.3f} {made / wall:>9.0f} {made / plain:>15.0f}", flush=True)
        before, own = cpu_s(gateway.pid), time.process_time()
        for i in range(400):
            visit = GatewayAttempt(gateway.address, f"r{i}")
            visit.open(1, direct)
            visit.close()
        spent, own = cpu_s(gateway.pid) - before, time.process_time() - own
        print(f"open and close: {1e3 * spent / 400:.3f} ms in the gateway, {1e3 * own / 400:.3f} ms in the runner")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=2000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, replay_server(ANSWERS, Path(name)) as address:
        cost_of_calls(address, options.calls)


if __name__ == "__main__":
    main()
