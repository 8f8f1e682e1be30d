"""Somebody's own hardware is examined and used for training without a change in agentrig."""

import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner
from scaffolds import new

from agentrig.cli.entry import main
from agentrig.doctor import devices, examine

ONE_STEP = (
    *("algorithm.steps=1", "algorithm.tasks_per_step=6", "algorithm.group_size=4", "algorithm.validate_every=0"),
    *("run.report_tasks=4", "run.failure_limit=1.0"),
)


@pytest.fixture
def file(tmp_path, monkeypatch):
    """The file of `agentrig new hardware`, with two accelerators; the doctor only looks at the hardware."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FAKE_ACCELERATORS", "2")
    new("hardware", "odd-accelerator", "--here", "odd.py")
    monkeypatch.setattr("agentrig.doctor.examination.CHECKS", (devices.check_hardware,))
    return str(tmp_path / "odd.py")


@pytest.mark.slow
def test_it_trains_one_step_of_mini_through_the_embedded_algorithm(file, tmp_path):
    words = ["train", "mini", "--plugin", file, "--hardware", "odd-accelerator", "run.name=odd", *ONE_STEP]
    command = [sys.executable, "-m", "agentrig", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "runs" / "odd"
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["hardware"]["name"] == "odd-accelerator"
    assert 'use = "odd-accelerator"' in (run / "config.toml").read_text()
    (step,) = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines() if '"step": 1' in line]
    assert step["rollouts"] == 24
    assert step["algorithm"]["weight_change"] > 0


def test_auto_takes_it_when_it_is_the_only_accelerator_and_stops_when_it_is_broken(file, tmp_path, monkeypatch):
    found = {f.check: f for f in examine("mini", files=[file], uses={"hardware": "auto"})}
    assert found["odd-accelerator devices"].evidence.startswith("used")
    monkeypatch.setenv("FAKE_ACCELERATORS", "two")
    broken = CliRunner().invoke(main, ["train", "mini", "--plugin", file, *ONE_STEP])
    assert broken.exit_code == 1
    assert "odd-accelerator is there but broken" in broken.stderr
    assert "export FAKE_ACCELERATORS=1" in broken.stderr
    assert "Traceback" not in broken.stderr
    assert not (tmp_path / "runs").exists()
