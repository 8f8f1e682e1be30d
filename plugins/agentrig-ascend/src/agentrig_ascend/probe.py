"""Finds Ascend NPUs: device files, `npu-smi`, CANN, environment; never torch or torch_npu."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import attrs

from agentrig.hardware import Device, Probe, run_tool

MIB = 2**20
BUS = re.compile(r"[0-9A-Fa-f]{4}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d")

SET_ENV = "source /usr/local/Ascend/ascend-toolkit/set_env.sh (and nnal/atb/set_env.sh)"


@attrs.frozen(kw_only=True)
class Npu:
    """One chip, as `npu-smi info` lists it."""

    name: str
    health: str
    memory: int | None


def device_files(dev: Path = Path("/dev")) -> list[str]:
    """Return the NPUs' device files in the order of their numbers; `davinci_manager` is none."""
    numbered = [(int(m[1]), p) for p in dev.glob("davinci*") if (m := re.fullmatch(r"davinci(\d+)", p.name))]
    return [str(path) for _, path in sorted(numbered)]


def parse_smi(text: str) -> list[Npu]:
    """Read the table of `npu-smi info`.

    Each chip has two rows: number, name and health; then its bus address, and memory as `used / total`
    in MiB in the last column (HBM). The table of processes below has no bus addresses.
    """
    npus: list[Npu] = []
    name = health = ""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) != 3:
            continue
        if BUS.search(cells[1]):
            pairs = re.findall(r"(\d+)\s*/\s*(\d+)", cells[2])
            memory = int(pairs[-1][1]) * MIB if pairs and int(pairs[-1][1]) else None
            npus.append(Npu(name=name, health=health, memory=memory))
        elif (words := cells[0].split()) and words[0].isdigit():
            name, health = " ".join(words[1:]), cells[1]
    return npus


def cann_home(environ: Mapping[str, str]) -> Path | None:
    """Return the sourced CANN toolkit's folder; None when none is sourced."""
    home = environ.get("ASCEND_HOME_PATH") or environ.get("ASCEND_TOOLKIT_HOME")
    return Path(home) if home else None


def cann_version(home: Path) -> str | None:
    """Return CANN's version from the files that its installer leaves, or None."""
    for pattern in ("compiler/version.info", "runtime/version.info", "*/ascend_toolkit_install.info", "version.cfg"):
        for file in sorted(home.glob(pattern)):
            match = re.search(r"(?im)^\s*version\s*=\s*([\w.\-]+)", file.read_text("utf-8", errors="replace"))
            if match:
                return match[1]
    return None


def driver_version(root: Path = Path("/usr/local/Ascend")) -> str | None:
    """Return the driver's version from its `version.info`, or None."""
    try:
        text = (root / "driver" / "version.info").read_text("utf-8", errors="replace")
    except OSError:
        return None
    match = re.search(r"(?im)^\s*version\s*=\s*([\w.\-]+)", text)
    return match[1] if match else None


def smi_problem(why: str) -> str:
    """Say what a failing `npu-smi` means."""
    if "-8020" in why or "-8005" in why:
        return (
            f"npu-smi fails ({why}), so the driver cannot be reached: another container holds the device, or the "
            "driver is not mounted; give each container its own /dev/davinciN and mount /usr/local/dcmi and "
            "/usr/local/Ascend/driver"
        )
    return f"npu-smi fails ({why}): mount /usr/local/Ascend/driver and /usr/local/dcmi, or reinstall the driver"


def probe(environ: Mapping[str, str], dev: Path = Path("/dev"), root: Path = Path("/usr/local/Ascend")) -> Probe:
    """Look for Ascend NPUs. A host with neither device files nor `npu-smi` has none, and no problem."""
    files = device_files(dev)
    smi = run_tool("npu-smi", "info", environ=environ)
    npus = parse_smi(smi.output) if smi.ok else []
    home = cann_home(environ)
    evidence = [
        f"device files: {', '.join(files) or 'no ' + str(dev / 'davinci[0-9]*')}",
        f"npu-smi: {f'{len(npus)} chip(s)' if smi.ok else smi.why}",
        f"ASCEND_HOME_PATH: {home or 'not set'}",
    ]
    if not files and not smi.found:
        return Probe(available=False, evidence=tuple(evidence))
    problems = []
    if not smi.found:
        problems.append(
            "NPU device files are here, and npu-smi is not on PATH: mount /usr/local/sbin/npu-smi, /usr/local/dcmi "
            "and /usr/local/Ascend/driver into the container"
        )
    elif not smi.ok:
        problems.append(smi_problem(smi.why))
    if not files:
        problems.append(
            f"npu-smi is here, and no {dev}/davinci[0-9]*: start the container with --device {dev}/davinci0 and its "
            "like, davinci_manager, devmm_svm and hisi_hdc"
        )
    missing = [dev / f for f in ("davinci_manager", "devmm_svm", "hisi_hdc") if files and not (dev / f).exists()]
    problems += [f"{file} is missing: start the container with --device {file}" for file in missing]
    if home is None:
        where = f"CANN is installed at {root}" if (root / "ascend-toolkit").exists() else "CANN is not to be found"
        problems.append(f"{where}, and its environment is not set: {SET_ENV}")
    elif not home.is_dir():
        problems.append(f"ASCEND_HOME_PATH={home} does not exist: {SET_ENV}")
    chips = npus or [Npu(name="Ascend NPU", health="unknown", memory=None) for _ in files]
    ids, trouble = visible(len(chips), environ.get("ASCEND_RT_VISIBLE_DEVICES"))
    problems += trouble
    sick = [f"{i}: {chips[i].health}" for i in ids if chips[i].health not in ("OK", "Warning", "unknown")]
    if sick:
        problems.append(
            f"npu-smi calls chips unhealthy ({'; '.join(sick)}): see npu-smi info -t health -i ID, or leave them out "
            "of ASCEND_RT_VISIBLE_DEVICES"
        )
    return Probe(
        available=bool(ids) and not problems,
        devices=tuple(Device(name=chips[i].name, memory=chips[i].memory) for i in ids),
        evidence=tuple(evidence),
        problems=tuple(problems),
    )


def visible(count: int, value: str | None) -> tuple[list[int], list[str]]:
    """Return the ids, of `count`, that `ASCEND_RT_VISIBLE_DEVICES` selects, and what is wrong with its value."""
    if value is None:
        return list(range(count)), []
    setting = f"ASCEND_RT_VISIBLE_DEVICES={value}"
    parts = [p.strip() for p in value.split(",") if p.strip()]
    if not all(p.isdigit() for p in parts):
        return [], [f"{setting} has something else than numbers: use ids such as 0,1"]
    ids = [int(p) for p in parts]
    if ids != sorted(set(ids)):
        ascending = ",".join(str(i) for i in sorted(set(ids)))
        return [], [f"{setting} does not ascend, and the runtime then finds no device: use {ascending}"]
    if ids and ids[-1] >= count:
        return [], [f"{setting} names an NPU that is not here: use ids from 0 to {count - 1}"]
    return ids, []
