"""`agentrig doctor` says the memory plan before anything starts, also for a device that is not here."""

from __future__ import annotations

import attrs
import pytest
from agentrig_grpo.checks import about, check_memory_plan
from agentrig_grpo.config import GrpoConfig

from agentrig.doctor.examination import look
from agentrig.hardware import Device, Probe
from agentrig.hardware.memory import KNOWN


def findings(*overrides, memory=None, server="embedded"):
    """Return what the check finds, with a GPU of so many GiB, or without one."""
    situation, _ = look("mini", uses={"hardware": "cuda", "server": server}, overrides=overrides)
    devices = (Device(name="GPU", memory=int(memory * 2**30)),) if memory else ()
    probes = {**situation.probes, "cuda": Probe(available=bool(devices), devices=devices)}
    return list(check_memory_plan(attrs.evolve(situation, probes=probes)))


def test_it_says_what_would_be_chosen() -> None:
    (found,) = findings(memory=79.2)
    assert found.result == "ok"
    assert found.evidence.startswith("about: memory: 79.2 GiB of cuda: server ")
    assert "pass of 49,152 tokens, no layer computed twice" in found.evidence
    (found,) = findings("hardware.memory_gib=24", memory=79.2)
    assert "23.2 GiB of cuda of memory_gib = 24: server" in found.evidence


def test_a_device_that_is_not_here_is_computed_for_a_limit() -> None:
    (found,) = findings("hardware.memory_gib=24")
    assert (found.result, "23.2 GiB of cuda of memory_gib = 24" in found.evidence) == ("ok", True)
    (found,) = findings()
    assert (found.result, "hardware.memory_gib=24 computes" in found.evidence) == ("skipped", True)


@pytest.mark.parametrize(("limit", "words"), [(1, r"memory_gib = 1"), (100, r"memory_gib = 100: cuda has 79.2 GiB")])
def test_what_cannot_fit_is_a_problem_with_its_number(limit, words) -> None:
    (found,) = findings(f"hardware.memory_gib={limit}", memory=79.2)
    assert found.result == "problem"
    assert words in found.evidence


@pytest.mark.parametrize(
    ("server", "rank", "result", "words"),
    [
        ("vllm", 16, "ok", "which the learner reads"),
        ("vllm", 600, "problem", "adapters of rank 512 at most"),
        ("embedded", 16, "problem", "no weights on the learner's device that another process can read"),
    ],
)
def test_it_says_whether_the_server_lends_its_weights(server, rank, result, words) -> None:
    settings = (f"algorithm.lora_rank={rank}", "algorithm.lora_base=server")
    (found,) = findings(*settings, memory=79.2, server=server)
    assert (found.result, words in found.evidence) == (result, True)


def test_about_is_near_what_was_measured_on_a_gpu() -> None:
    """An update of the shapes of 0.5B and 1.5B with passes of 8,192 tokens: activations of 9.3 and 12.9 GiB."""
    for size, measured in (("0.5", 9.3), ("1.5", 12.9)):
        shape = KNOWN[f"qwen/qwen2.5-coder-{size}b-instruct"]
        found = about(shape, GrpoConfig(), 8192, 0, 2)
        assert found.activations / 2**30 == pytest.approx(measured, rel=0.2)
