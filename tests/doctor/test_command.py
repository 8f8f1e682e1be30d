"""`agentrig doctor` on the command line."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import attrs
import pytest

from agentrig.doctor import could_start, examine
from agentrig.doctor.examination import CHECKS
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


def doctor(*arguments, **environ):
    command = [sys.executable, "-m", "agentrig", "doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environ}, check=False)


def by_check(findings):
    return {f.check: f for f in findings}


def test_a_recipe_that_could_start_ends_in_status_0(recipe):
    done = doctor(recipe(), "--hardware", "cpu", "--json")
    report = json.loads(done.stdout)
    problems = [f for f in report["findings"] if f["result"] == "problem"]
    assert problems == []
    assert done.returncode == 0
    assert report["could_start"] is True
    assert {"check", "result", "evidence", "cure"} == set(report["findings"][0])


def test_the_table_names_check_result_evidence_and_cure(recipe):
    done = doctor(recipe('[algorithm]\nmodel = "/no/such/model"\n'), "--hardware", "cpu", COLUMNS="160")
    assert done.returncode == 1
    for word in ("check", "result", "evidence", "cure", "there is no folder", "it cannot start"):
        assert word in done.stdout


def test_overrides_reach_the_recipe(recipe):
    findings = by_check(examine(recipe(), overrides=["algorithm.model=/no/such/model"], uses={"hardware": "cpu"}))
    assert findings["model"].result == "problem"


def test_a_users_own_agent_is_checked(recipe):
    example = str(Path(__file__).resolve().parents[2] / "examples" / "my_agent.py")
    done = doctor(recipe(), "--hardware", "cpu", "--plugin", example, "--agent", "vote", "--json")
    found = {f["check"]: f for f in json.loads(done.stdout)["findings"]}
    assert "recipe" not in found or found["recipe"]["result"] == "ok"
    done = doctor(recipe(), "--hardware", "cpu", "--agent", "vote", "--json")
    found = {f["check"]: f for f in json.loads(done.stdout)["findings"]}
    assert 'there is no agent called "vote"' in found["recipe"]["evidence"]


def test_a_wrong_recipe_is_a_finding_and_the_host_is_still_examined(recipe):
    findings = examine(recipe("[algorithm]\nmodle = 1\n"), uses={"hardware": "cpu"})
    found = by_check(findings)
    assert 'Did you mean "model"' in found["recipe"].evidence
    assert found["torch"].result == "ok"
    assert not could_start(findings)


def test_components_have_their_own_checks(recipe):
    assert by_check(examine(recipe(), uses={"hardware": "cpu"}))["toy"].evidence.endswith("own check: rest")


def test_a_check_that_fails_is_a_finding_and_hides_no_other(recipe, monkeypatch):
    def check_badly(situation):
        raise RuntimeError("oh")

    monkeypatch.setattr("agentrig.doctor.examination.CHECKS", (check_badly, *CHECKS))
    found = by_check(examine(recipe(), uses={"hardware": "cpu"}))
    assert found["badly"].result == "problem"
    assert "RuntimeError: oh" in found["badly"].evidence
    assert found["torch"].result == "ok"


def test_a_probe_that_fails_is_a_finding_and_hides_no_other(recipe, monkeypatch):
    from agentrig.hardware import Cpu

    def probe(self):
        raise OSError("no /proc")

    monkeypatch.setattr(Cpu, "probe", probe)
    found = by_check(examine(recipe(), uses={"hardware": "cpu"}))
    assert found["cpu devices"].result == "problem"
    assert "OSError: no /proc" in found["cpu devices"].evidence
    assert found["torch"].result == "ok"


def test_broken_hardware_under_auto_is_explained_and_not_replaced(recipe, tmp_path, monkeypatch):
    """An nvidia-smi that fails, on a host where nothing else hints at a GPU."""
    pytest.importorskip("agentrig_cuda")
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'Driver/library version mismatch' >&2\nexit 18\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    findings = examine(recipe(), uses={"hardware": "auto"})
    found = by_check(findings)
    assert found["hardware"].result == "problem"
    assert "cuda is there but broken" in found["hardware"].evidence
    assert "Driver/library version mismatch" in found["hardware"].cure
    assert not could_start(findings)


def test_warnings_do_not_keep_a_recipe_from_starting():
    assert could_start(
        [Finding(check="x", result="warning", evidence="y"), Finding(check="x", result="skipped", evidence="")]
    )
    assert not could_start([Finding(check="x", result="problem", evidence="y")])


def test_every_finding_has_its_fields(recipe):
    for finding in examine(recipe(), uses={"hardware": "cpu"}):
        assert attrs.asdict(finding)["result"] in ("ok", "warning", "problem", "skipped")
        assert finding.check
        assert finding.evidence
        assert finding.cure or finding.result != "problem"


def test_the_doctor_imports_no_torch_itself(recipe):
    code = f"""
import sys
from agentrig.doctor import examine
examine({recipe()!r}, uses={{"hardware": "cpu"}})
print(sorted(set(sys.modules) & {{"torch", "transformers", "ray", "verl", "vllm", "agentlightning"}}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().splitlines()[-1] == "[]"


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
            done = doctor(recipe(), "--hardware", "cpu", "--json", WANDB_API_KEY="k", RAY_TMPDIR=short)
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
