"""verl's loggers with the real packages of W&B and SwanLab, without a login and without their servers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tracker_readers import records

from agentrig.errors import ConfigError

pytestmark = [
    pytest.mark.usefixtures("needs_verl"),
    pytest.mark.filterwarnings("ignore"),  # warnings of verl and the loggers
]

OWN = ("WANDB_", "SWANLAB_", "TENSORBOARD_")

TRACKED = """
import json, pathlib, sys
from verl.utils.tracking import Tracking
from agentrig_verl.algorithm import logging_into

name, directory, exit_code = json.loads(sys.argv[1])
with logging_into(pathlib.Path(directory)):
    config = {"trainer": {"project_name": "agentrig"}, "data": {"train_batch_size": 4, "max_samples": None}}
    tracking = Tracking("agentrig", "mini", default_backend=["console", name], config=config)
    tracking.log(data={"actor/pg_loss": 0.5, "val-core/agentrig/acc/mean@1": float("nan")}, step=1)
    tracking.log(data={"actor/pg_loss": 0.25}, step=2)
tracking.finish(exit_code=exit_code)
print("finished")
"""
"""How verl's trainer uses its loggers, and how agentrig wraps them."""


@pytest.fixture
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith(OWN)]:
        monkeypatch.delenv(name)
    (tmp_path / "home").mkdir()
    (tmp_path / "cwd").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "home" / ".netrc"))
    monkeypatch.setenv("SWANLAB_ROOT", str(tmp_path / "home" / ".swanlab"))
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.chdir(tmp_path / "cwd")


@pytest.fixture
def track(clean: None, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Log two steps with verl's tracking in a separate process: the loggers keep settings and hooks until it ends."""

    def run(name: str, *, exit_code: int = 0, **environ: str) -> subprocess.CompletedProcess[str]:
        needs(name)
        (tmp_path / "run").mkdir()
        given = json.dumps([name, str(tmp_path / "run"), exit_code])
        return subprocess.run(
            [sys.executable, "-c", TRACKED, given],
            env={**os.environ, **environ}, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=200,
            check=False,
        )  # fmt: skip

    return run


def needs(name: str) -> Any:
    return pytest.importorskip(name, reason=f"{name} is not installed; pip install {name} for this test")


def written(tmp_path: Path, pattern: str) -> Path:
    """Return the only file of the run; the working directory must be empty."""
    assert list((tmp_path / "cwd").iterdir()) == []
    (found,) = (tmp_path / "run").glob(pattern)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("exit_code", [0, 1])
def test_wandb_writes_below_the_run_directory_and_marks_a_failed_run(track, tmp_path, exit_code):
    done = track("wandb", exit_code=exit_code, WANDB_MODE="offline")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "finished"

    from wandb.proto.wandb_internal_pb2 import Record

    file = written(tmp_path, "wandb/offline-run-*/run-*.wandb")
    kept = [Record.FromString(data) for data in records(file, header=7)]
    (run,) = [r.run for r in kept if r.HasField("run")]
    assert (run.project, run.display_name) == ("agentrig", "mini")
    steps = [{i.key or i.nested_key[0]: i.value_json for i in r.history.item} for r in kept if r.HasField("history")]
    assert [(s["_step"], s["actor/pg_loss"]) for s in steps] == [("1", "0.5"), ("2", "0.25")]
    assert [r.exit.exit_code for r in kept if r.HasField("exit")] == [exit_code]


def swanlab_records(tmp_path: Path) -> list[Any]:
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record

    file = written(tmp_path, "swanlab/run-*/run-*.swanlab")
    return [Record.FromString(data) for data in records(file, header=7)]


@pytest.mark.slow
def test_swanlab_writes_below_the_run_directory(track, tmp_path):
    done = track("swanlab", SWANLAB_MODE="offline")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "finished"

    from swanlab.proto.swanlab.run.v1.run_pb2 import RunState

    kept = swanlab_records(tmp_path)
    assert [(r.start.project, r.start.name) for r in kept if r.HasField("start")] == [("agentrig", "mini")]
    loss = [r.scalar for r in kept if r.HasField("scalar") and r.scalar.key == "actor/pg_loss"]
    assert [(s.step, s.value.number) for s in loss] == [(1, 0.5), (2, 0.25)]
    assert [r.finish.state for r in kept if r.HasField("finish")] == [RunState.RUN_STATE_FINISHED]


def logging(name: str) -> Any:
    return SimpleNamespace(trainer=SimpleNamespace(logger=["console", name]))


def test_swanlab_without_a_login_is_refused_before_anything_starts(clean, monkeypatch):
    needs("swanlab")
    from agentrig_verl.checks import check_loggers

    told = r"trainer.logger has swanlab.*set SWANLAB_API_KEY .* SWANLAB_MODE=offline"
    with pytest.raises(ConfigError, match=told):
        check_loggers(logging("swanlab"))
    for mode in ("cloud", "online"):
        monkeypatch.setenv("SWANLAB_MODE", mode)
        with pytest.raises(ConfigError, match=told):
            check_loggers(logging("swanlab"))
    for mode in ("offline", "local", "disabled"):
        monkeypatch.setenv("SWANLAB_MODE", mode)
        check_loggers(logging("swanlab"))
    monkeypatch.delenv("SWANLAB_MODE")
    monkeypatch.setenv("SWANLAB_API_KEY", "secret")
    check_loggers(logging("swanlab"))


def test_the_file_of_swanlabs_own_login_is_a_login(clean):
    needs("swanlab")
    from agentrig_verl.checks import check_loggers

    login = Path(os.environ["SWANLAB_ROOT"]) / ".netrc"
    login.parent.mkdir()
    login.write_text("machine https://api.swanlab.cn\n  login https://swanlab.cn\n  password secret\n")
    check_loggers(logging("swanlab"))
