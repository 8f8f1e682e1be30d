"""MKL's choice of kernels for cos and sin, while two threads compute for the first time in a process.

MKL is made to look up the processor as it does on an Intel processor with AVX-512, and to take its time between the two
numbers that it remembers. Without `choose_vector_kernels` the second thread then always reads the wrong one.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from agentrig_grpo import checkpoint
from agentrig_grpo.config import EmbeddedConfig
from agentrig_grpo.server.handle import Embedded

from agentrig.hardware import Cpu
from agentrig.servers import ServerPlan
from agentrig.testing.tiny_model import make_model

MKL = """
#include <unistd.h>

static volatile int known = -1;

int mkl_vml_serv_cpu_detect(void) {
  int found = known;
  if (found == 9) write(2, "read too early\\n", 15);
  if (found != -1) return found;
  known = 9;  /* AVX-512 in the list of processors; in that of kernels, the less exact ones of AVX2 */
  usleep(200000);
  known = 3;  /* AVX2, which most machines have */
  return 3;
}
"""
EARLY = "read too early"
pytestmark = pytest.mark.slow

SCORES = """
import json, os, sys
from pathlib import Path
import torch
from agentrig_grpo.algorithm import Grpo
from agentrig_grpo.config import GrpoConfig
from agentrig_grpo.learner import Learner  # imported once, for all
from proof_runs import ProofSession
from transformers import AutoModelForCausalLM  # the same
from agentrig.audit.model import Precision, Weights
from agentrig.background import in_background
from agentrig.delivery.exported import _logprobs
from agentrig.hardware import Cpu, CpuConfig
from agentrig.testing.policy import Policy

torch.set_num_threads(2)
directory, folder = map(Path, sys.argv[1:])
ids = [5 + i % 200 for i in range(500)]

def logits(model):
    return lambda: model(torch.tensor([ids])).logits[0, :, 7].tolist()

def none():
    return lambda: torch.arange(20000).float().cos().tolist()

def learner():
    session = ProofSession(folder / "session")
    session.hardware = Cpu(config=CpuConfig(threads=2))
    found = Grpo(GrpoConfig(model=str(directory))).learner(session)
    return lambda: in_background(lambda: found.logprobs(ids), "delivery").result()

def export():
    return lambda: _logprobs(directory, ids)

def audit():
    return logits(Weights(directory=directory, trained={}).load(Precision(torch.float32)))

def kit():
    return logits(Policy(directory).model)

for begin in (none, learner, export, audit, kit):
    if child := os.fork():  # nothing is computed yet: each is a new process that has torch already
        assert os.waitpid(child, 0)[1] == 0, begin.__name__
        continue
    os.dup2(os.open(folder / begin.__name__, os.O_WRONLY | os.O_CREAT), 2)
    call = begin()
    gap = max(abs(a - b) for a, b in zip(call(), call(), strict=True))
    (folder / f"{begin.__name__}.json").write_text(json.dumps(gap))
    os._exit(0)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Path:
    """Return a folder with what each process said, and by how much its first scores differ from its second."""
    if platform.machine() != "x86_64" or "avx2" not in Path("/proc/cpuinfo").read_text("utf-8"):
        pytest.skip("MKL's kernels for AVX2 need an x86-64 processor with AVX2")
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    folder = tmp_path_factory.mktemp("mkl")
    (folder / "mkl.c").write_text(MKL)
    subprocess.run(["cc", "-w", "-shared", "-fPIC", "-o", folder / "mkl.so", folder / "mkl.c"], check=True)
    support = Path(__file__).parents[3] / "tests" / "support"
    own = {"LD_PRELOAD": str(folder / "mkl.so"), "OMP_NUM_THREADS": "2", "PYTHONPATH": str(support)}
    subprocess.run([sys.executable, "-c", SCORES, model_dir, folder], env=os.environ | own, check=True)
    if EARLY not in (folder / "none").read_text():
        pytest.skip("this torch has no MKL that looks up the processor so")
    return folder


def test_without_the_choice_a_first_call_is_wrong(folder: Path) -> None:
    assert json.loads((folder / "none.json").read_text()) > 1e-5


@pytest.mark.parametrize("name", ["learner", "export", "audit", "kit"])
def test_the_first_scores_of_a_process_are_those_of_the_second(folder: Path, name: str) -> None:
    assert EARLY not in (folder / name).read_text()
    assert json.loads((folder / f"{name}.json").read_text()) == 0


def test_the_servers_table_of_positions_is_right(
    folder: Path, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save(make_model(max_position_embeddings=4096), tokenizer, tmp_path / "model")
    monkeypatch.setenv("LD_PRELOAD", str(folder / "mkl.so"))
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    log = tmp_path / "server.log"
    plan = ServerPlan(model=tmp_path / "model", name="policy", hardware=Cpu(), log=log)
    with Embedded(EmbeddedConfig(threads=2), plan) as server:
        server.ready()
    assert EARLY not in log.read_text()
