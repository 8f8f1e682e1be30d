import re
from typing import Any

import pytest
from agentrig_ascend.probe import cann_version, device_files, parse_smi, probe
from hosts import tool

from agentrig.testing import check

A2 = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 24.1.rc2                 Version: 24.1.rc2                                             |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B3               | OK            | 93.6        40                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3162 / 65536         |
+===========================+===============+====================================================+
| 1     910B3               | {health:<13} | 91.0        41                0    / 0             |
| 0                         | 0000:01:00.0  | 0           0    / 0          3161 / 65536         |
+===========================+===============+====================================================+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
| 0       0                 | 4711          | python                   | 100                     |
+===========================+===============+====================================================+
"""
GOOD = A2.format(health="OK")
DEVICES = ("davinci0", "davinci1", "davinci_manager", "devmm_svm", "hisi_hdc")


@pytest.fixture
def host(tmp_path: Any) -> Any:
    """A host with its own /dev, PATH and /usr/local/Ascend."""

    def make(*, files: Any = DEVICES, smi: Any = GOOD, status: Any = 0, cann: Any = True, **environ: Any) -> Any:
        dev, path, root = tmp_path / "dev", tmp_path / "bin", tmp_path / "Ascend"
        for folder in (dev, path, root / "ascend-toolkit" / "latest"):
            folder.mkdir(parents=True, exist_ok=True)
        for name in files:
            (dev / name).touch()
        if smi is not None:
            tool(path, "npu-smi", f"{smi}\n", status=status)
        sourced = {"ASCEND_HOME_PATH": str(root / "ascend-toolkit" / "latest")} if cann else {}
        return probe({"PATH": str(path), **sourced, **environ}, dev, root)

    return make


def test_two_npus_are_listed_with_their_memory(host: Any) -> None:
    found = host()
    assert found.available
    assert [(d.name, d.memory) for d in found.devices] == [("910B3", 65536 * 2**20)] * 2
    assert found.problems == ()


def test_the_kit_finds_nothing_wrong_where_there_is_no_npu() -> None:
    report = check("hardware", "ascend", compute=False)
    skipped = {r.check for r in report.results if r.status == "skipped"}
    assert skipped <= {"hardware.hidden", "hardware.computes"}


SICK = A2.format(health="Alarm")
FAILED = "dcmi module initialize failed. ret is {}"
HOSTS: dict[str, tuple[dict[str, Any], int, str]] = {
    "no NPU": ({"files": (), "smi": None, "cann": False}, 0, ""),
    "CANN is not sourced": ({"cann": False}, 0, r"CANN is installed at .*set_env\.sh"),
    "a driver that is taken": ({"smi": FAILED.format("-8005"), "status": 1}, 0, "another container holds the device"),
    "a driver that is not there": ({"smi": FAILED.format("-8020"), "status": 1}, 0, "another container holds"),
    "no npu-smi": ({"smi": None}, 0, "npu-smi is not on PATH"),
    "no device files": ({"files": ()}, 0, "start the container with --device"),
    "no control devices": ({"files": DEVICES[:3]}, 0, r"devmm_svm is missing(.|\n)*hisi_hdc is missing"),
    "ids that do not ascend": ({"ASCEND_RT_VISIBLE_DEVICES": "1,0"}, 0, "use 0,1$"),
    "one of them": ({"ASCEND_RT_VISIBLE_DEVICES": "1"}, 1, ""),
    "an id that is not here": ({"ASCEND_RT_VISIBLE_DEVICES": "0,5"}, 0, "from 0 to 1"),
    "an id that is no number": ({"ASCEND_RT_VISIBLE_DEVICES": "npu0"}, 0, "something else than numbers"),
    "an unhealthy chip": ({"smi": SICK}, 0, "1: Alarm"),
    "an unhealthy chip that is hidden": ({"smi": SICK, "ASCEND_RT_VISIBLE_DEVICES": "0"}, 1, ""),
}
"""A host, how many NPUs can be used, and what its problems say ('' for none)."""


@pytest.mark.parametrize("name", HOSTS)
def test_what_is_wrong_with_a_host_is_said(host: Any, name: str) -> None:
    given, devices, problem = HOSTS[name]
    found = host(**given)
    assert (found.available, len(found.devices) if found.available else 0) == (devices > 0, devices)
    assert bool(found.problems) == bool(problem)
    assert re.search(problem, "\n".join(found.problems))


def test_devices_are_sorted_by_number(tmp_path: Any) -> None:
    for name in ("davinci10", "davinci2", "davinci_manager"):
        (tmp_path / name).touch()
    assert [f.rpartition("/")[2] for f in device_files(tmp_path)] == ["davinci2", "davinci10"]


def test_the_table_of_processes_is_no_device() -> None:
    assert len(parse_smi(GOOD)) == 2
    assert parse_smi("") == []


def test_the_version_of_cann_is_read(tmp_path: Any) -> None:
    assert cann_version(tmp_path) is None
    (tmp_path / "compiler").mkdir()
    (tmp_path / "compiler" / "version.info").write_text("Version=8.2.RC1\nversion_dir=8.2.RC1\n")
    assert cann_version(tmp_path) == "8.2.RC1"
