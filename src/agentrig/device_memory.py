"""Who holds what of a device's memory: this process, and all, by the words of a library that had too little."""

from __future__ import annotations

import os
import re
from pathlib import Path

HOST_PIDS = 0xEFFFFFFC
"""The inode of the host's own namespace of process ids (Linux's PROC_PID_INIT_INO): NVML counts by these ids."""

LIBRARIES = 3 << 29
"""Bytes that a process is taken to hold beside torch's where nothing counts them: CUDA itself, libraries, graphs."""

GONE = re.compile(
    r"(?:CUDA|NPU|HIP|XPU|MPS)(?: \w+)? ?(?:error)?:? ?out of memory|OutOfMemoryError|CUDA_ERROR_OUT_OF_MEMORY|"
    r"CUDA Error: out of memory",
    re.IGNORECASE,
)
"""What libraries say when a device, not the host, has no memory left."""

SIZE = r"([\d.]+) ?(bytes|[KMGT]i?B)"
ASKED = re.compile(rf"[Tt]ried to allocate {SIZE}")
TOTAL = re.compile(rf"total capacity of {SIZE}|{SIZE} total capacity")
FREE = re.compile(rf"of which {SIZE} is free|{SIZE} free")
OWN = re.compile(rf"this process has {SIZE} memory in use|{SIZE} reserved in total")

UNITS = {"b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def in_gib(size: float) -> str:
    """Return bytes as GiB or MiB."""
    return f"{size / (1 << 30):.1f} GiB" if size >= (1 << 30) / 10 else f"{size / (1 << 20):.1f} MiB"


def out_of_device_memory(error: BaseException | None) -> str:
    """Return what an error, or one of its causes, says about a device without memory; '' if it is about another matter.

    torch is not imported: its own class of such errors is known by its name.
    """
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        text = f"{type(error).__name__}: {error}"
        if GONE.search(text):
            return text
        error = error.__cause__ or error.__context__
    return ""


def shortage(text: str, owner: str = "this process") -> str:
    """Return what was asked for and who holds what, from torch's text of an error; else its first line."""
    asked, total, free, own = (_bytes(each.search(text)) for each in (ASKED, TOTAL, FREE, OWN))
    parts = [f"{in_gib(asked)} were asked for"] if asked is not None else []
    if total is not None and free is not None:
        held = f"of the device's {in_gib(total)}, {in_gib(free)} are free"
        if own is not None:
            held += f", {owner} holds {in_gib(own)}, and other processes hold {in_gib(max(total - free - own, 0))}"
        parts.append(held)
    line = next((line.strip() for line in text.splitlines() if GONE.search(line)), text.strip())
    return "; ".join(parts) or line[:300]


def give_memory_back(device: object) -> None:
    """Give an accelerator's memory that torch keeps for later back to it; nothing on a CPU."""
    import torch

    kind = torch.device(str(device)).type
    if kind != "cpu" and torch.get_device_module(kind).is_available():
        torch.get_device_module(kind).empty_cache()


def held_here(device: object) -> int | None:
    """Return the bytes of a device that this process holds; None for one that is no CUDA device.

    NVML counts them for each process, but not by the ids that a container has: there it is what torch holds and
    `LIBRARIES`, rather more than there is.
    """
    import torch

    place = torch.device(str(device))
    if place.type != "cuda":
        return None
    reserved = int(torch.cuda.memory_reserved(place))
    uuid = f"GPU-{torch.cuda.get_device_properties(place).uuid}"
    return max(reserved, counted_by_nvml(uuid) or reserved + LIBRARIES)


def counted_by_nvml(uuid: str) -> int | None:
    """Return the bytes of a device that NVML counts for this process; None where it can't tell."""
    try:
        if Path("/proc/self/ns/pid").stat().st_ino != HOST_PIDS:
            return None
        import pynvml  # type: ignore[import-untyped]
    except (OSError, ImportError):  # no Linux, or no such package
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        every = pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByUUID(uuid))
        own = (each.usedGpuMemory for each in every if each.pid == os.getpid())
        return next(own, None)
    except pynvml.NVMLError:  # a slice of a device, which has another name
        return None
    finally:
        pynvml.nvmlShutdown()


def _bytes(found: re.Match[str] | None) -> float | None:
    if found is None:
        return None
    number, unit = (part for part in found.groups() if part is not None)
    return float(number) * UNITS[unit[0].lower()]
