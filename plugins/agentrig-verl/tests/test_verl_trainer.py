"""The order of events at a step's end in verl's own training loop; computations need a GPU and are left out."""

from __future__ import annotations

import signal
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from agentrig_verl import schema
from agentrig_verl.algorithm import out_of_memory

from agentrig.delivery import Delivery
from agentrig.plan import resolve
from agentrig.run.directory import RunDirectory

pytestmark = [
    pytest.mark.usefixtures("needs_verl"),
    pytest.mark.filterwarnings("ignore"),  # warnings of verl
]


class PowerCut(BaseException):
    """Ends the process at a place that the test chooses."""


class Session:
    """The parts of a session that the trainer uses, on a real run directory."""

    def __init__(
        self, run: RunDirectory, *, cut: str = "", stop_after: int = 0, solved_by: int = 0, already: bool = False
    ) -> None:
        self.run, self.directory, self.cut, self.stop_after = run, run.path, cut, stop_after
        self.stopping, self.solved, self.solved_by = False, already, solved_by
        self.lines: list[Any] = []
        self.hardware = SimpleNamespace(torch_device="cuda")
        self.measured, self.checked = None, False
        self.delivery = Delivery(run.path)
        self.calls: list[str] = []

    def note(self, call: str) -> None:
        if call == self.cut:
            raise PowerCut
        self.calls.append(call)

    def plan_steps(self, steps: int) -> None:
        pass

    def check_teacher(self, servers: Any) -> None:
        self.checked = True

    def report(self, endpoints: Any, *, when: str, step: int) -> None:
        assert self.checked, "a teacher is checked before the first rollouts"
        self.note(when)

    def validate(self, endpoints: Any, *, step: int) -> float:
        self.note(f"validate {step}")
        return 0.5

    def end_step(self, step: int, **figures: Any) -> None:
        self.note(f"end {step}")
        self.run.append_metrics({"step": step})
        self.stopping = step == self.stop_after
        self.lines.append({"algorithm": figures["metrics"]})

    def save_checkpoint(self, step: int, write: Any, *, keep: bool = False) -> Path:
        self.note(f"file {step}")
        return self.run.checkpoints.save(step, write, keep=keep)


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run verl's loop for three steps with a checkpoint every second one; returns the session and its run."""
    from agentrig_verl import trainer as ours
    from verl.trainer.ppo.v1 import trainer_base

    def saved(self: Any) -> None:
        folder = Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}" / "actor"
        (folder / "huggingface").mkdir(parents=True)
        (folder / "huggingface" / "model.safetensors").touch()

    for name in ("Tracking", "ValidationGenerationsLogger", "DapoFilteredRewardTableLogger"):
        monkeypatch.setattr(trainer_base, name, lambda *a, **k: SimpleNamespace(log=lambda *a, **k: None))
    monkeypatch.setattr(trainer_base.tq, "kv_clear", lambda **k: None)
    monkeypatch.setattr(ours.PPOTrainerSync, "_save_checkpoint", saved)
    monkeypatch.setattr(ours.PPOTrainerSync, "_compute_metrics", lambda *a, **k: None)

    def run(save_freq: int = 2, **lent: Any) -> tuple[Session, RunDirectory]:
        plan = resolve("fast", overrides=[f"run.directory={tmp_path}"], uses={"hardware": "cuda", "tasks": "mini-sql"})
        directory = RunDirectory.create(plan)
        session = Session(directory, **lent)
        config = schema.compose(
            {
                "trainer.test_freq": 1, "trainer.save_freq": save_freq, "trainer.val_before_train": False,
                "trainer.total_epochs": 1, "trainer.logger": ["console"],
            }
        )  # fmt: skip
        trainer: Any = ours.Trainer.__new__(ours.Trainer)
        monkeypatch.setattr(ours.PPOTrainerSync, "__init__", lambda self, config: setattr(self, "config", config))
        ours.Trainer.__init__(trainer, config, session)
        trainer.global_steps, trainer.total_training_steps, trainer.steps_per_epoch, trainer.timing_raw = 0, 3, 3, {}
        for name in (
            "on_step_begin", "on_step_end", "on_validate_begin", "on_validate_end", "on_train_begin", "on_train_end",
            "_start_profiling", "_stop_profiling", "_shutdown_dump_executor", "_reissue_inflight_prompts",
        ):  # fmt: skip
            setattr(trainer, name, lambda *a: None)
        trainer._consume_sync_metrics = dict
        # each of two ranks tells how long it took
        trainer.actor_rollout_wg = SimpleNamespace(spent=lambda: [{"gather": 0.25}, {"gather": 0.5, "send": 1.0}])

        def step(metrics: Any, times: Any) -> Any:  # the tasks may be solved after the rollouts
            session.solved = trainer.global_steps == session.solved_by
            return SimpleNamespace(keys=[], tags=[], partition_id="train")

        trainer.step = step
        try:
            trainer.fit(SimpleNamespace(figures={}, trajectories={}, rollouts=[]))
        except PowerCut:
            session.calls.append("cut")
        return session, directory

    return run


def test_a_checkpoint_is_found_only_with_its_line_of_metrics(train: Any, capsys: pytest.CaptureFixture[str]) -> None:
    session, run = train()
    assert (
        "Training Progress" not in capsys.readouterr().err
    )  # verl's progress bar, in addition to the run's own display
    assert session.calls == [
        "before", "validate 1", "end 1", "validate 2", "end 2", "file 2", "validate 3", "end 3", "file 3", "after",
    ]  # fmt: skip
    figures = session.lines[-1]["algorithm"]
    assert (figures["weight_sync_gather_s"], figures["weight_sync_send_s"]) == (0.5, 1.0), "those of the slowest rank"
    checkpoint, step = run.checkpoints.latest()
    assert step == 3
    assert sorted(p.name for p in checkpoint.iterdir()) == [".files.json", "model.safetensors", "trainer"]
    assert (checkpoint / "trainer" / "global_step_3").is_dir()
    assert not (run.path / "checkpoints" / ".verl").exists()


@pytest.mark.parametrize("cut", ["validate 2", "end 2", "file 2"])
def test_a_run_that_is_killed_at_a_checkpoint_loses_no_line(train: Any, cut: str) -> None:
    session, run = train(cut=cut)
    assert session.calls[-1] == "cut"
    assert run.checkpoints.latest() == (None, 0)  # step 2 is repeated completely


ENDS: dict[str, tuple[dict[str, int], list[str], int]] = {
    "after its last step": ({}, ["end 3", "file 3", "after"], 3),
    "with solved tasks": ({"solved_by": 2}, ["end 2", "file 2", "after"], 2),
    "asked to stop": ({"stop_after": 2}, ["before", "end 1", "end 2", "file 2"], 2),
}


@pytest.mark.parametrize("save_freq", [-1, 2])
@pytest.mark.parametrize("how", ENDS)
def test_an_end_has_one_checkpoint_with_any_save_freq(train: Any, how: str, save_freq: int) -> None:
    given, calls, latest = ENDS[how]
    session, run = train(save_freq, **given)
    assert [c for c in session.calls if not c.startswith("validate")][-len(calls) :] == calls
    checkpoint, step = run.checkpoints.latest()
    assert step == latest
    assert not (checkpoint / "keep").exists()


def test_a_resumed_run_whose_tasks_are_solved_only_measures(train: Any) -> None:
    session, _ = train(already=True)
    assert session.calls == ["before", "after"]


def test_the_run_keeps_ctrl_c_when_a_logger_takes_it(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.trainer.ppo.v1 import trainer_base

    before = signal.getsignal(signal.SIGINT)

    def tracking(*_: Any, **__: Any) -> Any:  # as SwanLab's does
        signal.signal(signal.SIGINT, lambda *_: None)
        return SimpleNamespace(log=lambda *a, **k: None)

    monkeypatch.setattr(trainer_base, "Tracking", tracking)
    try:
        train()
        assert signal.getsignal(signal.SIGINT) is before
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("failed", "told"), [("", ["finish 0"]), ("RunStopped: x", ["crashed RunStopped: x", "finish 1"])]
)
def test_loggers_get_the_outcome_of_a_run(monkeypatch: pytest.MonkeyPatch, failed: str, told: list[str]) -> None:
    from agentrig_verl import trainer as ours

    calls: list[str] = []
    swanlab = SimpleNamespace(finish=lambda state, error: calls.append(f"{state} {error}"))
    logger = SimpleNamespace(logger={"swanlab": swanlab}, finish=lambda exit_code: calls.append(f"finish {exit_code}"))
    monkeypatch.setattr(ours.tq, "close", lambda: None)
    monkeypatch.setattr(ours.ray, "shutdown", lambda: None)
    ours.shut_down(SimpleNamespace(logger=logger), failed=failed)  # type: ignore[arg-type]
    assert calls == told


def test_the_gradient_norm_has_the_name_of_grpo() -> None:
    from agentrig_verl.trainer import step_figures

    assert step_figures({"actor/grad_norm": 2.5}, padding=0)["grad_norm"] == 2.5


def test_the_kl_metric_has_the_name_of_its_estimate() -> None:
    """`kl` is k3 in every algorithm; verl's `ppo_kl` is k1: the mean of old minus new log-probabilities."""
    from agentrig_verl.trainer import step_figures
    from verl.trainer.ppo.core_algos import compute_policy_loss

    old, new = torch.tensor([[-1.0, -2.0, -3.0]]), torch.tensor([[-1.5, -1.8, -9.0]])
    mask = torch.tensor([[1.0, 1.0, 0.0]])
    with warnings.catch_warnings(action="ignore"):  # verl deprecates this form of its function
        ppo_kl = compute_policy_loss(old, new, torch.ones_like(old), mask, cliprange=0.2)[2]
    figures = step_figures({"actor/ppo_kl": float(ppo_kl)}, padding=0)
    assert figures["kl_k1"] == pytest.approx((0.5 - 0.2) / 2)
    assert "kl" not in figures


FULL = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.18 GiB "
    "of which 1.50 GiB is free. Including non-PyTorch memory, this process has 40.90 GiB memory in use."
)


@pytest.mark.parametrize(
    ("file", "cure"),
    [
        ("/x/verl/workers/engine_workers.py", "ppo_max_token_len_per_gpu lower"),
        ("/x/vllm/device_allocator/cumem.py", "rollout.gpu_memory_utilization lower"),
    ],
)
def test_a_worker_whose_device_is_full_ends_the_run_with_one_typed_message(file: str, cure: str) -> None:
    """The error is Ray's own, as a worker's call raises it."""
    from ray.exceptions import RayTaskError  # here: Ray puts its own psutil before the installed one

    trace = f'ray::WorkerDict.update_actor() (pid=12)\n  File "{file}", line 3, in update\n{FULL}'
    failed = RayTaskError("update_actor", trace, torch.OutOfMemoryError(FULL)).as_instanceof_cause()
    said = out_of_memory(str(failed), "agentrig train --resume runs/x")
    assert said is not None
    first, what, *rest = str(said).splitlines()
    assert first == (
        "a worker of verl: its device ran out of memory: 2.0 GiB were asked for; of the device's 79.2 GiB, 1.5 GiB are "
        "free, the worker holds 40.9 GiB, and other processes hold 36.8 GiB"
    )
    assert cure in what
    assert what.endswith("agentrig train --resume runs/x")
    assert (said.cause, rest) == ("out-of-memory", [])


def test_a_host_without_memory_or_another_error_is_not_the_devices() -> None:
    for text in ("ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory", "x failed"):
        assert out_of_memory(text, "") is None
