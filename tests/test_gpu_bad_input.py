"""The script of `make gpu`: what it calls a good end, who holds memory, and a case that needs no GPU."""

import sys
import time
import tomllib
from itertools import groupby
from pathlib import Path
from typing import Any

import attrs
import pytest
from agentrig_grpo.checks import fitting_about
from agentrig_grpo.config import GrpoConfig
from agentrig_grpo.planning import plan_memory
from agentrig_vllm import memory
from agentrig_vllm.config import VllmConfig

from agentrig.errors import ConfigError
from agentrig.hardware.memory import GIB, KNOWN, DeviceMemory, ServerNeed

sys.path.insert(0, str(Path(__file__).parent / "benchmarks"))
import gpu_bad_input as script
from one_gpu import first_and_last

MESSAGE = "agentrig: an update needs about 9 GiB.\n  Set algorithm.lora_rank = 16"
CASE = script.Case(name="one", about="", expects="message", says="lora_rank", steps=2)
REFUSED = script.Ended(status=1, steps=0, log=f"a line\n{MESSAGE}\n")
WELL = script.Ended(status=0, steps=2, log="run done\n")


@pytest.mark.parametrize(
    ("case", "ended", "why"),
    [
        (CASE, REFUSED, ""),
        (CASE, WELL, "it should have been refused"),
        (CASE, attrs.evolve(REFUSED, log="killed"), "no message"),
        (CASE, attrs.evolve(REFUSED, log=f"{MESSAGE}\n\nmore\n"), "more than one paragraph"),
        (CASE, attrs.evolve(REFUSED, log=f"Traceback (most recent call last):\n{MESSAGE}"), "a traceback"),
        (CASE, attrs.evolve(REFUSED, status=-9), "exit status -9"),
        (CASE, attrs.evolve(REFUSED, left=2), "2 processes were left"),
        (CASE, attrs.evolve(REFUSED, killed=True), "stopped after 60 s"),
        (attrs.evolve(CASE, says="moments"), REFUSED, "the message does not say moments"),
        (attrs.evolve(CASE, expects="end"), WELL, ""),
        (attrs.evolve(CASE, expects="end"), attrs.evolve(WELL, steps=1), "1 of 2 steps"),
        (attrs.evolve(CASE, expects="end"), REFUSED, "it should have ended well"),
        (attrs.evolve(CASE, expects="either"), WELL, ""),
        (attrs.evolve(CASE, expects="either"), REFUSED, ""),
    ],
)
def test_what_is_a_good_end(case: script.Case, ended: script.Ended, why: str) -> None:
    assert script.fault(case, ended) == why


def test_the_memory_of_the_first_steps_and_of_the_last() -> None:
    used = [90 * 1024, *(step * 1024 for step in range(2, 13))]  # a start, then a GiB more in each step
    assert first_and_last(used, list(range(1, 13))) == {"peak_first_gib": 6.0, "peak_last_gib": 12.0}
    assert first_and_last([], [0]) == {"peak_first_gib": None, "peak_last_gib": None}


@pytest.mark.parametrize(
    ("what", "gib", "taken"), [("leave", 24, 46), ("leave", -0.1, 62), ("leave", 75, 0), ("take", 40, 40)]
)
def test_a_holder_leaves_or_takes(what: str, gib: float, taken: float) -> None:
    assert script.to_take(what, gib, 70 * GIB, 80 * GIB) == taken * GIB


def test_a_model_without_content_is_refused_by_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from agentrig_grpo import checks, memory, planning

    script.make_empty(script.EMPTY, tmp_path / "7b")
    file = tmp_path / "7b" / "model.safetensors"
    assert file.stat().st_size > 15e9
    assert file.stat().st_blocks * 512 < 1e6
    shape = planning.shape_of(tmp_path / "7b")
    assert shape is not None

    def about(_directory: Path, config: GrpoConfig, *, tokens: int, recomputed: int, **_: object) -> object:
        return checks.about(shape, config, tokens, recomputed, 2)

    monkeypatch.setattr(memory, "need_of", about)  # fake tensors of a GPU need one
    for limit, cure in ((8, "Take a smaller model"), (40, "Set algorithm.lora_rank = 16")):
        with pytest.raises(ConfigError, match=cure):
            plan_memory(
                tmp_path / "7b",
                GrpoConfig(model=str(tmp_path / "7b"), max_tokens=32, max_length=300),
                dtype="bfloat16",
                device=DeviceMemory(name="cuda", total=80 * GIB, limit=limit * GIB),
                attention="sdpa",
                server=ServerNeed(weights=2 * shape.parameters, beside=GIB, cache=GIB, calls=32),
            )


def settings_of(case: script.Case) -> dict[str, Any]:
    """Return a case's keys with their values."""
    return tomllib.loads("\n".join(case.keys))


def test_cases_that_run_at_once_have_room_on_80_gb() -> None:
    for _, together in groupby(script.CASES, key=lambda case: case.beside or case.name):
        batch = list(together)
        limits = [settings_of(c).get("hardware", {}).get("memory_gib", 0) for c in batch if c.expects == "end"]
        assert sum(limits) + len(batch) / 2 < 79  # half a GiB for what CUDA takes of each
        assert len({case.leave for case in batch}) == 1
        assert len(limits) < 2 or all(limits)


@pytest.mark.parametrize("case", [case for case in script.CASES if case.expects == "end"], ids=lambda case: case.name)
def test_what_must_end_well_fits_by_the_plan(case: script.Case) -> None:
    tasks, n, prompt, answer = script.verl_step.parsed(case.rows)
    context, keys = prompt + answer + 64, settings_of(case)
    rows = {"tasks_per_step": tasks, "group_size": n, "max_tokens": answer, "max_length": context}
    limit, others = keys.get("hardware", {}).get("memory_gib", 0), 79.2 - case.leave if case.leave else 0
    found = fitting_about(
        KNOWN[f"qwen/qwen2.5-coder-{case.shape}-instruct"],
        GrpoConfig(**rows, **keys.get("algorithm", {})),
        DeviceMemory(name="cuda", total=int(79.2 * GIB), others=int(others * GIB), limit=limit * GIB),
        memory(VllmConfig(**keys.get("server", {}))),
        context=context,
        runners=64,
    )
    assert found.first() is not None, found.refusal()


@pytest.mark.slow
def test_a_case_on_a_cpu(tmp_path: Path) -> None:
    (case,) = script.chosen("no-pass", "cpu")
    bench = script.Bench(tmp_path, "cpu", tmp_path / "results.json", until=time.monotonic() + 120)
    (result,) = bench.run([case])
    assert result["ok"], result
    assert result["runs"][0]["status"] == 1
    assert '"name": "no-pass"' in (tmp_path / "results.json").read_text("utf-8")
