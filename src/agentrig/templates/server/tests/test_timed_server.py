"""Tests what `timed-server` does."""

import json
from pathlib import Path

from agentrig_grpo.naming import model_directory
from agentrig_timed_server import Config, build
from safetensors.torch import load_file

from agentrig.hardware import Cpu
from agentrig.servers import ServerPlan


def test_each_transfer_of_weights_is_recorded(tmp_path: Path) -> None:
    model = model_directory("mini")
    plan = ServerPlan(model=model, name="policy", hardware=Cpu(), log=tmp_path / "server.log")
    with build(Config(threads=1, file="times.jsonl"))(plan) as server:
        assert server.endpoints[0].model == "policy"
        server.take(load_file(model / "model.safetensors").items(), version=7)
    (line,) = (tmp_path / "times.jsonl").read_text().splitlines()
    assert json.loads(line)["version"] == 7
