"""On a host with an NVIDIA GPU and the GPU environment: which faults a complete run survives, and its files.

About eight minutes, most of them for three starts of verl and vLLM:

    python -m pytest -m gpu plugins/agentrig-verl/tests/test_verl_gpu.py
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

HINTS = shutil.which("nvidia-smi") is not None and importlib.util.find_spec("vllm") is not None
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HINTS, reason="needs an NVIDIA GPU and the environment of docs/gpu.md"),
]

ROOT = Path(__file__).resolve().parents[3]
START_S = 900.0
"""Seconds that verl and vLLM may take until the first step has ended."""

TASKS, GROUP, STEPS = 16, 4, 8
KEYS = {
    "data.train_batch_size": TASKS,
    "actor_rollout_ref.rollout.n": GROUP,
    "actor_rollout_ref.actor.ppo_mini_batch_size": TASKS,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 64,
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 64,
    "actor_rollout_ref.rollout.gpu_memory_utilization": 0.1,
    # vLLM gets the size of its cache and does not measure: other runs may share the GPU.
    "actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes": 2 << 30,
    "ray_kwargs.ray_init.num_cpus": 16,
    "trainer.total_training_steps": STEPS,
    "trainer.save_freq": 2,
    "trainer.test_freq": -1,
    "trainer.val_before_train": True,
}


class Run:
    """A run in separate processes; its Ray folder separates it from other runs."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "run"
        self.log = folder / "log.txt"
        self.ray = Path("/tmp") / f"k{os.getpid()}"  # short: Ray's sockets lie below it
        self.ray.mkdir(exist_ok=True)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *words: str) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "agentrig", "train", *words],
                cwd=ROOT,
                env={**os.environ, "RAY_TMPDIR": str(self.ray)},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def steps(self) -> list[int]:
        """Return the steps that have ended, in the order of the file."""
        file = self.path / "metrics.jsonl"
        lines = file.read_text("utf-8").splitlines() if file.is_file() else []
        return [json.loads(line)["step"] for line in lines if line.endswith("}")]

    def wait_for_step(self, step: int) -> None:
        assert self.process is not None
        end = time.monotonic() + START_S
        while not self.steps() or self.steps()[-1] < step:
            assert self.process.poll() is None, self.tail()
            assert time.monotonic() < end, self.tail()
            time.sleep(0.2)

    def members(self, *names: str) -> list[int]:
        """Return the run's processes, or those of them whose command line has one of the names."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                mine = f"RAY_TMPDIR={self.ray}".encode() in (folder / "environ").read_bytes().split(b"\0")
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if mine and (not names or any(name in command for name in names)):
                found.append(int(folder.name))
        return found

    def kill(self) -> None:
        """Kill all processes at once, as a power failure does."""
        for _ in range(20):
            members = self.members()
            for pid in members:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            if not members:
                break
            time.sleep(0.5)
        if self.process is not None:
            self.process.wait(timeout=30)

    def tail(self) -> str:
        return self.log.read_text("utf-8", errors="replace")[-6000:]


@pytest.fixture
def run(tmp_path: Path):
    found = Run(tmp_path)
    yield found
    found.kill()
    shutil.rmtree(found.ray, ignore_errors=True)


def drawn(run: Run, step: int) -> list[tuple[str, str]]:
    """Return the tasks of a step's training rollouts, and check that none is there twice."""
    import pyarrow.parquet as pq

    rows = pq.read_table(run.path / "rollouts" / f"train-{step:05d}.parquet").to_pylist()
    assert len({row["id"] for row in rows}) == len(rows) == TASKS * GROUP
    assert {row["step"] for row in rows} == {step}
    return sorted((row["task_id"], row["mode"]) for row in rows)


@pytest.mark.timeout(1800)
def test_a_killed_run_and_a_killed_server_lose_and_repeat_no_step(run: Run) -> None:
    keys = [f"algorithm.verl.{key}={json.dumps(value)}" for key, value in KEYS.items()]
    run.start(
        "tests/benchmarks/verl_mini.toml", "--hardware", "cuda", *keys,
        "run.report_tasks=8", "run.validation_tasks=8", f"run.directory={run.path.parent}", f"run.name={run.path.name}",
    )  # fmt: skip

    # The whole run dies after step 3, whose weights are in no checkpoint.
    run.wait_for_step(3)
    run.kill()
    before = {step: drawn(run, step) for step in (1, 2, 3)}
    assert (run.path / "checkpoints" / "latest").read_text().strip() == "step-00002"

    # It continues from step 2, and samples the same tasks for step 3.
    run.start("--resume", str(run.path))
    run.wait_for_step(4)
    steps = run.steps()
    assert steps == list(range(1, len(steps) + 1)), "a step is missing, or there twice"
    assert {step: drawn(run, step) for step in (1, 2, 3)} == before

    # The model server dies: the run ends by itself, and says what died and how to resume.
    servers = run.members("EngineCore") or run.members("vLLMHttpServer")
    assert servers, "no process of vLLM was found"
    for pid in servers:
        os.kill(pid, signal.SIGKILL)
    assert run.process is not None
    assert run.process.wait(timeout=300) != 0
    error = json.loads((run.path / "error.json").read_text())
    assert "--resume" in error["message"], error
    assert "server" in error["message"], error
    learned = run.steps()
    assert learned == list(range(1, len(learned) + 1))
    run.kill()

    # The resumed run reaches its end.
    run.start("--resume", str(run.path))
    assert run.process is not None
    assert run.process.wait(timeout=900) == 0, run.tail()
    assert run.steps() == list(range(1, STEPS + 1))
    assert all(drawn(run, step) for step in range(1, STEPS + 1))
    assert json.loads((run.path / "summary.json").read_text())["complete"] is True
    measured = [p.name for p in (run.path / "rollouts").glob("validation-*")]
    assert measured == ["validation-00000.parquet"], "a resumed run's start is not measured again"

    # Its checkpoint is a Hugging Face directory.
    exported = run.path.parent / "exported"
    done = subprocess.run(
        [sys.executable, "-m", "agentrig", "export", str(run.path), str(exported)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(str(exported))
    assert model.config.model_type == "qwen2"
    assert AutoTokenizer.from_pretrained(str(exported))("SELECT")["input_ids"]


SHORT = {**KEYS, "trainer.total_training_steps": 3, "trainer.save_freq": 1, "trainer.val_before_train": False}
STALE = """
from agentrig_verl.extension import DigestExtension

class Stale(DigestExtension):
    '''A server that loads only the weights with which the run starts.'''

    seen = 0

    def _update_weights(self, *given, **more):
        if not Stale.seen:
            super()._update_weights(*given, **more)
        else:
            for name, tensor in self.model_runner.model.named_parameters():
                tensor.data.copy_(Stale.kept[name])

    def update_weights_from_ipc(self, *given, **more):
        super().update_weights_from_ipc(*given, **more)
        if not Stale.seen:
            Stale.kept = {name: t.detach().cpu().clone() for name, t in self.model_runner.model.named_parameters()}
        Stale.seen += 1
"""


def launch(run: Run, **keys: object) -> None:
    words = [f"algorithm.verl.{key}={json.dumps(value)}" for key, value in {**SHORT, **keys}.items()]
    run.start(
        "tests/benchmarks/verl_mini.toml", "--hardware", "cuda", *words,
        "run.report_tasks=8", "run.validation_tasks=8", f"run.directory={run.path.parent}", f"run.name={run.path.name}",
    )  # fmt: skip


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("rank", [0, 8], ids=["all weights", "adapters"])
def test_the_weights_are_proven_to_arrive_in_vllm(run: Run, rank: int) -> None:
    launch(run, **({"actor_rollout_ref.model.lora_rank": rank} if rank else {}))
    assert run.process is not None
    assert run.process.wait(timeout=1200) == 0, run.tail()
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text("utf-8").splitlines()]
    for line in lines:
        print(line["delivery"], line["time_s"], line["step_s"])
    found = json.loads((run.path / "summary.json").read_text())["delivery"]
    print(found)
    assert (found["proofs"], found["arrived"]) == (4, 4)
    assert found["difference"] < found["bound"]
    assert found["tensors"] > 20, found["notes"]


@pytest.mark.timeout(1200)
def test_a_vllm_that_keeps_old_weights_is_named(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "stale_extension.py").write_text(STALE, "utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    launch(run, **{"actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls": "stale_extension.Stale"})
    assert run.process is not None
    assert run.process.wait(timeout=1000) != 0, run.tail()
    message = json.loads((run.path / "error.json").read_text())["message"]
    print(message)
    named = re.match(r"step (\d): the weights of version \1 did not arrive at http://", message)
    assert named, message
    assert int(named[1]) <= 2, "a fault is named within two steps"
    assert f"these are still the weights of version {int(named[1]) - 1}" in message, message
