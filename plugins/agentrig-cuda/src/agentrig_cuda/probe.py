"""Finds NVIDIA GPUs: device files, `nvidia-smi`, NVML, environment; never torch."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from pathlib import Path

import attrs

from agentrig.hardware import Device, Probe, ToolAnswer, run_tool

QUERY = ("--query-gpu=index,uuid,name,memory.total,driver_version", "--format=csv,noheader,nounits")
MIB = 2**20


@attrs.frozen(kw_only=True)
class Gpu:
    """One GPU, as `nvidia-smi` or NVML lists it."""

    index: int
    uuid: str
    name: str
    memory: int | None
    driver: str


def device_files(dev: Path = Path("/dev")) -> list[str]:
    """Return the GPUs' device files, without control files such as `nvidiactl` and `nvidia-uvm`."""
    return sorted(str(p) for p in dev.glob("nvidia*") if re.fullmatch(r"nvidia\d+", p.name))


def parse_smi(text: str) -> list[Gpu]:
    """Read the table that `nvidia-smi` prints for `QUERY`."""
    gpus = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(row) == 5 and row[0].strip().isdigit():
            index, uuid, name, memory, driver = (cell.strip() for cell in row)
            size = int(memory) * MIB if memory.isdigit() else None  # "[N/A]" where memory is unified
            gpus.append(Gpu(index=int(index), uuid=uuid, name=name, memory=size, driver=driver))
    return gpus


def ask_smi(environ: Mapping[str, str]) -> tuple[ToolAnswer, list[Gpu]]:
    """Return what `nvidia-smi` answered, and the GPUs that it lists."""
    answer = run_tool("nvidia-smi", *QUERY, environ=environ)
    return answer, parse_smi(answer.output) if answer.ok else []


def ask_nvml() -> tuple[list[Gpu], str]:
    """Return the GPUs that NVML lists, and a line of evidence."""
    try:
        import pynvml  # type: ignore[import-untyped]
    except ImportError:
        return [], "NVML not asked: nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return [], f"NVML: {error}"
    try:
        driver = str(pynvml.nvmlSystemGetDriverVersion())
        gpus = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            gpus.append(
                Gpu(
                    index=index,
                    uuid=str(pynvml.nvmlDeviceGetUUID(handle)),
                    name=str(pynvml.nvmlDeviceGetName(handle)),
                    memory=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
                    driver=driver,
                )
            )
        return gpus, f"NVML: {len(gpus)} GPU(s), driver {driver}"
    except pynvml.NVMLError as error:
        return [], f"NVML: {error}"
    finally:
        pynvml.nvmlShutdown()


def visible(gpus: list[Gpu], value: str | None) -> list[Gpu]:
    """Return the GPUs that `CUDA_VISIBLE_DEVICES` selects, in its order, as CUDA reads it.

    CUDA stops at the first entry that it does not know, so `0,9,1` on two GPUs shows only the first.
    """
    if value is None:
        return gpus
    seen = []
    for part in (p.strip() for p in value.split(",")):
        match = [g for g in gpus if part == str(g.index) or (part.startswith("GPU-") and g.uuid.startswith(part))]
        if part.startswith("MIG-"):
            # a slice of one of them; only the driver knows which, and it has less memory
            match = [attrs.evolve(g, memory=None) for g in gpus[:1]]
        if len(match) != 1:
            break
        seen += match
    return seen


def probe(environ: Mapping[str, str], dev: Path = Path("/dev")) -> Probe:
    """Look for NVIDIA GPUs.

    A host where nothing at all hints at one has no problem; one with device files or a driver that
    does not answer is broken.
    """
    files = device_files(dev)
    evidence = [f"device files: {', '.join(files) or 'no ' + str(dev / 'nvidia[0-9]*')}"]
    problems: list[str] = []
    smi, gpus = ask_smi(environ)
    evidence.append(f"nvidia-smi: {f'{len(gpus)} GPU(s)' if smi.ok else smi.why}")
    if not gpus and (files or smi.found):
        gpus, word = ask_nvml()
        evidence.append(word)
    if gpus:
        evidence.append(f"driver {gpus[0].driver}")
    elif files:
        problems.append(
            "NVIDIA device files are here, and neither nvidia-smi nor NVML answers: start the container with the "
            "NVIDIA runtime (--gpus all), or install the driver that belongs to the kernel module"
        )
    elif smi.found and not smi.ok:
        problems.append(f"nvidia-smi is here and fails ({smi.why}): load the kernel module, or reinstall the driver")
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    shown = visible(gpus, chosen)
    if chosen is not None:
        evidence.append(f"CUDA_VISIBLE_DEVICES={chosen} shows {len(shown)} of {len(gpus)}")
        if "MIG-" in chosen and shown:
            evidence.append("the memory of a MIG slice is known to the driver only")
        asked = [p for p in chosen.split(",") if p.strip() not in ("", "-1", "NoDevFiles")]
        if gpus and asked and len(shown) < len(asked):
            problems.append(
                f"CUDA_VISIBLE_DEVICES={chosen} names a GPU that is not here: "
                f"use ids from 0 to {len(gpus) - 1}, or unset it"
            )
    devices = tuple(Device(name=g.name, memory=g.memory) for g in shown)
    return Probe(available=bool(devices), devices=devices, evidence=tuple(evidence), problems=tuple(problems))
