"""`agentrig doctor` on the command line."""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from agentrig.cli.commands.doctor import _table
from agentrig.cli.entry import main
from agentrig.doctor import content, could_start, devices, examine, imports, software
from agentrig.findings import Finding

PLUGIN = Path(__file__).parents[1] / "support" / "doctor_plugin.py"


@pytest.fixture
def recipe(tmp_path):
    """A run file that builds on the recipe `toy`; what a test adds goes below it."""

    def write(text=""):
        path = tmp_path / "toy.toml"
        path.write_text(f'recipe = "toy"\n[run]\nplugins = ["{PLUGIN}"]\ndirectory = "{tmp_path}/runs"\n{text}')
        return str(path)

    return write


@pytest.fixture
def few(monkeypatch):
    """Run these checks only: others start subprocesses that import torch."""

    def checks(*wanted):
        monkeypatch.setattr("agentrig.doctor.examination.CHECKS", wanted)

    return checks


def doctor(*arguments, **environ):
    command = [sys.executable, "-m", "agentrig", "doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environ}, check=False)


def by_check(findings):
    return {f.check: f for f in findings}


HEAVY = {"torch", "transformers", "ray", "verl", "vllm", "agentlightning"}


def test_a_recipe_that_could_start_ends_in_status_0_and_nothing_heavy_is_imported(recipe):
    code = f"""
import atexit, sys
from agentrig.cli.entry import main
atexit.register(lambda: print("imported", sorted(set(sys.modules) & {HEAVY}), file=sys.stderr))
main(["doctor", {recipe()!r}, "--hardware", "cpu", "--json"])
"""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 20, "5 s on two quiet cores"
    assert done.stderr.splitlines()[-1] == "imported []"
    report = json.loads(done.stdout)
    problems = [f for f in report["findings"] if f["result"] == "problem"]
    assert problems == []
    assert done.returncode == 0
    assert report["could_start"] is True
    found = {finding["check"]: finding for finding in report["findings"]}
    assert "torch" in found
    assert found["toy"]["evidence"].endswith("own check: rest")
    for finding in report["findings"]:
        assert finding.keys() == {"check", "result", "evidence", "cure"}
        assert finding["result"] in ("ok", "warning", "skipped")
        assert finding["check"]
        assert finding["evidence"]


def test_a_column_that_would_be_empty_is_left_out(capsys):
    fine = Finding.ok("python", "3.11")
    _table([fine])
    assert "cure" not in capsys.readouterr().out
    _table([fine, Finding.problem("disk", "full", cure="delete something")])
    assert "delete something" in capsys.readouterr().out


def test_the_table_names_check_result_evidence_and_cure(recipe, few):
    few(content.check_model, software.check_python)
    words = ["doctor", recipe(), "algorithm.model=/no/such/model", "--hardware", "cpu"]
    done = CliRunner(env={"COLUMNS": "160"}).invoke(main, words)
    assert done.exit_code == 1
    for word in ("check", "result", "evidence", "cure", "there is no folder", "it cannot start"):
        assert word in done.stdout


def test_a_users_own_agent_is_checked(recipe, few):
    example = str(Path(__file__).resolve().parents[2] / "examples" / "vote_agent.py")
    few(imports.check_imports)  # it builds the agent
    words = ["doctor", recipe(), "--hardware", "cpu", "--agent", "vote", "--json"]
    done = CliRunner().invoke(main, [*words, "--plugin", example])
    found = {f["check"]: f["result"] for f in json.loads(done.stdout)["findings"]}
    assert (found["imports"], "recipe" in found) == ("ok", False)
    done = CliRunner().invoke(main, words)
    found = {f["check"]: f for f in json.loads(done.stdout)["findings"]}
    assert 'there is no agent called "vote"' in found["recipe"]["evidence"]


def test_a_wrong_recipe_is_a_finding_and_the_host_is_still_examined(recipe, few):
    few(software.check_python)
    findings = examine(recipe("[algorithm]\nmodle = 1\n"), uses={"hardware": "cpu"})
    found = by_check(findings)
    assert 'Did you mean "model"' in found["recipe"].evidence
    assert found["python"].result == "ok"
    assert not could_start(findings)


def test_a_check_that_fails_is_a_finding_and_hides_no_other(recipe, few):
    def check_badly(situation):
        raise RuntimeError("oh")

    few(check_badly, software.check_python)
    found = by_check(examine(recipe(), uses={"hardware": "cpu"}))
    assert found["badly"].result == "problem"
    assert "RuntimeError: oh" in found["badly"].evidence
    assert found["python"].result == "ok"


def test_a_probe_that_fails_is_a_finding_and_hides_no_other(recipe, monkeypatch, few):
    from agentrig.hardware import Cpu

    def probe(self):
        raise OSError("no /proc")

    monkeypatch.setattr(Cpu, "probe", probe)
    few(devices.check_hardware, software.check_python)
    found = by_check(examine(recipe(), uses={"hardware": "cpu"}))
    assert found["cpu devices"].result == "problem"
    assert "OSError: no /proc" in found["cpu devices"].evidence
    assert found["python"].result == "ok"


def test_broken_hardware_under_auto_is_explained_and_not_replaced(recipe, tmp_path, monkeypatch, few):
    """An nvidia-smi that fails, on a host where nothing else hints at a GPU."""
    pytest.importorskip("agentrig_cuda")
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'Driver/library version mismatch' >&2\nexit 18\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    few(devices.check_hardware, software.check_python)
    findings = examine(recipe(), uses={"hardware": "auto"})
    found = by_check(findings)
    assert found["hardware"].result == "problem"
    assert "cuda is there but broken" in found["hardware"].evidence
    assert "Driver/library version mismatch" in found["hardware"].cure
    assert not could_start(findings)


def test_warnings_do_not_keep_a_recipe_from_starting():
    assert could_start([Finding.warning("x", "y"), Finding.skipped("x", "")])
    assert not could_start([Finding.problem("x", "y")])


@pytest.mark.slow
def test_a_real_ray_that_was_started_without_a_key_is_found(recipe):
    """A cluster is started by `ray start`, then the key is exported, then the doctor runs."""
    with tempfile.TemporaryDirectory(prefix="rig") as short:
        environ = {**os.environ, "HOME": short, "RAY_TMPDIR": short, "RAY_USAGE_STATS_ENABLED": "0"}
        environ.pop("WANDB_API_KEY", None)
        ray = str(Path(sys.executable).with_name("ray"))
        start = [ray, "start", "--head", "--port", "0", "--include-dashboard", "false", "--num-cpus", "1"]
        try:
            subprocess.run(start, env=environ, capture_output=True, check=True, timeout=240)
            done = doctor(
                recipe(), "--algorithm", "verl", "--hardware", "cpu", "--json", WANDB_API_KEY="k", RAY_TMPDIR=short
            )
        finally:
            # `ray stop` would end every cluster of this host; these are only ours.
            for process in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):
                    if f"RAY_TMPDIR={short}".encode() in (process / "environ").read_bytes().split(b"\0"):
                        os.kill(int(process.name), signal.SIGKILL)
        found = {f["check"]: f for f in json.loads(done.stdout)["findings"]}
    assert "gcs_server" in found["ray"]["evidence"]
    assert "raylet" in found["ray"]["evidence"]
    assert "started without" in found["ray"]["evidence"]
    assert "WANDB_API_KEY" in found["ray"]["evidence"]
