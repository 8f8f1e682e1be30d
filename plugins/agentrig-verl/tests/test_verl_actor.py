"""The weight change of a step, over the real processes of a process group."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("verl") is None, reason="verl is not installed; see docs/gpu.md"
)

RANK = """
import json, os, sys, warnings
warnings.filterwarnings("ignore")
import torch
from types import SimpleNamespace
from agentrig_verl import actor

rank, ranks, mesh = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
torch.distributed.init_process_group("gloo", init_method=sys.argv[4], rank=rank, world_size=ranks)
shard = torch.nn.Linear(4, 1, bias=False)
moves = [3.0, 4.0] if mesh[-1] == ranks else [3.0, 3.0]  # shards move each in its own way, replicas as one

def learn(self, data):
    with torch.no_grad():
        shard.weight[0, 0] += moves[rank]
    return {"metrics": {}}

actor.TrainingWorker.train_mini_batch = learn
actor.tensordict_utils = SimpleNamespace(get=lambda output, name: output[name])
worker = actor.MeasuringWorker.__new__(actor.MeasuringWorker)
worker.engine = SimpleNamespace(module=shard, device_mesh=SimpleNamespace(shape=tuple(mesh)))
worker.device_name = "cpu"
print("moved", round(worker.train_mini_batch(None)["metrics"]["weight_change"][0], 4))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "expected"), [([1], 3.0), ([2], 5.0), ([2, 1], 3.0)], ids=["one rank", "two shards", "two replicas"]
)
def test_every_rank_returns_the_change_of_all_weights(tmp_path, mesh, expected):
    ranks = 1 if mesh == [1] else 2
    words = [str(ranks), str(mesh), f"file://{tmp_path}/group"]
    started = [
        subprocess.Popen([sys.executable, "-c", RANK, str(rank), *words], stdout=subprocess.PIPE, text=True)
        for rank in range(ranks)
    ]
    for process in started:
        said, _ = process.communicate(timeout=200)
        assert said.splitlines()[-1] == f"moved {expected}"
