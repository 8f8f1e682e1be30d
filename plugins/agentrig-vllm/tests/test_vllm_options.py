"""vLLM's engine arguments: all names, those that a run may set, and the command line of a plan."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import sys
from argparse import ArgumentParser
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from agentrig_vllm import memory, options, schema
from agentrig_vllm.config import VllmConfig

from agentrig.errors import ConfigError
from agentrig.hardware.cpu import Cpu
from agentrig.servers import ServerPlan
from agentrig.settings import structure

STAND_IN = Path(__file__).parent / "stand_in"


def plan(**more) -> ServerPlan:
    return ServerPlan(model=Path("/models/m"), name="policy", hardware=Cpu(), **more)


def words_of(config: VllmConfig, **more) -> list[str]:
    return options.command_line(options.arguments_of(plan(**more), config))


def test_every_argument_that_agentrig_gives_or_refuses_is_one_of_vllm():
    _, names = schema.known()
    whole = VllmConfig(kv_cache_mb=64)
    given = options.arguments_of(plan(context=64, sleeps=True, memory=5 << 30), whole)
    assert given.keys() <= names
    assert set(schema.OWN) <= names
    assert {"model", "max_model_len", "enable_sleep_mode", "kv_cache_memory_bytes"} <= given.keys()
    free = {name for name in given if name not in schema.OWN}
    assert free == {"additional_config", "disable_cascade_attn", "enable_flashinfer_autotune", "disable_log_stats"}
    more = options.arguments_of(plan(adapters=16), whole)
    assert more.keys() - given.keys() == {"enable_lora", "max_loras", "max_lora_rank", "lora_target_modules"}
    assert more.keys() <= names


@pytest.mark.parametrize(("rank", "room"), [(1, 1), (2, 8), (16, 16), (300, 320), (512, 512)])
def test_vllm_has_room_for_one_set_of_adapters_of_the_runs_rank(rank, room):
    found = options.arguments_of(plan(adapters=rank), VllmConfig())
    assert (found["max_loras"], found["max_lora_rank"]) == (1, room)
    assert found["additional_config"] == {options.ADAPTERS: rank}
    assert (memory(VllmConfig()).lends, memory(VllmConfig(device=1)).lends) == (512, 0)


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        ('{% if tools %}<tools>{% endif %}<tool_call>\n{"name": …}\n</tool_call>', "hermes"),
        ("<tool_call>\n<function={{ call.name }}>\n</function></tool_call>", "qwen3_coder"),
        ('{% if tools is not none %}{% endif %}{"name": …, "parameters": …}', "llama3_json"),
        ("{{ messages }}", None),
    ],
)
@pytest.mark.parametrize("apart", [True, False], ids=["template-file", "tokenizer-config"])
def test_tool_calls_are_read_as_the_chat_template_writes_them(tmp_path, template, parser, apart):
    if apart:
        (tmp_path / "chat_template.jinja").write_text(template)
    else:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    asked = ServerPlan(model=tmp_path, name="policy", hardware=Cpu())
    found = options.arguments_of(asked, VllmConfig())
    assert (found.get("tool_call_parser"), found.get("enable_auto_tool_choice")) == (parser, parser and True)
    assert options.arguments_of(asked, VllmConfig(tool_call_parser="mistral"))["tool_call_parser"] == "mistral"
    assert "tool_call_parser" not in options.arguments_of(asked, VllmConfig(tool_call_parser=""))


@pytest.mark.skipif("vllm" not in {d.name for d in importlib.metadata.distributions()}, reason="vLLM is not installed")
def test_the_recorded_arguments_are_those_of_the_installed_vllm():
    version, *names = schema.RECORDED.read_text("utf-8").split()
    found, there = schema.known()
    assert found.startswith(version), "record the arguments of this version, and look at serving.py and worker.py"
    assert set(names) == there


def test_arguments_are_read_from_the_source_without_an_import(tmp_path, monkeypatch):
    source = tmp_path / "vllm" / "engine" / "arg_utils.py"
    source.parent.mkdir(parents=True)
    source.write_text(
        "raise SystemExit\nclass EngineArgs:\n    one: int = 1\n    _two: int = 2\nclass Other:\n    x: int\n"
    )
    info = tmp_path / "vllm-0.24.7.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.24.7\n")
    (info / "RECORD").write_text("vllm/engine/arg_utils.py,,\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    schema.known.cache_clear()
    try:
        assert schema.known() == ("0.24.7", frozenset({"one"}))
    finally:
        schema.known.cache_clear()


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("max_num_batched_token", 'no engine argument max_num_batched_token. Did you mean "max_num_batched_tokens"?'),
        ("max-num-batched-tokens", "no engine argument max-num-batched-tokens. Write max_num_batched_tokens"),
        ("dtype", "dtype is agentrig's to set: set algorithm.dtype"),
        ("enable_prefix_caching", "emptied with each version"),
        ("tensor_parallel_size", "one process on one GPU"),
    ],
)
def test_a_wrong_key_is_an_error_before_the_run_starts(key, says):
    with pytest.raises(ConfigError) as caught:
        structure(VllmConfig, {"vllm": {key: 1}}, owner="vllm", section="server")
    assert says in str(caught.value)


def test_a_plan_becomes_a_command_line_that_the_parser_reads_back(monkeypatch):
    monkeypatch.syspath_prepend(STAND_IN)
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    from vllm.entrypoints.openai.cli_args import make_arg_parser

    config = VllmConfig(max_num_seqs=20, kv_cache_mb=3, vllm={"max_num_batched_tokens": 4096})
    words = words_of(config, context=512, seed=5, dtype="bfloat16", sleeps=True, memory=3 << 30)
    found = vars(make_arg_parser(ArgumentParser()).parse_args(words))
    assert found["model"] == "/models/m"
    assert found["served_model_name"] == ["policy"]
    assert (found["max_model_len"], found["seed"], found["dtype"]) == (512, 5, "bfloat16")
    assert (found["additional_config"], found["kv_cache_memory_bytes"]) == ({"agentrig_memory": 3 << 30}, 3 << 20)
    assert (found["enable_prefix_caching"], found["enable_flashinfer_autotune"]) == (True, False)
    assert (found["enable_sleep_mode"], found["disable_log_stats"], found["max_num_batched_tokens"]) == (
        True,
        True,
        4096,
    )
    assert found["compilation_config"] == {
        "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 20],
    }  # fmt: skip
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)


def test_settings_take_precedence_over_the_algorithm():
    def asked(config: VllmConfig, memory: int | None) -> tuple[float, object]:
        found = options.arguments_of(plan(memory=memory), config)
        return found["gpu_memory_utilization"], found.get("additional_config")

    assert asked(VllmConfig(), None) == (options.SHARE, None)
    assert asked(VllmConfig(), 5) == (options.SHARE, {options.PLANNED: 5})
    assert asked(VllmConfig(gpu_memory_utilization=0.7), 5) == (0.7, None)
    assert asked(VllmConfig(vllm={"additional_config": {"own": 1}}), 5)[1] == {"own": 1, options.PLANNED: 5}
    assert "--max-model-len" not in words_of(VllmConfig())
    assert "--enable-sleep-mode" not in words_of(VllmConfig())
    compiled = options.arguments_of(plan(), VllmConfig(compile=True))["compilation_config"]
    assert compiled["cudagraph_mode"] == "FULL_AND_PIECEWISE"


def test_graphs_are_recorded_for_every_number_of_requests_up_to_the_most():
    for most in (1, 3, 64, 128, 256, 300, 512):
        sizes = options.graph_sizes(most)
        assert sizes[-1] == most
        assert sizes == sorted(set(sizes))
        padded = [next(size for size in sizes if size >= n) - n for n in range(1, most + 1)]
        assert max(padded) < 32
    assert options.graph_sizes(4096)[-1] == 512


def test_the_worker_makes_a_share_of_the_plans_bytes(monkeypatch):
    """Before vLLM compares it with what is free; a share of the settings' own is left as it is."""
    asked = []

    class GpuWorker:
        def __init__(self, additional):
            self.vllm_config, self.local_rank = SimpleNamespace(additional_config=additional), 0
            self.cache_config = SimpleNamespace(gpu_memory_utilization=0.4)

        def init_device(self):
            asked.append(self.cache_config.gpu_memory_utilization)

        def compile_or_warm_up_model(self):
            return "recorded"

        def load_model(self):
            pass

    stand_in = ModuleType("vllm.v1.worker.gpu_worker")
    stand_in.Worker = GpuWorker
    for name in ("vllm", "vllm.v1", "vllm.v1.worker"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    monkeypatch.delitem(sys.modules, "agentrig_vllm.worker", raising=False)
    worker = importlib.import_module("agentrig_vllm.worker")
    monkeypatch.delitem(sys.modules, "agentrig_vllm.worker")
    monkeypatch.setattr(worker, "end_with_parent", lambda parent: None)
    monkeypatch.setattr(worker.torch.cuda, "mem_get_info", lambda device: (1, 80 << 30))
    for additional in ({options.PLANNED: 8 << 30}, {}, None):
        worker.Worker(additional).init_device()
    assert asked == [0.1, 0.4, 0.4]
    limits = []
    monkeypatch.setattr(worker.torch.cuda, "set_per_process_memory_fraction", lambda *given: limits.append(given))
    for additional in ({options.PLANNED: 8 << 30, options.LIMITED: True}, {options.PLANNED: 8 << 30}):
        found = worker.Worker(additional)
        found.requested_memory = 8 << 30
        assert found.compile_or_warm_up_model() == "recorded"
    assert limits == [(7.25 / 80, 0)], "torch and the process's own part are the server's memory"
    settings = []
    monkeypatch.setattr(worker.torch.cuda.memory, "_set_allocator_settings", settings.append)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    for additional in ({}, {options.ADAPTERS: 16}):
        found = worker.Worker(additional)
        found.device = worker.torch.device("cuda")
        found.load_model()
        settings.append("loaded")
    assert settings == ["loaded", "expandable_segments:False", "expandable_segments:True", "loaded"]


@pytest.mark.parametrize("limit", [0.0, 24.0])
def test_the_worker_is_told_whether_the_run_has_a_limit(limit):
    plan = ServerPlan(model=Path("m"), name="m", hardware=SimpleNamespace(memory_limit=limit), memory=8 << 30)
    told = options.arguments_of(plan, VllmConfig())["additional_config"]
    assert told == {options.PLANNED: 8 << 30} | ({options.LIMITED: True} if limit else {})
