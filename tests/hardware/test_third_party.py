"""A hardware plugin from a wheel is found, examined and used for training without a change in agentrig."""

import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner
from scaffolds import build

from agentrig.cli.entry import main
from agentrig.doctor import could_start, devices, examine, software
from agentrig.scaffold.copying import make_package
from agentrig.scaffold.templates import TEMPLATES
from agentrig.testing import check

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
    """A folder that holds what the wheel of `agentrig new hardware` installs; its entry point is found from there."""
    folder = tmp_path_factory.mktemp("third-party")
    make_package(TEMPLATES["hardware"], "fake-accelerator", folder / "package")
    build(folder / "package", folder)
    (wheel,) = folder.glob("*.whl")
    install = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--offline", "--no-deps"]
    target = folder / "site"
    subprocess.run([*install, "--target", str(target), str(wheel)], check=True, capture_output=True)
    return target


@pytest.mark.slow
def test_it_trains_one_step_of_mini_through_the_embedded_algorithm(site, tmp_path):
    words = ["train", "mini", "--hardware", "fake-accelerator", "run.name=fake", *ONE_STEP]
    environ = {**os.environ, "PYTHONPATH": str(site), "FAKE_ACCELERATORS": "2"}
    command = [sys.executable, "-m", "agentrig", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environ, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "runs" / "fake"
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["hardware"]["name"] == "fake-accelerator"
    assert 'use = "fake-accelerator"' in (run / "config.toml").read_text()
    (step,) = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines() if '"step": 1' in line]
    assert step["rollouts"] == 24
    assert step["algorithm"]["weight_change"] > 0


@pytest.fixture
def here(site, tmp_path, monkeypatch):
    """This process finds the plugin, with two accelerators; the doctor only looks at the hardware."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.setenv("FAKE_ACCELERATORS", "2")
    checks = (devices.check_hardware, devices.check_torch, devices.check_server, software.check_stack)
    monkeypatch.setattr("agentrig.doctor.examination.CHECKS", checks)


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_it_passes_the_kit(monkeypatch):
    report = check("hardware", "fake-accelerator", compute=False)  # the next tests compute on it
    assert {r.check for r in report.results if r.status == "skipped"} == {"hardware.computes"}
    monkeypatch.delenv("FAKE_ACCELERATORS")
    absent = check("hardware", "fake-accelerator")
    assert "hardware.hidden" in {r.check for r in absent.results if r.status == "skipped"}


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_the_doctor_runs_its_check_and_reads_its_stack():
    findings = examine("mini", uses={"hardware": "fake-accelerator"})
    assert could_start(findings), findings
    found = {f.check: f for f in findings}
    assert found["torch"].result == "ok"
    assert found["fake driver"].result == "ok"
    assert found["stack"].evidence.startswith("fake-accelerator on torch 2.13, contract-tested")
    assert "fake accelerator 0; fake accelerator 1" in found["fake-accelerator devices"].evidence


@pytest.mark.usefixtures("here")
def test_auto_takes_it_when_it_is_the_only_accelerator_and_stops_when_it_is_broken(tmp_path, monkeypatch):
    found = {f.check: f for f in examine("mini", uses={"hardware": "auto"})}
    assert found["fake-accelerator devices"].evidence.startswith("used")
    monkeypatch.setenv("FAKE_ACCELERATORS", "two")
    broken = CliRunner().invoke(main, ["train", "mini", *ONE_STEP])
    assert broken.exit_code == 1
    assert "fake-accelerator is there but broken" in broken.stderr
    assert "export FAKE_ACCELERATORS=1" in broken.stderr
    assert "Traceback" not in broken.stderr
    assert not (tmp_path / "runs").exists()
