"""The manager and the runners on a real Ray cluster of two nodes, with TransferQueue and a small model server."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

import attrs
import pytest

from agentrig import AlgorithmSpec, Endpoint
from agentrig.credit import GroupConfig
from agentrig.plan import resolve
from agentrig.run.training import train

TOY = str(Path(__file__).resolve().parents[3] / "tests" / "support" / "toy_plugin.py")
TALKER = str(Path(__file__).parent / "verl_toy.py")

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # warnings of Ray and verl
    pytest.mark.usefixtures("needs_verl"),
]
GROUP = 4
# verl's own switch is off here: without the package modelscope verl would fail.
MODELSCOPE = {
    "VERL_USE_MODELSCOPE": "False",
    "VLLM_USE_MODELSCOPE": "True",
    "MODELSCOPE_CACHE": "/models/scope",
    "MODELSCOPE_ENDPOINT": "http://mirror.invalid",
}


@pytest.fixture(scope="module")
def servers():
    from model_server import model_server

    with model_server() as one, model_server() as two:
        yield one, two


@pytest.fixture(scope="module")
def composed():
    from agentrig_verl import schema
    from agentrig_verl.recipes import ADDITIONS, REFERENCE

    planned = {"actor_rollout_ref.actor.use_dynamic_bsz": True}  # a run's memory plan sets it
    return schema.compose({**REFERENCE, **ADDITIONS, **planned}, trusted={"transfer_queue.enable": True})


@pytest.fixture(scope="module")
def ray_cluster(composed):
    """Two nodes of four CPUs, joined as a run joins one; TransferQueue with two storage units."""
    import ray
    import transfer_queue as tq
    from agentrig_verl import cluster
    from ray.cluster_utils import Cluster

    from agentrig.plugins.builtin import cpu_spec

    patch = pytest.MonkeyPatch()
    patch.setenv("TOY_NODE_KEY", "secret-of-the-node")  # as on a node whose Ray was started in a shell with keys
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 4})
    nodes.add_node(num_cpus=4)
    patch.setenv("RAY_ADDRESS", nodes.address)
    patch.setenv("PYTHONPATH", str(Path(TOY).parent))
    for name, value in MODELSCOPE.items():
        patch.setenv(name, value)
    try:
        spec = cpu_spec()
        assert cluster.connect(composed, spec.build(spec.config())) == 2
        tq.init(composed.transfer_queue)
        yield nodes
    finally:
        tq.close()
        ray.shutdown()
        nodes.shutdown()
        patch.undo()


class Probe:
    def __init__(self, body, *, on_ray):
        self.body, self.on_ray = body, on_ray
        self.placed = None

    def pool(self, plan, **settings):
        from agentrig_verl.pool import PlacedPool

        self.placed = PlacedPool(plan, **settings)
        return self.placed

    def run(self, session):
        self.placed.place(self.on_ray, cpus=0.5)
        session.plan_steps(1)
        self.body(session, self.placed)


@pytest.fixture
def run_with(servers, ray_cluster, tmp_path):
    """Run a test's body with a real session, its runners on Ray."""

    def run(body, *overrides, agent="toy-talker", on_ray=True):
        own = [f"run.directory={tmp_path}/runs", "run.name=toy", "run.failure_limit=0.9"]
        own.append('run.block=["report"]')
        plan = resolve("toy", overrides=[*own, *overrides], uses={"agent": agent}, files=[TOY, TALKER])
        spec = AlgorithmSpec(name="probe", summary="", build=lambda config: Probe(body, on_ray=on_ray))
        probe = attrs.evolve(plan.components["algorithm"], spec=spec)
        components = {**plan.components, "algorithm": probe, "credit": plan.registry.find("credit", "grpo")}
        train(attrs.evolve(plan, components=components, configs={**plan.configs, "credit": GroupConfig()}))

    return run


def endpoints(servers):
    return [Endpoint(base_url=s.url, model="toy-model", token_ids=True) for s in servers]


def prompts_of(indices, step):
    """A step's prompts as verl's trainer makes and registers them."""
    import uuid

    import numpy as np
    import transfer_queue as tq
    from agentrig_verl.dataset import TaskDataset
    from verl.utils import tensordict_utils as tu
    from verl.utils.dataset.rl_dataset import collate_fn

    rows = TaskDataset.__new__(TaskDataset)
    rows.ids = [f"train-{i}" for i in range(24)]
    batch = collate_fn([rows[i] for i in indices])
    batch["uid"] = np.array([str(uuid.uuid4()) for _ in indices], dtype=object)
    batch = tu.get_tensordict(batch)
    tu.assign_non_tensor_data(batch, "global_steps", step)
    tags = [{"is_prompt": True, "status": "pending", "global_steps": step} for _ in indices]
    tq.kv_batch_put(keys=list(batch["uid"]), partition_id="train", tags=tags)
    return batch


def replay_buffer(config):
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

    sampler = config.trainer.v1.sampler
    return ReplayBuffer(
        trainer_mode="sync",
        trainer_config=config.trainer.v1.sync,
        max_off_policy_threshold=sampler.max_off_policy_threshold,
        max_off_policy_strategy=sampler.max_off_policy_strategy,
        sampler_kwargs=sampler.sampler_kwargs,
        train_batch_size=config.data.train_batch_size,
        gen_batch_size=config.data.train_batch_size,
    )


def kept(session):
    found = []
    original = session.rollouts

    def rollouts(*args, **more):
        got = original(*args, **more)
        found.extend(got)
        return got

    session.rollouts = rollouts
    return found


@pytest.mark.slow
def test_trajectories_reach_verls_replay_buffer_and_trainer(run_with, composed, servers, monkeypatch):
    """All rollouts and all tokens are there once; verl trains with the advantages over rollouts."""
    import torch
    import transfer_queue as tq
    from agentrig_verl.manager import LoopManager
    from agentrig_verl.trainer import Trainer
    from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

    seen = {}
    indices = [3, 0, 11, 7, 20]

    def body(session, pool):
        rollouts = kept(session)
        manager = LoopManager(composed, session, endpoints(servers))
        batch = prompts_of(indices, step=1)
        uids = list(batch["uid"])
        manager.generate_sequences(batch)
        meta, _ = replay_buffer(composed).sample(global_steps=1, partition_id="train", batch_size=len(indices))
        real = list(meta.keys)
        meta = upsample_batch_to_divisible_size(meta, 16, eos_token_id=0)
        fields = ["prompts", "responses", "response_mask", "rm_scores", "rollout_log_probs", "input_ids", "task_id"]
        seen["rows"] = {
            key: {f: row[f] for f in fields}
            for key, row in zip(
                real, tq.kv_batch_get(keys=real, partition_id="train", select_fields=fields), strict=True
            )
        }
        logprobs = tq.kv_batch_get(keys=list(meta.keys), partition_id="train", select_fields=["rollout_log_probs"])
        logprobs["old_log_probs"] = logprobs.pop("rollout_log_probs")
        tq.kv_batch_put(keys=list(meta.keys), partition_id="train", fields=logprobs)
        trainer = Trainer.__new__(Trainer)
        trainer.config, trainer.global_steps, trainer.agent_loop_manager = composed, 1, manager
        meta = trainer._compute_advantage(meta, {})
        data = tq.kv_batch_get(
            keys=list(meta.keys), partition_id="train", select_fields=["advantages", "response_mask"]
        )
        seen["advantages"] = dict(zip(meta.keys, data["advantages"].unbind(), strict=True))
        seen["masks"] = dict(zip(meta.keys, data["response_mask"].unbind(), strict=True))
        deadline = time.monotonic() + 60
        while len(pool._inner.nodes) < 3 and time.monotonic() < deadline:  # one may have run all rollouts meanwhile
            time.sleep(0.1)
        seen.update(rollouts=rollouts, uids=uids, real=real, nodes=pool._inner.nodes, figures=manager.figures)
        tq.kv_clear(keys=list(meta.keys), partition_id="train")

    monkeypatch.setattr(PPOTrainerSync, "_update_actor", lambda self, batch, metrics: batch)  # needs a GPU
    run_with(body, "runners.n=3")
    groups = [seen["rollouts"][i * GROUP : (i + 1) * GROUP] for i in range(len(indices))]

    # Identity: verl's rows are the tasks that it sampled, in its order; two conversations are two sequences each.
    assert [g[0].task.id for g in groups] == [f"train-{i}" for i in indices]
    want = {f"{u}_{s}_{i}" for u in seen["uids"] for s in range(GROUP) for i in range(2)}
    assert set(seen["real"]) == want

    # Every sampled token is there once, with its log-probability, and the score on the last token.
    for uid, group in zip(seen["uids"], groups, strict=True):
        for session, rollout in enumerate(group):
            rows = [seen["rows"][f"{uid}_{session}_{i}"] for i in range(2)]
            sampled = sum(int(row["response_mask"].sum()) for row in rows)
            assert sampled == sum(len(t.response_ids) for t in rollout.triplets)
            assert len(rollout.triplets) in (2, 4, 6)
            for row in rows:
                mask = row["response_mask"].bool()
                assert bytes(row["responses"][mask].tolist()) == b"odd" * (int(mask.sum()) // 3)
                assert torch.all(row["rollout_log_probs"][mask] == -0.25)
                assert torch.all(row["rollout_log_probs"][~mask] == 0)
                assert row["rm_scores"].sum() == row["rm_scores"][-1] == rollout.value
                assert torch.equal(row["input_ids"], torch.cat([row["prompts"], row["responses"]]))

    for uid, group in zip(seen["uids"], groups, strict=True):
        values = torch.tensor([r.value for r in group])
        spread = (values - values.mean()) / (values.std() + 1e-6)
        for session in range(GROUP):
            for i in range(2):
                key = f"{uid}_{session}_{i}"
                wanted = spread[session] * seen["masks"][key].float()
                assert torch.allclose(seen["advantages"][key], wanted, atol=1e-5), key
    padding = set(seen["advantages"]) - want
    assert len(seen["advantages"]) % 16 == 0
    assert padding
    assert all(float(seen["advantages"][k].abs().sum()) == 0 for k in padding)

    # Balance: a group stays on one server, and both servers are used; runners are on both nodes.
    by_group = defaultdict(set)
    for which, server in enumerate(servers):
        for body_ in server.bodies():
            by_group[body_["messages"][0]["content"].split(": ")[1]].add(which)
    assert all(len(s) == 1 for s in by_group.values())
    assert set().union(*by_group.values()) == {0, 1}
    assert len(seen["nodes"]) == 3
    assert seen["figures"]["sequences"] == len(want)


@pytest.mark.slow
def test_a_dead_runner_is_replaced_and_a_hung_rollout_is_typed(run_with, composed, servers, tmp_path, caplog):
    """Nothing is lost or counted twice, and rollouts that failed do not enter a baseline."""
    import transfer_queue as tq
    from agentrig_verl.manager import LoopManager

    seen = {}

    def body(session, pool):
        rollouts = kept(session)
        manager = LoopManager(composed, session, endpoints(servers))
        batch = prompts_of([0, 1, 2, 3], step=1)
        manager.generate_sequences(batch)
        meta, _ = replay_buffer(composed).sample(global_steps=1, partition_id="train", batch_size=4)
        seen.update(rollouts=rollouts, keys=list(meta.keys), uids=list(batch["uid"]), replaced=pool.replaced)
        seen["left"] = {k for k in tq.kv_list("train").get("train", {}) if k in seen["uids"]}
        tq.kv_clear(keys=list(meta.keys), partition_id="train")

    marks = tmp_path / "marks"
    marks.mkdir()
    run_with(
        body, "runners.n=2", "runners.threads=2", "runners.deadline_s=12", "runners.retries=3",
        'tasks.do=["", "die-once", "hang", "typed"]', f"tasks.marker={marks}",
    )  # fmt: skip
    failures = [Counter(r.failure for r in seen["rollouts"][i * 4 : i * 4 + 4]) for i in range(4)]
    assert failures == [{None: 4}, {None: 4}, {"deadline": 4}, {"no-plan": 4}]
    assert len({r.id for r in seen["rollouts"]}) == 16
    assert {k.split("_")[0] for k in seen["keys"]} == set(seen["uids"][:2])
    assert len(seen["keys"]) == len(set(seen["keys"])) == 16
    assert not seen["left"]
    assert seen["replaced"] >= 2
    assert any("start again" in line for line in caplog.messages)
    assert any("past their deadline" in line for line in caplog.messages)


@pytest.mark.slow
def test_a_cluster_without_the_gpus_is_explained(ray_cluster, composed, monkeypatch):
    import ray
    from agentrig_verl import cluster

    from agentrig.hardware import Hardware, Probe

    class Gpu(Hardware):
        def probe(self):
            return Probe(available=True)

    assert cluster._short(ray, composed, Gpu(name="cuda", torch_device="cuda", ray_resource="GPU")) == [
        "it has 0 GPU, and the run needs 1"
    ]


@pytest.mark.slow
def test_secrets_that_a_cluster_lacks_are_reported_per_node(ray_cluster):
    import ray
    from agentrig_verl import cluster

    lines = cluster.lacks(ray, ["AGENTRIG_TEST_SECRET", "PATH"])
    assert len(lines) == 2
    assert all(line.endswith("has no AGENTRIG_TEST_SECRET") for line in lines)
    assert "--yes" in cluster._explain("127.0.0.1:1", lines, [], stoppable=True)
    named = cluster._explain("127.0.0.1:1", lines, [], stoppable=False)
    assert ("--yes" in named, "RAY_ADDRESS" in named) == (False, True)


@pytest.mark.slow
def test_actors_get_the_variables_that_their_agent_declares(ray_cluster, monkeypatch):
    from agentrig_verl.pool import PlacedPool

    from agentrig.pools import Job
    from agentrig.runners.jobs import AgentPlan

    monkeypatch.setenv("TOY_DECLARED", "declared")
    monkeypatch.setenv("WANDB_API_KEY", "secret-of-the-run")
    plan = AgentPlan(name="toy-variables", config={}, files=(TOY, TALKER), environment=("TOY_DECLARED",))
    pool = PlacedPool(plan, n=1, threads=1, deadline_s=100, retries=0)
    pool.place(True, cpus=0.5)
    try:
        pool.submit(Job(id="a", input={}, endpoint=Endpoint(base_url="http://127.0.0.1:9/v1", model="m")))
        end = time.monotonic() + 100
        results = []
        while not results and time.monotonic() < end:
            results = pool.poll(0.2)
    finally:
        pool.close()
    found = results[0].outcome.answer
    assert found["TOY_DECLARED"] == "declared"
    assert {"PATH", "HOME"} <= set(found)
    assert "secret-of" not in str(found)


@pytest.mark.slow
def test_the_keys_of_runners_place_them(ray_cluster):
    from agentrig_ray.pool import RayPool
    from agentrig_verl.algorithm import Verl
    from agentrig_verl.settings import VerlConfig

    from agentrig.runners.jobs import AgentPlan
    from agentrig.runners.processes import Pool

    plan = AgentPlan(name="toy-variables", config={}, files=(TOY, TALKER))
    placed = {}
    for runners in ("ray", "local", "auto"):
        for nodes in (1, 2):
            verl = Verl(VerlConfig(runners=runners, runner_cpus=0.75))
            pool = verl.pool(plan, n=0, threads=1, deadline_s=100, retries=0)
            verl.place(nodes)
            placed[runners, nodes] = type(pool._inner)
            if isinstance(pool._inner, RayPool):
                assert pool._inner._cpus == 0.75
            pool.close()
    assert placed == {
        ("ray", 1): RayPool, ("ray", 2): RayPool, ("local", 1): Pool, ("local", 2): Pool,
        ("auto", 1): Pool, ("auto", 2): RayPool,
    }  # fmt: skip


@pytest.mark.slow
def test_an_actor_takes_the_cpus_that_runner_cpus_says(ray_cluster):
    import ray
    from agentrig_verl.algorithm import Verl
    from agentrig_verl.settings import VerlConfig

    from agentrig.runners.jobs import AgentPlan

    end = time.monotonic() + 60
    before = -1.0
    while (now := ray.available_resources()["CPU"]) != before and time.monotonic() < end:
        before = now  # the actors of earlier tests release theirs
        time.sleep(2)
    plan = AgentPlan(name="toy-variables", config={}, files=(TOY, TALKER))
    pools = []
    try:
        for runner_cpus, taken in ((0.25, 0.25), (1.5, 1.75)):
            verl = Verl(VerlConfig(runners="ray", runner_cpus=runner_cpus))
            pool = verl.pool(plan, n=1, threads=1, deadline_s=100, retries=0)
            pools.append(pool)
            verl.place(1)
            while before - ray.available_resources()["CPU"] != taken and time.monotonic() < end:
                pool.poll(0.1)
            assert before - ray.available_resources()["CPU"] == taken
    finally:
        for pool in pools:
            pool.close()


def printed(folder, script, *words, **environ):
    """Return the lines that a script prints in a process of its own, which joins no cluster of another test."""
    file = folder / "script.py"  # a file: Ray's workers import it
    file.write_text(script)
    own = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "HF_TOKEN", "AGENTRIG_YES")}
    done = subprocess.run(
        [sys.executable, str(file), *words],
        capture_output=True, text=True, timeout=200, check=False, env={**own, **environ},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [*done.stderr.splitlines(), *done.stdout.splitlines()]


LOGS = """
import sys, time, ray
from agentrig.plugins.builtin import cpu_spec
from agentrig_verl import schema
from agentrig_verl.algorithm import Verl
from agentrig_verl.settings import VerlConfig

if __name__ == "__main__":
    config = schema.compose({"ray_kwargs.ray_init.num_cpus": 1})
    Verl(VerlConfig(worker_logs=sys.argv[1] == "True")).connect(config, cpu_spec().build(cpu_spec().config()))
    ray.get(ray.remote(lambda: print("said by", "a worker")).remote())
    time.sleep(3)
    ray.shutdown()
"""


@pytest.mark.slow
def test_worker_logs_are_printed_when_asked(tmp_path):
    lines = [printed(tmp_path, LOGS, str(worker_logs)) for worker_logs in (False, True)]
    assert [any("said by a worker" in line for line in each) for each in lines] == [False, True]


WITHDRAWN = """
import sys, ray
from agentrig.runners.jobs import AgentPlan
from agentrig_verl.pool import PlacedPool

if __name__ == "__main__":
    ray.init(address="local", num_cpus=2, log_to_driver=False, configure_logging=False)
    pool = PlacedPool(
        AgentPlan(name="toy-talker", config={}, files=sys.argv[1:]), n=2, threads=2, deadline_s=60, retries=1
    )
    pool.place(True, cpus=0.5)
    while len(pool._inner.nodes) < 2:
        pool.poll(0.1)
    pool.withdraw()
    print("left:", pool.room, pool.poll(0.05))
    ray.shutdown()
    pool.close()  # what Agent Lightning's side does when the algorithm has ended
    print("ray:", ray.is_initialized())
"""


@pytest.mark.slow
def test_runners_on_ray_end_before_ray_does(tmp_path):
    assert printed(tmp_path, WITHDRAWN, TOY, TALKER)[-2:] == ["left: 0 []", "ray: False"]


STALE = """
import os, pathlib, signal, subprocess, sys, time
from agentrig.errors import ConfigError
from agentrig.plugins.builtin import cpu_spec
from agentrig_verl import cluster, schema

OURS = f"RAY_TMPDIR={os.environ['RAY_TMPDIR']}".encode()

def stop_ours(words, **_):
    # What `ray stop` does, to this test's cluster alone: other tests may run one at the same time.
    assert words[1:] == ["-P", "-m", "ray.scripts.scripts", "stop"], words
    subprocess.run([*words, "--help"], check=True, capture_output=True)
    print("stopped")
    for entry in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            ours = OURS in (entry / "environ").read_bytes().split(bytes(1))
            ray = ours and b"/ray/" in (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if ray and int(entry.name) != os.getpid():
            os.kill(int(entry.name), signal.SIGKILL)
    pathlib.Path(os.environ["RAY_TMPDIR"], "ray", "ray_current_cluster").unlink()

if __name__ == "__main__":
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--port=0", "--num-cpus=1"]
    subprocess.run([*start, "--include-dashboard=false"], check=True, capture_output=True)
    os.environ["HF_TOKEN"] = "not-a-secret"
    config = schema.compose({"actor_rollout_ref.rollout.name": "vllm"})
    hardware = cpu_spec().build(cpu_spec().config())
    try:
        cluster.connect(config, hardware)
    except ConfigError as error:
        print("told:", " ".join(str(error).split()))
    os.environ["AGENTRIG_YES"] = "1"
    cluster.subprocess = type(sys)("subprocess")
    cluster.subprocess.run = stop_ours
    print("nodes:", cluster.connect(config, hardware))
"""


@pytest.mark.slow
def test_a_stale_cluster_is_stopped_only_when_asked(tmp_path):
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True) as folder:
        told, stopped, nodes = printed(tmp_path, STALE, RAY_TMPDIR=folder)[-3:]  # short: Ray's sockets lie below it
    assert "has no HF_TOKEN" in told
    assert "--yes" in told
    assert (stopped, nodes) == ("stopped", "nodes: 1")


@pytest.mark.slow
def test_the_workers_get_modelscopes_switch_and_not_its_token(ray_cluster, monkeypatch):
    import ray

    @ray.remote
    def seen():
        return {name: value for name, value in os.environ.items() if "MODELSCOPE" in name}

    assert ray.get(seen.remote()) == MODELSCOPE
