import os

import attrs
import pytest
from agentrig_verl.workers import SETUP_VARIABLE, ray_environment, resolve, set_up_worker

from agentrig.errors import ConfigError
from agentrig.hardware import (
    Cpu,
    CpuConfig,
    Hardware,
    Override,
    Probe,
    Stack,
    apply_overrides,
    installed,
)
from agentrig.hardware.versions import fits, nearest_stack
from agentrig.plugins.builtin import cpu_spec
from agentrig.settings import structure


@attrs.frozen(kw_only=True)
class Board(Hardware):
    name: str = "board"
    torch_device: str = "cuda"
    visible_devices: str | None = "BOARD_VISIBLE"
    ray_resource: str = "GPU"
    setup: str | None = None

    def probe(self) -> Probe:
        return Probe(available=True)

    def worker_setup(self, versions):
        return self.setup

    def all_overrides(self):
        return (
            Override(key="a.old", value=1, reason="r", versions={"verl": "<0.8"}),
            Override(key="a.new", value=True, add=True, reason="r", versions={"verl": ">=0.8"}),
            Override(key="a.gone", delete=True, reason="r"),
            Override(key="a.soft", value=1, soft=True, reason="r"),
        )


def test_hardware_cannot_be_built_without_a_probe():
    with pytest.raises(TypeError, match="probe"):
        Hardware(name="x", torch_device="cpu")


def test_hardware_may_support_only_some_algorithms():
    assert Board().carries("grpo")
    assert not Board(algorithms=("verl",)).carries("grpo")


def test_overrides_hold_for_versions():
    assert [o.hydra() for o in Board().overrides({"verl": "0.5.0"})] == ["a.old=1", "~a.gone", "a.soft=1"]
    assert [o.hydra() for o in Board().overrides({"verl": "0.9.1"})] == ["+a.new=true", "~a.gone", "a.soft=1"]
    assert [o.hydra() for o in Board().overrides({})] == ["~a.gone", "a.soft=1"]


def test_overrides_are_applied_to_dotted_settings():
    before = {"a.old": 0, "a.gone": 1, "b": 2, "a.soft": 0}
    after = apply_overrides(before, Board().overrides({"verl": "0.5.0"}))
    assert after == {"a.old": 1, "b": 2, "a.soft": 0}
    assert before["a.gone"] == 1
    assert apply_overrides({}, Board().overrides({})) == {"a.soft": 1}


def test_a_setting_that_is_replaced_is_logged(caplog):
    apply_overrides({"a.old": 0, "a.gone": 1}, Board().overrides({"verl": "0.5.0"}))
    assert [r.message for r in caplog.records] == ["a.old = 1 instead of 0: r", "a.gone = 1 is left out: r"]
    caplog.clear()
    apply_overrides({"a.old": 1}, Board().overrides({"verl": "0.5.0"}))
    assert not caplog.records


@pytest.mark.parametrize(
    ("version", "specifier", "expected"),
    [
        ("8.2.RC1", "==8.2rc1", True),
        ("2.7.1+cpu", "==2.7.1", True),
        ("2.7.1.dev20250724", "==2.7.1.dev20250724", True),
        ("0.10.0rc1", "<0.10.0rc1", False),
        ("0.9.2rc1", ">=0.9.1,<0.10.0rc1", True),
        ("unknown", ">=0", False),
    ],
)
def test_versions_are_compared_as_pep_440_says(version, specifier, expected):
    assert fits(version, specifier) is expected


STACKS = (
    Stack(name="old", proof="contract-tested", versions={"python": "==3.11.*", "torch": "==2.7.*", "verl": "==0.5.*"}),
    Stack(name="new", proof="contract-tested", versions={"python": "==3.12.*", "torch": "==2.10.*", "verl": "==0.9.*"}),
)


def test_the_nearest_stack_has_the_most_matches_and_then_the_fewest_mismatches():
    assert nearest_stack(STACKS, {"python": "3.11.9", "torch": "2.7.1", "verl": "0.6.0"}).name == "old"
    assert nearest_stack(STACKS, {"verl": "0.9.1"}).name == "new"
    assert nearest_stack(STACKS, {"torch": "2.13.0"}).name == "new"
    assert nearest_stack((), {}) is None


def test_installed_reads_metadata_and_skips_what_is_missing():
    found = installed(["pytest", "no-such-distribution"])
    assert found["pytest"] == pytest.__version__
    assert "no-such-distribution" not in found
    assert found["python"].startswith("3.")


def test_the_cpu_sets_threads_and_checks_its_keys():
    assert Cpu(config=CpuConfig(threads=3)).environment()["OMP_NUM_THREADS"] == "3"
    assert Cpu().probe().available
    assert Cpu().probe().devices[0].memory > 2**30
    assert cpu_spec().build(CpuConfig(threads=2)).threads == 2
    with pytest.raises(ConfigError, match='Did you mean "threads"'):
        structure(CpuConfig, {"thread": 2}, owner="cpu", section="hardware")


def test_without_cpu_affinity_all_cores_count(monkeypatch):
    """macOS, for example: its `os` has no `sched_getaffinity`."""
    monkeypatch.delattr(os, "sched_getaffinity")
    assert Cpu().threads == os.cpu_count()
    assert Cpu().probe().evidence == (f"{os.cpu_count()} usable cores",)


def test_a_worker_set_up_runs_after_an_existing_hook(monkeypatch):
    # These three stand in for set-up functions: each takes no argument and returns without an effect.
    runtime = ray_environment(
        Board(setup="gc:collect"),
        {},
        {"worker_process_setup_hook": "os.getpid", "env_vars": {"KEEP": "1"}, "working_dir": "."},
    )
    assert runtime["worker_process_setup_hook"] == "agentrig_verl.workers.set_up_worker"
    assert runtime["env_vars"] == {"KEEP": "1", SETUP_VARIABLE: "os.getpid,gc:collect"}
    assert runtime["working_dir"] == "."
    again = ray_environment(Board(setup="os:getcwd"), {}, runtime)
    assert again["env_vars"][SETUP_VARIABLE] == "os.getpid,gc:collect,os:getcwd"
    monkeypatch.setenv(SETUP_VARIABLE, again["env_vars"][SETUP_VARIABLE])
    set_up_worker()


def test_a_missing_set_up_function_is_an_error():
    with pytest.raises(ConfigError, match='"nowhere:go" cannot be loaded'):
        resolve("nowhere:go")
