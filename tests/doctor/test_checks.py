"""Each check, on the real host if possible, otherwise with a prepared folder or process."""

import os
import resource
import shutil
import socket
import subprocess
from pathlib import Path

import attrs
import pytest

from agentrig.doctor import Situation, content, devices, machine, software
from agentrig.hardware import Cpu, Device, Hardware, Probe, Stack, Symptom, installed
from agentrig.hardware.tools import ToolOutput, ask
from agentrig.plan import resolve

PLUGIN = Path(__file__).parents[1] / "support" / "doctor_plugin.py"


@attrs.frozen(kw_only=True)
class Board(Hardware):
    name: str = "board"
    torch_device: str = "cuda"
    visible_devices: str | None = "BOARD_VISIBLE"
    torch_cure: str = "install the board's torch"
    found: Probe = attrs.field(factory=lambda: Probe(available=True, devices=(Device(name="B1", memory=80 * 10**9),)))
    known: tuple[Stack, ...] = ()

    def probe(self) -> Probe:
        return self.found

    def stacks(self):
        return self.known


def situation(*overrides, hardware=None, **more):
    """The doctor's view of the recipe `toy` with overrides."""
    hardware = hardware or Cpu()
    plan = resolve("toy", overrides=overrides, files=[str(PLUGIN)], uses={"hardware": "cpu"})
    defaults = {
        "hardware": hardware,
        "candidates": [hardware],
        "probes": {hardware.name: hardware.probe()},
        "plan": plan,
        "versions": installed(software.STACK),
    }
    return Situation(**{**defaults, **more})


def only(findings, result=None):
    (finding,) = list(findings)
    if result is not None:
        assert finding.result == result, finding
    return finding


def test_python_out_of_range_is_a_problem():
    only(software.check_python(situation()), "ok")
    old = only(software.check_python(situation(versions={"python": "3.9.1"})), "problem")
    assert ">=3.11" in old.cure


def fake_distribution(folder, name, version, requires=()):
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = [f"Requires-Dist: {line}\n" for line in requires]
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n" + "".join(lines))


def test_a_vllm_that_pins_another_torch_is_a_problem(tmp_path, monkeypatch):
    """Metadata as vLLM's wheel has it; the torch is the real one of this environment."""
    fake_distribution(tmp_path, "vllm", "0.24.0", ["torch==2.11.0", "numpy", "torch==1.0; extra == 'old'"])
    monkeypatch.syspath_prepend(tmp_path)
    found = [
        f for f in software.check_requirements(situation(versions=installed(software.STACK))) if "vllm" in f.evidence
    ]
    assert only(found, "problem").evidence.startswith("vllm requires torch==2.11.0; 2.13")
    assert 'pip install "torch==2.11.0"' in found[0].cure


def test_the_installed_packages_are_compatible():
    only(software.check_requirements(situation()), "ok")


STACK = Stack(
    name="board 1", proof="hardware-tested", versions={"python": ">=3.11", "torch": "==2.7.1"}, algorithms=("rest",)
)


def test_a_pin_outside_the_stack_is_named_with_the_right_version():
    found = only(software.check_stack(situation(hardware=Board(known=(STACK,)))), "warning")
    assert found.evidence.startswith("torch 2.13")
    assert "outside the nearest stack, board 1: ==2.7.1" in found.evidence


def test_a_missing_part_of_the_stack_is_a_problem():
    stack = attrs.evolve(STACK, versions={"no-such-engine": "==1.0"}, clashes=("a wants b<1, c wants b>=1",))
    missing, clash = software.check_stack(situation(hardware=Board(known=(stack,))))
    assert (missing.result, missing.cure) == ("problem", 'pip install "no-such-engine==1.0"')
    assert clash.evidence == "board 1: a wants b<1, c wants b>=1"


def test_hardware_without_a_stack_for_the_algorithm_is_reported():
    only(software.check_stack(situation(hardware=Board(known=(attrs.evolve(STACK, algorithms=("x",)),)))), "skipped")


def test_requested_hardware_that_is_missing_is_a_problem():
    absent = Probe(available=False, evidence=("no /dev/board0",))
    assert "no /dev/board0" in only(devices.check_hardware(situation(hardware=Board(found=absent))), "problem").evidence


def test_ids_that_do_not_ascend_are_found():
    board = Board(visible_order="ascending")
    found = only(devices.check_visible(situation(hardware=board, environ={"BOARD_VISIBLE": "2,1"})), "problem")
    assert found.cure == "export BOARD_VISIBLE=1,2"
    only(devices.check_visible(situation(hardware=board, environ={"BOARD_VISIBLE": "1,2"})), "ok")
    only(devices.check_visible(situation(hardware=Board(), environ={"BOARD_VISIBLE": "2,2"})), "problem")
    assert list(devices.check_visible(situation(hardware=board, environ={}))) == []


@pytest.mark.slow
def test_torch_can_use_the_cpu_but_no_device_it_was_not_built_for():
    only(devices.check_torch(situation()), "ok")
    import torch

    if torch.cuda.is_available():
        pytest.skip("torch.cuda works here")
    found = only(devices.check_torch(situation(hardware=Board())), "problem")
    built = torch.version.cuda or torch.version.hip
    assert found.cure.startswith("torch is built for cuda" if built else "install the board's torch")


def test_a_torch_that_does_not_import_is_explained_by_a_known_symptom(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libboard.so: cannot open shared object file')\n")
    symptom = Symptom(pattern=r"libboard\.so", cause="the board's library is not sourced", cure="source board.sh")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    found = only(devices.check_torch(situation(hardware=Board(symptoms=(symptom,)), environ=environ)), "problem")
    assert "libboard.so" in found.evidence
    assert "not sourced" in found.evidence
    assert found.cure == "source board.sh"


def test_hardware_that_cannot_run_the_algorithm_is_a_problem():
    only(devices.check_algorithm(situation()), "ok")
    assert "verl" in only(devices.check_algorithm(situation(hardware=Board(algorithms=("verl",)))), "problem").cure


QWEN = "algorithm.model=Qwen/Qwen2.5-Coder-1.5B-Instruct"


@pytest.mark.parametrize(("gigabytes", "result"), [(24, "problem"), (39.2, "ok"), (80, "ok")])
def test_the_reference_model_needs_40_gb(gigabytes, result):
    device = Device(name="B1", memory=int(gigabytes * 10**9))
    board = Board(found=Probe(available=True, devices=(device,)))
    found = only(devices.check_memory(situation(QWEN, hardware=board)), result)
    assert "optimizer 12.3" in found.evidence


def test_a_large_micro_batch_is_a_warning():
    device = Device(name="B1", memory=40 * 10**9)
    board = Board(found=Probe(available=True, devices=(device,)))
    only(devices.check_memory(situation(QWEN, "algorithm.micro_batch=64", hardware=board)), "warning")


def test_a_device_of_unknown_memory_gets_the_memory_that_is_needed():
    board = Board(found=Probe(available=True, devices=(Device(name="B1"),)))
    assert "optimizer 12.3 GB" in only(devices.check_memory(situation(QWEN, hardware=board)), "skipped").evidence


def test_a_model_of_unknown_shape_is_not_checked(tmp_path):
    assert "not known" in only(devices.check_memory(situation("algorithm.model=some/model")), "skipped").evidence
    (tmp_path / "config.json").write_text("{")
    only(devices.check_memory(situation(f"algorithm.model={tmp_path}")), "skipped")
    assert list(devices.check_memory(situation())) == []


def test_a_missing_model_folder_is_a_problem(tmp_path):
    missing = only(content.check_model(situation(f"algorithm.model={tmp_path}/none")), "problem")
    assert "there is no folder" in missing.evidence
    (tmp_path / "config.json").write_text("{}")
    lacking = only(content.check_model(situation(f"algorithm.model={tmp_path}")), "problem")
    assert "weights" in lacking.evidence
    (tmp_path / "model.safetensors").write_bytes(b"0" * 10)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    only(content.check_model(situation(f"algorithm.model={tmp_path}")), "ok")


def test_a_model_in_the_cache_is_found(tmp_path):
    snapshot = tmp_path / "hub" / "models--some--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for name in ("config.json", "tokenizer_config.json", "model.safetensors"):
        (snapshot / name).write_text("{}")
    found = only(content.check_model(situation("algorithm.model=some/model", environ={"HF_HOME": str(tmp_path)})), "ok")
    assert "abc" in found.evidence


def test_a_model_that_cannot_be_downloaded_is_a_problem(tmp_path):
    base = {"HF_HOME": str(tmp_path)}
    model = "algorithm.model=some/model"
    offline = only(content.check_model(situation(model, environ={**base, "HF_HUB_OFFLINE": "1"})), "problem")
    assert "HF_HUB_OFFLINE forbids" in offline.evidence
    gated = only(content.check_model(situation("algorithm.model=meta-llama/Llama-3.2-1B", environ=base)), "problem")
    assert "HF_TOKEN" in gated.cure
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    unreachable = {**base, "HF_ENDPOINT": f"http://127.0.0.1:{port}"}
    assert "cannot be reached" in only(content.check_model(situation(model, environ=unreachable)), "problem").evidence


def test_data_is_loaded_and_fingerprinted(monkeypatch):
    train, report = content.check_data(situation())
    assert (train.check, train.result) == ("data: train", "ok")
    assert train.evidence.startswith("3 tasks of train, SHA-256 ")
    assert report.evidence != train.evidence
    monkeypatch.setenv("TOY_DATA", "missing")
    found = only(content.check_data(situation()), "problem")
    assert (found.evidence, found.cure) == ("the sums are missing", "make them: agentrig data sums")


def test_an_unwritable_folder_is_found(tmp_path):
    only(machine.check_write(situation(directory=tmp_path / "not" / "yet")), "ok")
    found = only(machine.check_write(situation(directory=Path("/proc/runs"))), "problem")
    assert "run.directory=PATH" in found.cure


@pytest.fixture
def small_disk(tmp_path):
    """A disk of one megabyte: a real file system in memory, where this user may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("this user may not mount a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_too_small_is_found(small_disk):
    found = only(machine.check_disk(situation(directory=small_disk / "runs")), "problem")
    assert "0.0 GB free" in found.evidence
    only(machine.check_shared_memory(situation(), small_disk), "warning")


def test_checkpoints_count_for_the_disk(monkeypatch):
    usage = shutil.disk_usage("/")._replace(free=20 * 10**9)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    only(machine.check_disk(situation()), "ok")
    assert "about 65.3 GB needed" in only(machine.check_disk(situation(QWEN)), "problem").evidence


def test_a_port_in_use_is_found():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = only(machine.check_ports(situation(f"algorithm.port={port}", environ={})), "problem")
        assert str(port) in found.evidence
        only(machine.check_ports(situation(environ={"MASTER_PORT": str(port)})), "problem")
    only(machine.check_ports(situation(f"algorithm.port={port}", environ={})), "ok")


def test_a_limit_that_no_run_can_work_with_is_found(monkeypatch):
    """The doctor asks what a run asks before it starts its runners."""
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (20, 20))
    found = only(machine.check_ports(situation(environ={})), "problem")
    assert found.evidence == "this process may open 20 files at once (ulimit -n), and a run needs 256."
    assert "ulimit -n 4096" in found.cure


def test_the_gateway_s_address():
    assert list(machine.check_gateway(situation())) == []
    only(machine.check_gateway(situation("gateway.use=on")), "ok")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = only(machine.check_gateway(situation("gateway.use=on", f"gateway.port={port}")), "problem")
        assert f"127.0.0.1:{port}: Address already in use" in found.evidence


def test_each_fixed_model_must_answer():
    """A dead planner fails every rollout that asks it, and the run starts all the same."""
    from agentrig.testing.scripted import Reply, scripted_server

    assert list(machine.check_models(situation("gateway.use=on"))) == []
    with scripted_server(lambda body: Reply(text="fine")) as server:
        dead = server.url
    with scripted_server(lambda body: Reply(text="fine")) as server:
        keys = [f"gateway.models.planner.base_url={dead}", f"gateway.models.critic.base_url={server.url}"]
        keys += ["gateway.models.main=policy"]
        critic, planner = sorted(machine.check_models(situation(*keys)), key=lambda found: found.check)
    assert (planner.check, planner.result) == ("model planner", "problem")
    assert f"{dead} does not answer" in planner.evidence
    assert "gateway.models.planner.base_url" in planner.cure
    assert (critic.check, critic.result) == ("model critic", "ok")


def test_too_many_runners_are_a_warning():
    only(content.check_cores(situation("runners.n=1")), "ok")
    only(content.check_cores(situation("runners.n=1000")), "warning")


def test_a_subprocess_answers_or_reports_its_error():
    assert ask("import json, sys; print(json.dumps({'x': sys.argv[1]}))", "7").data == {"x": "7"}
    chained = ask("try:\n    import no_such\nexcept ImportError as e:\n    raise RuntimeError('outer') from e")
    assert chained.reason == "RuntimeError: outer <- ModuleNotFoundError: No module named 'no_such'"
    assert "no JSON" in ask("print('hello')").error
    assert "signal 9" in ask("import os; os.kill(os.getpid(), 9)").error
    assert "within 0 s" in ask("import time; time.sleep(60)", timeout_s=0.2).error
    assert ToolOutput(ok=False, error="").reason == ""
