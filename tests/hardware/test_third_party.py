"""A hardware plugin from a wheel is found, examined and used for training without a change in agentrig."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ONE_STEP = (
    "algorithm.steps=1",
    "algorithm.tasks_per_step=6",
    "algorithm.group_size=4",
    "algorithm.validate_every=0",
    "run.report_tasks=4",
    "run.failure_limit=1.0",
)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder that holds what the example's wheel installs; its entry point is found from there."""
    folder = tmp_path_factory.mktemp("third-party")
    example = str(ROOT / "examples" / "agentrig-fake-accelerator")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), example]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    install = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--offline", "--no-deps"]
    target = folder / "site"
    subprocess.run([*install, "--target", str(target), str(wheel)], check=True, capture_output=True)
    return target


def agentrig(site, *words, cwd, **environ):
    environ = {"FAKE_ACCELERATORS": "2", **environ}
    return subprocess.run(
        [sys.executable, "-m", "agentrig", *words],
        cwd=cwd,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(site), **environ},
        timeout=280,
        check=False,
    )


def test_it_trains_one_step_of_mini_through_the_embedded_algorithm(site, tmp_path):
    done = agentrig(site, "train", "mini", "--hardware", "fake", "run.name=fake", *ONE_STEP, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "runs" / "fake"
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["hardware"]["name"] == "fake"
    assert 'use = "fake"' in (run / "config.toml").read_text()
    (step,) = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines() if '"step": 1' in line]
    assert step["rollouts"] == 24
    assert step["algorithm"]["weight_change"] > 0


def test_the_doctor_runs_its_check_and_reads_its_stack(site, tmp_path):
    done = agentrig(site, "doctor", "mini", "--hardware", "fake", "--json", cwd=tmp_path)
    found = {f["check"]: f for f in json.loads(done.stdout)["findings"]}
    assert done.returncode == 0, [f for f in found.values() if f["result"] == "problem"]
    assert found["fake driver"]["result"] == "ok"
    assert found["stack"]["evidence"].startswith("fake accelerator on torch 2.13, contract-tested")
    assert "fake accelerator 0; fake accelerator 1" in found["fake devices"]["evidence"]


def test_auto_takes_it_when_it_is_the_only_accelerator_and_stops_when_it_is_broken(site, tmp_path):
    good = agentrig(site, "doctor", "mini", "--hardware", "auto", "--json", cwd=tmp_path)
    found = {f["check"]: f for f in json.loads(good.stdout)["findings"]}
    assert found["fake devices"]["evidence"].startswith("used")
    broken = agentrig(site, "train", "mini", *ONE_STEP, cwd=tmp_path, FAKE_ACCELERATORS="two")
    assert broken.returncode == 1
    assert "fake is there but broken" in broken.stderr
    assert "export FAKE_ACCELERATORS=1" in broken.stderr
    assert "Traceback" not in broken.stderr
    assert not (tmp_path / "runs").exists()
