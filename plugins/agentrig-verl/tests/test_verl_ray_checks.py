"""The doctor's checks of Ray, verl and vLLM."""

import os
import resource
import shutil
import socket
import subprocess
import time
from types import SimpleNamespace

import pytest
from agentrig_verl import checks, ray_checks
from distributions import describe
from hosts import only

from agentrig.doctor import Situation
from agentrig.hardware import Cpu, installed
from agentrig.plan import resolve


def situation(*overrides, **more):
    """The doctor's view of the recipe `fast` with overrides."""
    return Situation(
        **{"hardware": Cpu(), "plan": resolve("fast", overrides=overrides, uses={"hardware": "cpu"}), **more}
    )


def test_verl_is_asked_whether_it_accepts_this_vllm(tmp_path):
    """A stand-in for verl that refuses, as verl does, by an exception at import."""
    describe(tmp_path, "verl", "0.9.1")
    describe(tmp_path, "vllm", "0.10.0")
    gate = tmp_path / "verl" / "third_party" / "vllm"
    gate.mkdir(parents=True)
    for package in (gate.parent, gate.parent.parent):
        (package / "__init__.py").touch()
    (gate / "__init__.py").write_text("raise ValueError('vllm version 0.10.0 not supported')\n")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    versions = {"verl": "0.9.1", "vllm": "0.10.0"}
    refused = only(checks.check_verl_vllm(situation(versions=versions, environ=environ)), "problem")
    assert refused.evidence.endswith("vllm version 0.10.0 not supported")
    assert "docs/hardware.md" in refused.cure
    (gate / "__init__.py").write_text("")
    only(checks.check_verl_vllm(situation(versions=versions, environ=environ)), "ok")


@pytest.mark.slow
def test_the_real_verl_refuses_a_vllm_that_is_too_old(tmp_path):
    """verl's own check reads vLLM's version from its metadata, so vLLM needs only metadata here."""
    pytest.importorskip("verl", reason="verl is not installed")
    describe(tmp_path, "vllm", "0.10.0")
    versions = {**installed(["verl"]), "vllm": "0.10.0"}
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    found = only(checks.check_verl_vllm(situation(versions=versions, environ=environ)), "problem")
    assert "vllm version 0.10.0 not supported" in found.evidence


@pytest.fixture
def ray_head(tmp_path):
    """A process named gcs_server with its own environment; it replaces a head of Ray.

    The folder `proc` lists only these processes, so real clusters on this host do not matter.
    """
    started = []
    (tmp_path / "proc").mkdir()

    def start(**environ):
        program = tmp_path / "gcs_server"
        shutil.copy(shutil.which("sleep"), program)
        process = subprocess.Popen([str(program), "60"], env=environ)
        started.append(process)
        deadline = time.monotonic() + 10
        (tmp_path / "proc" / str(process.pid)).symlink_to(f"/proc/{process.pid}")
        while not ray_checks.ray_processes(tmp_path / "proc"):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return process.pid

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_a_stale_cluster_that_lacks_keys_is_found(ray_head, tmp_path):
    pid = ray_head(HF_TOKEN="t")
    proc = tmp_path / "proc"
    environ = {"WANDB_API_KEY": "k", "HF_TOKEN": "t", "RAY_ADDRESS": "127.0.0.1:6379"}
    found = only(ray_checks.check_ray_cluster(situation(environ=environ), proc), "problem")
    assert f"gcs_server {pid}" in found.evidence
    assert "started without WANDB_API_KEY:" in found.evidence
    assert "ray stop" in found.cure


def test_a_cluster_that_lacks_nothing_would_be_joined(ray_head, tmp_path):
    ray_head()
    proc = tmp_path / "proc"
    joined = {"RAY_ADDRESS": "127.0.0.1:6379"}
    assert "would join it" in only(ray_checks.check_ray_cluster(situation(environ=joined), proc), "warning").evidence


def test_the_clusters_of_other_runs_are_ignored(ray_head, tmp_path):
    pid = ray_head()
    proc = tmp_path / "proc"
    environ = {"RAY_TMPDIR": str(tmp_path)}
    found = only(ray_checks.check_ray_cluster(situation(environ=environ), proc), "ok")
    assert f"gcs_server {pid}" in found.evidence
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("10.0.0.1:6379")
    only(ray_checks.check_ray_cluster(situation(environ=environ), proc), "warning")


def test_the_address_of_a_dead_cluster_is_found(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("10.0.0.1:6379")
    found = only(
        ray_checks.check_ray_cluster(situation(environ={"RAY_TMPDIR": str(tmp_path)}), tmp_path / "proc"), "warning"
    )
    assert "10.0.0.1:6379" in found.evidence


def test_a_system_without_proc_says_that_it_cannot_see_clusters(tmp_path):
    """As macOS is."""
    assert "ray status" in only(ray_checks.check_ray_cluster(situation(), tmp_path / "no-proc"), "skipped").evidence


def test_ray_sockets_need_a_short_path():
    only(ray_checks.check_ray_sockets(situation(environ={})), "ok")
    only(ray_checks.check_ray_sockets(situation(environ={"RAY_TMPDIR": "/tmp/" + "x" * 60})), "problem")


def test_several_nodes_need_a_shared_token(tmp_path):
    versions = {"ray": "2.60.0"}
    environ = {"HOME": str(tmp_path)}
    assert list(ray_checks.check_ray_token(situation(versions=versions, environ=environ))) == []
    two = situation("algorithm.verl.trainer.nnodes=2", versions=versions, environ=environ)
    assert str(tmp_path / ".ray" / "auth_token") in only(ray_checks.check_ray_token(two), "problem").evidence
    named = {**environ, "RAY_ADDRESS": "ray://10.0.0.1:10001"}
    found = only(ray_checks.check_ray_token(situation(versions=versions, environ=named)), "warning")
    assert "sends no token" in found.evidence
    asked = situation(versions=versions, environ={**named, "RAY_AUTH_MODE": "token"})
    only(ray_checks.check_ray_token(asked), "problem")
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("secret\n")
    found = only(ray_checks.check_ray_token(two), "ok")
    assert "secret" not in found.evidence
    assert "2bb80d53" in found.evidence
    off = situation(
        "algorithm.verl.trainer.nnodes=2", versions=versions, environ={**environ, "RAY_AUTH_MODE": "disabled"}
    )
    only(ray_checks.check_ray_token(off), "warning")


def test_limits_shared_memory_and_port_are_checked_for_ray(tmp_path, monkeypatch):
    monkeypatch.setattr(ray_checks, "ray_processes", list)
    monkeypatch.setattr(ray_checks, "RAY_PORT", 0)  # always free
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1 << 20, 1 << 20))
    assert list(ray_checks.check_place(situation(), tmp_path)) == []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 1024))
    assert only(ray_checks.check_place(situation(), tmp_path), "warning").cure == "ulimit -n 65536"
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1 << 20, 1 << 20))
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=2**20))
    assert "--shm-size" in only(ray_checks.check_place(situation(), tmp_path), "problem").cure
    monkeypatch.undo()
    monkeypatch.setattr(ray_checks, "ray_processes", list)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(ray_checks, "RAY_PORT", taken.getsockname()[1])
        assert "ray port" in [found.check for found in ray_checks.check_place(situation(), tmp_path)]


def test_ray_processes_reads_only_ray(tmp_path):
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "cmdline").write_bytes(b"/x/raylet\0--port\0")
    (tmp_path / "7" / "environ").write_bytes(b"A=1\0B=2\0")
    (tmp_path / "8").mkdir()
    (tmp_path / "8" / "cmdline").write_bytes(b"/usr/bin/python\0raylet\0")
    (tmp_path / "self").mkdir()
    assert ray_checks.ray_processes(tmp_path) == [
        ray_checks.RayProcess(pid=7, program="raylet", environ={"A": "1", "B": "2"})
    ]
