"""Each check, on the real host if possible, otherwise with a prepared folder or process."""

import json
import os
import re
import resource
import shutil
import socket
from pathlib import Path

import attrs
import pytest
from distributions import install

from agentrig.doctor import Situation, content, devices, machine, software
from agentrig.hardware import Cpu, Device, Hardware, Probe, Stack, Symptom, installed
from agentrig.hardware.memory import KNOWN
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


def test_a_vllm_that_pins_another_torch_is_a_problem(tmp_path, monkeypatch):
    """Metadata as vLLM's wheel has it; the torch is the real one of this environment."""
    requires = ["torch==2.11.0", "numpy", "torch==1.0; extra == 'old'"]
    install(tmp_path, "vllm", "", version="0.24.0", requires=requires, plugin=False)
    monkeypatch.syspath_prepend(tmp_path)
    found = [
        f for f in software.check_requirements(situation(versions=installed(software.STACK))) if "vllm" in f.evidence
    ]
    assert only(found, "problem").evidence.startswith("vllm requires torch==2.11.0; 2.13")
    assert 'pip install "torch==2.11.0"' in found[0].cure


STACK = Stack(
    name="board 1", proof="hardware-tested", versions={"python": ">=3.11", "torch": "==2.7.1"}, algorithms=("rest",)
)


QWEN = "algorithm.model=Qwen/Qwen2.5-Coder-1.5B-Instruct"
ABSENT = Probe(available=False, evidence=("no /dev/board0",))
ASCENDING = Board(visible_order="ascending")


def sized(gigabytes: float | None) -> Board:
    """A board with so much memory."""
    memory = None if gigabytes is None else int(gigabytes * 10**9)
    return Board(found=Probe(available=True, devices=(Device(name="B1", memory=memory),)))


CASES = {
    "this python": (software.check_python, [], {}, "ok", ""),
    "a python out of range": (software.check_python, [], {"versions": {"python": "3.9.1"}}, "problem", ">=3.11"),
    "what is installed": (software.check_requirements, [], {}, "ok", ""),
    "a pin outside the stack": (
        *(software.check_stack, [], {"hardware": Board(known=(STACK,))}, "warning"),
        "is outside the nearest stack, board 1: ==2.7.1",
    ),
    "no stack": (software.check_stack, [], {"hardware": Board()}, "skipped", "on record for rest"),
    "missing hardware": (devices.check_hardware, [], {"hardware": Board(found=ABSENT)}, "problem", "no /dev/board0"),
    "ids that do not ascend": (
        *(devices.check_visible, [], {"hardware": ASCENDING, "environ": {"BOARD_VISIBLE": "2,1"}}, "problem"),
        "export BOARD_VISIBLE=1,2",
    ),
    "ids that ascend": (
        devices.check_visible, [], {"hardware": ASCENDING, "environ": {"BOARD_VISIBLE": "1,2"}}, "ok", "",
    ),
    "an id twice": (
        devices.check_visible, [], {"hardware": Board(), "environ": {"BOARD_VISIBLE": "2,2"}}, "problem", "twice",
    ),
    "no ids": (devices.check_visible, [], {"hardware": ASCENDING, "environ": {}}, "", ""),
    "any algorithm": (devices.check_algorithm, [], {}, "ok", ""),
    "another algorithm": (devices.check_algorithm, [], {"hardware": Board(algorithms=("verl",))}, "problem", "verl"),
    "24 GB": (devices.check_memory, [QWEN], {"hardware": sized(24)}, "problem", "optimizer 12.3"),
    "39.2 GB": (devices.check_memory, [QWEN], {"hardware": sized(39.2)}, "ok", "optimizer 12.3"),
    "a large micro-batch": (
        devices.check_memory, [QWEN, "algorithm.micro_batch=64"], {"hardware": sized(40)}, "warning", "micro-batch",
    ),
    "unknown memory": (devices.check_memory, [QWEN], {"hardware": sized(None)}, "skipped", "optimizer 12.3 GB"),
    "unknown shape": (devices.check_memory, ["algorithm.model=some/model"], {}, "skipped", "not known"),
    "no model": (devices.check_memory, [], {}, "", ""),
    "a folder to be made": (machine.check_write, [], {"directory": Path("not", "yet")}, "ok", ""),
    "an unwritable folder": (machine.check_write, [], {"directory": Path("/proc/runs")}, "problem", "run.directory"),
    "a name with a path": (machine.check_write, ['run.name="../x"'], {}, "problem", "it contains a path"),
    "a name that cannot be": (machine.check_write, ['run.name="a\\u0000b"'], {}, "problem", "cannot be printed"),
    "few runners": (content.check_cores, ["runners.n=1"], {}, "ok", ""),
    "many runners": (content.check_cores, ["runners.n=1000"], {}, "warning", "runners.threads"),
}  # fmt: skip
"""The check, keys of the recipe, what the situation has, the result ('' for none), and words of the finding."""


@pytest.mark.parametrize("name", CASES)
def test_a_check_of_one_situation(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check, overrides, more, result, words = CASES[name]
    found = list(check(situation(*overrides, **more)))
    assert [f.result for f in found] == ([result] if result else [])
    assert words in "".join(f"{f.evidence} {f.cure}" for f in found)


def test_the_directory_of_a_run_that_has_ended_is_a_problem(tmp_path):
    for file in ("config.toml", "summary.json"):
        (tmp_path / file).write_text("{}")
    found = only(machine.check_write(situation(f"run.name={tmp_path.name}", directory=tmp_path.parent)), "problem")
    assert found.evidence.startswith(
        f"{tmp_path} already has a run; set another run.name, or continue it with --resume"
    )


def test_a_missing_part_of_the_stack_is_a_problem():
    stack = attrs.evolve(STACK, versions={"no-such-engine": "==1.0"}, clashes=("a wants b<1, c wants b>=1",))
    missing, clash = software.check_stack(situation(hardware=Board(known=(stack,))))
    assert (missing.result, missing.cure) == ("problem", 'pip install "no-such-engine==1.0"')
    assert clash.evidence == "board 1: a wants b<1, c wants b>=1"


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


def test_a_missing_model_folder_is_a_problem(tmp_path):
    missing = only(content.check_model(situation(f"algorithm.model={tmp_path}/none")), "problem")
    assert "there is no folder" in missing.evidence
    (tmp_path / "config.json").write_text("{}")
    lacking = only(content.check_model(situation(f"algorithm.model={tmp_path}")), "problem")
    assert "weights" in lacking.evidence
    (tmp_path / "model.safetensors").write_bytes(b"0" * 10)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    only(content.check_model(situation(f"algorithm.model={tmp_path}")), "ok")


def test_a_folder_for_own_models_is_not_looked_for_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "hard").mkdir(parents=True)
    missing = only(content.check_model(situation("algorithm.model=models/nothere")), "problem")
    assert missing.evidence == "there is no folder models/nothere"
    command = f"agentrig warmup toy --hardware cpu --plugin {PLUGIN} --until 0.2 --out models/nothere"
    assert missing.cure.startswith(f"make one with {command}, or set ")
    misspelt = only(content.check_model(situation("algorithm.model=models/hrad")), "problem")
    assert misspelt.evidence == 'there is no folder models/hrad. Did you mean "models/hard"?'


def test_the_shipped_model_is_not_ok_for_an_agent_of_ones_own():
    found = only(content.check_model(situation("algorithm.model=mini")), "warning")
    assert found.cure.endswith(f": agentrig warmup toy --hardware cpu --plugin {PLUGIN} --until 0.2")


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
    monkeypatch.setenv("TOY_DATA", "odd")
    seen = situation()
    assert only(content.check_data(seen), "problem").cure == "", "no command makes these sums"
    used = seen.plan.components["tasks"]
    used = attrs.evolve(used, spec=attrs.evolve(used.spec, convert=print))
    seen = attrs.evolve(seen, plan=attrs.evolve(seen.plan, components={**seen.plan.components, "tasks": used}))
    assert only(content.check_data(seen), "problem").cure == f"see agentrig data {used.spec.name} --help"


def test_a_disk_that_is_too_small_is_found(small_disk):
    found = only(machine.check_disk(situation(directory=small_disk / "runs")), "problem")
    assert "0.0 GB free" in found.evidence
    only(machine.check_shared_memory(situation(), small_disk), "warning")


def test_checkpoints_count_for_the_disk(monkeypatch):
    usage = shutil.disk_usage("/")._replace(free=20 * 10**9)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    only(machine.check_disk(situation()), "ok")
    assert "about 65.3 GB needed" in only(machine.check_disk(situation(QWEN)), "problem").evidence


@pytest.mark.parametrize(
    ("settings", "size"),
    [
        ((), 2 * 14 * 7.6e9),
        (("algorithm.steps=1",), 14 * 7.6e9),
        (("algorithm.keep_every=20",), 5 * 14 * 7.6e9),
        (("algorithm.final=best",), 2 * 18 * 7.6e9),
        (("algorithm.lora_rank=16",), 2 * 16 * 40e6),
    ],
)
def test_the_checkpoints_of_a_run_are_those_that_its_learner_writes(settings, size, tmp_path):
    """7B: with adapters only these and their moments."""
    shape = attrs.asdict(KNOWN["qwen/qwen2.5-coder-7b-instruct"])
    names = {
        "layers": "num_hidden_layers",
        "hidden": "hidden_size",
        "intermediate": "intermediate_size",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "vocabulary": "vocab_size",
    }
    (tmp_path / "config.json").write_text(json.dumps({to: shape[name] for name, to in names.items()}))
    plan = resolve("mini", overrides=[f"algorithm.model={tmp_path}", "algorithm.steps=60", *settings])
    (found,) = machine.check_disk(attrs.evolve(situation(), plan=plan))
    needed = float(re.search(r"about ([0-9.]+) GB needed", found.evidence)[1])
    assert needed == pytest.approx(0.5 + size / 1e9, rel=0.02)


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


def test_a_subprocess_answers_or_reports_its_error():
    assert ask("import json, sys; print(json.dumps({'x': sys.argv[1]}))", "7").data == {"x": "7"}
    chained = ask("try:\n    import no_such\nexcept ImportError as e:\n    raise RuntimeError('outer') from e")
    assert chained.reason == "RuntimeError: outer <- ModuleNotFoundError: No module named 'no_such'"
    assert "no JSON" in ask("print('hello')").error
    assert "signal 9" in ask("import os; os.kill(os.getpid(), 9)").error
    assert "within 0 s" in ask("import time; time.sleep(60)", timeout_s=0.2).error
    assert ToolOutput(ok=False, error="").reason == ""
