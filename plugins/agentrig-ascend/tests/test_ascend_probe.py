import stat
from typing import Any

import pytest
from agentrig_ascend.probe import cann_version, device_files, parse_smi, probe

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
            tool = path / "npu-smi"
            tool.write_text(f"#!/bin/sh\n/bin/cat <<'END'\n{smi}\nEND\nexit {status}\n")
            tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
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


def test_a_host_without_npus_has_no_problem(host: Any) -> None:
    found = host(files=(), smi=None, cann=False)
    assert not found.available
    assert found.problems == ()


def test_cann_that_is_not_sourced_is_broken(host: Any) -> None:
    found = host(cann=False)
    assert not found.available
    assert "CANN is installed at" in found.problems[0]
    assert "set_env.sh" in found.problems[0]


@pytest.mark.parametrize("code", ["-8005", "-8020"])
def test_a_driver_that_cannot_be_reached_is_explained(host: Any, code: Any) -> None:
    found = host(smi=f"dcmi module initialize failed. ret is {code}", status=1)
    assert not found.available
    assert "another container holds the device" in found.problems[0]


def test_a_missing_npu_smi_is_explained(host: Any) -> None:
    found = host(smi=None)
    assert not found.available
    assert "npu-smi is not on PATH" in found.problems[0]


def test_missing_control_devices_are_named(host: Any) -> None:
    found = host(files=("davinci0", "davinci1", "davinci_manager"))
    assert [p.partition(" is missing")[0].rpartition("/")[2] for p in found.problems] == ["devmm_svm", "hisi_hdc"]


def test_ids_must_ascend(host: Any) -> None:
    found = host(ASCEND_RT_VISIBLE_DEVICES="1,0")
    assert not found.available
    assert found.problems[0].endswith("use 0,1")
    assert [d.name for d in host(ASCEND_RT_VISIBLE_DEVICES="1").devices] == ["910B3"]
    assert "from 0 to 1" in host(ASCEND_RT_VISIBLE_DEVICES="0,5").problems[0]
    assert "something else than numbers" in host(ASCEND_RT_VISIBLE_DEVICES="npu0").problems[0]


def test_an_unhealthy_chip_is_broken_unless_it_is_hidden(host: Any) -> None:
    sick = A2.format(health="Alarm")
    assert "1: Alarm" in host(smi=sick).problems[0]
    assert host(smi=sick, ASCEND_RT_VISIBLE_DEVICES="0").available


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
