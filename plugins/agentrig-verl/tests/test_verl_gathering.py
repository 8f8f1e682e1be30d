"""The weights for the servers, gathered from the real ranks of FSDP: verl's values bit for bit, and a shared proof."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.usefixtures("needs_verl"), pytest.mark.filterwarnings("ignore")]  # warnings of verl and torch

RANK = """
import asyncio, itertools, sys, time, warnings
from collections import deque
from pathlib import Path
from types import SimpleNamespace
warnings.filterwarnings("ignore")
import torch
import verl_engines
from torch.distributed.fsdp import _init_utils
from agentrig_verl import actor, gathering
from verl.workers.engine.fsdp import transformer_impl

folder, rank, ranks, tied = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "tied"
ids = [3, 9, 27, 1, 3, 9]

class Rollout:
    async def update_weights(self, weights, **more):
        self.arrived = {name: tensor.clone() for name, tensor in weights}

    async def resume(self, tags):
        await asyncio.sleep(0.2 * rank)  # the servers wake at different times

async def sync(self, global_steps=None, mode="auto"):
    await self.rollout.resume(tags=["weights"])
    weights, _ = self.actor.engine.get_per_tensor_param(layered_summon=False, base_sync_done=True)
    await self.rollout.update_weights(weights, global_steps=global_steps)
    await asyncio.to_thread(torch.distributed.barrier)
    await self.rollout.resume(tags=["kv_cache"])

# These want a GPU; the model is where it has to be.
torch.cpu.empty_cache = lambda: None
_init_utils._check_module_states_for_sync_module_states = lambda states: None
transformer_impl.load_fsdp_model_to_gpu = lambda model: None
with verl_engines.on_the_cpu(folder / "group", rank=rank, ranks=ranks):
    engine = verl_engines.make_engine(folder, forest=True, strategy="fsdp")
    assert len(gathering.units(engine.module)) == 3
    own, _ = super(type(engine), engine).get_per_tensor_param()
    expected = {name: value.clone() for name, value in own}
    actor.ActorRolloutRefWorker.update_weights, actor.get_device_id = sync, lambda: 0
    worker = actor.ForestActor.__new__(actor.ForestActor)
    worker.rollout, worker._rank, worker._noises, worker._seeds = Rollout(), rank, deque(maxlen=8), itertools.count()
    worker._probe, worker.actor = (ids, "bfloat16"), SimpleNamespace(engine=engine)
    naive = SimpleNamespace(backend="naive")
    worker.config = SimpleNamespace(
        rollout=SimpleNamespace(dtype="bfloat16", free_cache_engine=True, checkpoint_engine=naive)
    )
    for _ in range(2):  # the second transfer follows a forward pass that left the outermost unit gathered
        asyncio.run(actor.Actor.update_weights.__wrapped__(worker, 4))
        arrived = worker.rollout.arrived
        assert arrived.keys() == expected.keys(), arrived.keys() ^ expected.keys()
        for name, value in expected.items():
            assert torch.equal(arrived[name], value.to(torch.bfloat16)), name
    flat = engine.module._handle.flat_param
    assert flat.data_ptr() == flat._local_shard.data_ptr(), "it is sharded again"
    engine.sent = None
    assert all(torch.equal(value, expected[name]) for name, value in engine.get_per_tensor_param()[0])
    torch.save({"told": worker._told, "arrived": arrived}, folder / f"told-{rank}.pt")
"""


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_two_ranks_gather_verls_weights_and_share_the_proof(tmp_path: Path, tied: bool) -> None:
    from verl_engines import make_model

    from agentrig.delivery.digests import digests

    make_model(tmp_path, tie_word_embeddings=tied)
    words = [sys.executable, "-c", RANK, str(tmp_path)]
    paths = {"PYTHONPATH": str(Path(__file__).parents[3] / "tests" / "support")}
    started = [
        subprocess.Popen([*words, str(rank), "2", "tied" if tied else "untied"], env={**os.environ, **paths})
        for rank in range(2)
    ]
    assert [process.wait(timeout=300) for process in started] == [0, 0]
    found = [torch.load(tmp_path / f"told-{rank}.pt") for rank in range(2)]
    sent = [each["told"]["sent"] for each in found]
    assert not set(sent[0]) & set(sent[1]), "each rank computes the digests of its share"
    arrived = found[1]["arrived"]
    assert {n: value for each in sent for n, (value, _) in each.items()} == digests(arrived.items())
    assert found[0]["told"]["logprobs"] == found[1]["told"]["logprobs"]
    assert found[0]["told"]["noise"] == found[1]["told"]["noise"] > 1e-5
