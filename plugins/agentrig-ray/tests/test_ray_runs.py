"""Whole runs on a Ray cluster whose nodes come and go: each step has all its rollouts once, and the same figures."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from agentrig import hookimpl
from agentrig.endpoints import is_loopback
from agentrig.plan import Plan, resolve
from agentrig.run.training import train

TOY = str(Path(__file__).resolve().parents[3] / "tests" / "support" / "toy_plugin.py")
SAME = ("step", "reward", "reward_std", "accuracy", "rollouts", "failures", "transitions_per_rollout", "prompt_tokens")

EMPTY: Mapping[str, Any] = {}
FOURTH = {"node_ip_address": "127.0.0.4"}

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own


class Changes:
    """Lets a node join once step `joins` is about to start, and kills one while step `leaves` runs."""

    def __init__(self, nodes: Any, *, joins: int, leaves: int, joining: Mapping[str, Any]) -> None:
        self.nodes, self.joins, self.leaves, self.joining = nodes, joins, leaves, joining
        self.step, self.late, self.victim = 1, None, nodes.list_all_nodes()[-1]
        self.killed = threading.Event()

    @hookimpl
    def on_step_end(self, event: Any) -> None:
        self.step = event.step + 1
        if self.step == self.joins:
            self.late = self.nodes.add_node(num_cpus=1, **self.joining)

    @hookimpl
    def on_rollout_end(self, rollout: Any) -> None:
        """Kill during a step: when its first rollout has ended, others are running."""
        if rollout.mode == "train" and rollout.step == self.leaves and not self.killed.is_set():
            self.killed.set()
            self.nodes.remove_node(self.victim, allow_graceful=False)


def lines_of(run: Path) -> list[dict[str, Any]]:
    import json

    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def rollouts_of(run: Path) -> list[dict[str, Any]]:
    columns = ["id", "step", "mode", "group", "task"]
    found = [row for file in sorted((run / "rollouts").rglob("*.parquet")) for row in pq.read_table(file).to_pylist()]
    return [{name: row[name] for name in columns if name in row} for row in found]


def compared(
    make: Callable[..., Plan], nodes: Any, tmp_path: Path, *, steps: int, each: int, joining: Mapping[str, Any] = EMPTY
) -> tuple[Any, Any]:
    """Run on changing nodes and on processes; check the counts of both, and return their lines."""
    found = []
    for runners in ("ray", "processes"):
        own = [f"run.directory={tmp_path}", f"run.name={runners}", f"algorithm.steps={steps}"]
        own += [f"runners.address={nodes.address}", "runners.cpus=1"] if runners == "ray" else []
        plan = make(*own, runners=runners)
        changes = Changes(nodes, joins=3, leaves=5, joining=joining) if runners == "ray" else None
        if changes is not None:
            plan.registry.add_observer(changes, "changes")
        summary = train(plan)
        run = tmp_path / runners
        if changes is not None:
            assert changes.killed.is_set()
            assert changes.late is not None
        rows = [r for r in rollouts_of(run) if r["mode"] == "train"]
        assert Counter(r["step"] for r in rows) == dict.fromkeys(range(1, steps + 1), each)
        assert max(Counter(r["id"] for r in rows).values()) == 1
        assert summary["failures"] == {}
        found.append(lines_of(run))
    return found[0], found[1]


def plays_the_same(nodes: Any, tmp_path: Path, *keys: str, joining: Mapping[str, Any] = EMPTY, n: int) -> None:
    """The algorithm is a toy, and agents take a moment, so that rollouts are running when the node dies."""
    from model_server import model_server

    with model_server() as server:

        def make(*own: str, runners: str) -> Plan:
            more = [f"algorithm.endpoint={server.url}", "algorithm.report=false", 'run.block=["report"]']
            more += ['tasks.do=["slow"]', f"runners.n={n}", "runners.threads=2", "run.validation_tasks=1"]
            more += keys if runners == "ray" else ()
            return resolve("toy", overrides=[*more, *own], uses={"runners": runners}, files=[TOY])

        ray, processes = compared(make, nodes, tmp_path, steps=6, each=12, joining=joining)
    assert [{k: line[k] for k in SAME} for line in ray] == [{k: line[k] for k in SAME} for line in processes]


@pytest.mark.slow
def test_a_node_joins_at_step_3_and_one_is_killed_at_step_5(nodes: Any, tmp_path: Path) -> None:
    plays_the_same(nodes, tmp_path, n=3)


@pytest.mark.slow
def test_the_same_through_a_gateway_that_nodes_with_other_addresses_reach(apart: Any, tmp_path: Path) -> None:
    plays_the_same(apart, tmp_path, *through_gateway(apart), joining=FOURTH, n=4)


def through_gateway(nodes: Any) -> list[str]:
    """Return the keys of a run whose model's server stays on loopback, which only the gateway then reaches."""
    here = nodes.address.rpartition(":")[0]
    if is_loopback(here):
        pytest.skip("this machine has no other address than loopback")
    return ["gateway.use=on", f"gateway.host={here}"]
