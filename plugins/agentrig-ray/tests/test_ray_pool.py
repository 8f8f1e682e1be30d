"""The pool on a real Ray cluster of this machine: what a run relies on, nodes that join and nodes that leave."""

from __future__ import annotations

import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
from agentrig_ray import cluster
from agentrig_ray.actor import Place
from agentrig_ray.pool import NODES_LOST, RayPool

from agentrig import Endpoint
from agentrig.errors import AgentrigError, ConfigError
from agentrig.plan import resolve
from agentrig.pools import Job, Result
from agentrig.runners.jobs import AgentPlan
from agentrig.testing import check

TOY = str(Path(__file__).resolve().parents[3] / "tests" / "support" / "toy_plugin.py")
NOWHERE = Endpoint(base_url="http://127.0.0.1:9/v1", model="m")

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own


@pytest.fixture
def start(nodes: Any) -> Iterator[Callable[..., RayPool]]:
    made = []

    def make(agent: str = "toy", files: Sequence[str] = (TOY,), config: Any = None, **options: Any) -> RayPool:
        plan = AgentPlan(name=agent, config=config or {}, files=tuple(files))
        limits = {"n": 2, "threads": 2, "deadline_s": 60.0, "retries": 1, "cpus": 1.0}
        pool = RayPool(plan, **{"address": nodes.address, **limits, **options})
        made.append(pool)
        return pool

    yield make
    for pool in made:
        pool.close()


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Endpoint]:
    from model_server import model_server

    with model_server() as server:
        yield Endpoint(base_url=server.url, model="toy-model", token_ids=True)


def submit(pool: RayPool, endpoint: Endpoint, *todo: str, marker: str = "", first: int = 0) -> None:
    for i, do in enumerate(todo, first):
        pool.submit(Job(id=f"job-{i}", input={"number": i, "do": do, "marker": marker}, endpoint=endpoint))


def drain(pool: RayPool, n: int, *, timeout_s: float = 60.0) -> list[Result]:
    """Return n results; if more come, those too."""
    found: list[Result] = []
    end = time.monotonic() + timeout_s
    while len(found) < n and time.monotonic() < end:
        found += pool.poll(0.1)
    return found + pool.poll(0.1)


def wait_until(done: Callable[[], bool], pool: RayPool) -> None:
    end = time.monotonic() + 60
    while not done():
        assert time.monotonic() < end
        pool.poll(0.1)


def waiting(address: str) -> list[dict[str, float]]:
    """Return what Ray tells its autoscaler that it has no room for."""
    from ray._raylet import GcsClient
    from ray.autoscaler.v2.sdk import get_cluster_resource_state

    state = get_cluster_resource_state(GcsClient(address))
    return [
        dict(found.request.resources_bundle) for found in state.pending_resource_requests for _ in range(found.count)
    ]


@pytest.mark.slow
def test_a_node_that_joins_takes_work_and_one_that_leaves_loses_none_and_costs_few_lines(
    start: Callable[..., RayPool],
    nodes: Any,
    endpoint: Endpoint,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With `retries=0`: a rollout that is lost with its node starts again, and that does not count."""
    pool = start(n=3, retries=0)
    assert pool.build_first(60)
    pool.start()
    wait_until(lambda: len(pool.nodes) == 2, pool)
    submit(pool, endpoint, *["slow"] * 4)
    wait_until(lambda: any(a.jobs for a in pool._workers), pool)
    assert pool.room == 0, "the third runner waits for a node: there is room on two"
    assert len(drain(pool, 4)) == 4
    assert waiting(nodes.address) == [{"CPU": 1.0}], "what Ray's autoscaler reads"
    late = nodes.add_node(num_cpus=1)
    wait_until(lambda: len(pool.nodes) == 3, pool)
    assert pool.room == 6
    (new,) = [a for a in pool._workers if a.place and a.place.node == late.node_id]
    submit(pool, endpoint, *["slower"] * 6, first=10)  # they take longer than Ray takes to end a node
    wait_until(lambda: len(new.jobs) == 2, pool)
    nodes.remove_node(late, allow_graceful=False)
    results = drain(pool, 6)
    assert Counter(r.id for r in results) == {f"job-{i}": 1 for i in range(10, 16)}
    assert {r.outcome.answer for r in results} == {"odd"}
    assert pool.replaced == 1
    assert pool.pending == 0
    printed = ""

    def told() -> bool:
        nonlocal printed
        printed += capfd.readouterr().out
        return "has been marked dead" in printed + caplog.text

    wait_until(told, pool)
    assert "raylet" not in printed
    lines = [r.getMessage() for r in caplog.records if r.levelname == "WARNING" and r.name.startswith("agentrig")]
    lost, dead = (line for line in lines if not line.startswith("a runner without a node yet"))
    assert "was lost with its node; 2 rollouts start again, 0 failed: " in lost
    assert re.fullmatch(r"Ray: The node .* has been marked dead because [^.\n]*", dead)


@pytest.mark.slow
def test_a_node_without_the_plugins_file_gets_it(
    start: Callable[..., RayPool], endpoint: Endpoint, tmp_path: Path
) -> None:
    here = tmp_path / "only_here.py"
    shutil.copy(TOY, here)
    pool = start(files=(str(here),), n=1)
    here.unlink()
    submit(pool, endpoint, "")
    assert [r.outcome.answer for r in drain(pool, 1)] == ["odd"]


@pytest.mark.slow
def test_a_loopback_address_is_not_given_to_another_node(start: Callable[..., RayPool], endpoint: Endpoint) -> None:
    pool = start(n=1)
    assert pool.build_first(60)
    (actor,) = pool._workers
    assert actor.place is not None
    assert actor.place.ip == pool._here
    actor.place = Place(actor.place.node, "10.9.8.7")  # as Ray reports it for a runner on another machine
    reachable = attrs.evolve(endpoint, base_url="http://10.0.0.5:8000/v1")
    assert pool._send(actor, Job(id="a", input={}, endpoint=reachable))
    pool.submit(Job(id="b", input={}, endpoint=endpoint))
    with pytest.raises(AgentrigError, match=r"only this machine reaches, and a runner is on the node 10\.9\.8\.7"):
        pool.poll(0.1)


@pytest.mark.slow
def test_a_cluster_without_room_is_explained(start: Callable[..., RayPool]) -> None:
    pool = start(n=1, cpus=64.0, resources={"runner": 1.0}, wait_s=0.5)
    with pytest.raises(AgentrigError, match=r"no runner has had a place \(64 CPUs, 1 runner\) .* within 0.5 s"):
        drain(pool, 1)


@pytest.mark.slow
def test_a_rollout_that_takes_nodes_down_fails_at_last(start: Callable[..., RayPool]) -> None:
    from ray.exceptions import NodeDiedError

    pool = start(n=1, retries=0)
    job = Job(id="a", input={}, endpoint=NOWHERE)
    for times in range(NODES_LOST + 1):
        actor = pool._spawn()
        pool._workers.append(actor)
        actor.ready, actor.place, actor.jobs = True, Place("a node that left", "10.9.8.7"), {"a": (job, 0.0)}
        failed = pool._died(actor, NodeDiedError("gone"))
        assert [r.outcome.failure for r in failed] == (["runner-died"] if times == NODES_LOST else [])
        pool._waiting.clear()


def test_the_keys_reach_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """`address`, `logs` and `runtime_env`, in what Ray is called with; the others have tests of their own."""
    import ray

    asked: dict[str, Any] = {}

    class Asked(Exception):
        pass

    def remote(runner: type) -> Any:
        return SimpleNamespace(options=lambda **options: asked.update(options) or exec_raise())

    def exec_raise() -> None:
        raise Asked

    keys = {"address": "h:1", "cpus": 2.0, "resources": {"a": 1.0}, "wait_s": 9.0, "logs": True}
    overrides = [f"runners.{name}={value}" for name, value in keys.items() if not isinstance(value, dict | bool)]
    overrides += ["runners.resources.a=1", "runners.logs=true", 'runners.runtime_env.env_vars={A="b"}']
    plan = resolve("toy", overrides=overrides, uses={"runners": "ray"}, files=[TOY])
    pool = plan.pool()
    assert isinstance(pool, RayPool)
    monkeypatch.setattr(cluster, "join", lambda address, *, logs: asked.update(address=address, logs=logs) or False)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.1")
    monkeypatch.setattr(ray, "remote", remote)
    with pytest.raises(Asked):
        pool.start()
    assert (asked["address"], asked["logs"]) == ("h:1", True)
    assert asked["runtime_env"] == {"env_vars": {"A": "b"}}
    assert (asked["num_cpus"], asked["resources"], pool._wait_s) == (2.0, {"a": 1.0}, 9.0)


@pytest.mark.slow
def test_the_kit_finds_nothing(nodes: Any) -> None:
    report = check("runners", "ray", settings={"address": nodes.address, "cpus": 0.25}, ends_s=40.0)
    assert [r.check for r in report.results if r.status != "passed"] == [], report


def test_addresses_that_cannot_be_joined_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    if ray.is_initialized():
        ray.shutdown()
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:9 does not answer"):
        cluster.join("127.0.0.1:9")
    with pytest.raises(ConfigError, match="ray job submit"):
        cluster.join("ray://127.0.0.1:10001")
    assert "ray start --head" in str(cluster.refused("auto", ConnectionError("none")))
    refusal = ConnectionError("no")
    refusal.__cause__ = ray.exceptions.AuthenticationError("InvalidAuthToken")
    assert "RAY_AUTH_MODE=token" in str(cluster.refused("10.0.0.1:6379", refusal))
