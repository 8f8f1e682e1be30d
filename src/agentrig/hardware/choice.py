"""Which hardware a run uses: the explicit choice, else the single one that is there."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from agentrig.errors import nearest, place_of
from agentrig.hardware.contract import Hardware, HardwareError, Probe

log = logging.getLogger(__name__)

FALLBACK = "cpu"
"""Chosen by `auto` only when nothing else is there."""


def select(requested: str, candidates: Sequence[Hardware]) -> Hardware:
    """Return the hardware to use.

    Args:
        requested: A name, or `auto` for the single available accelerator, and `cpu` when there is
            no accelerator at all.
        candidates: What is installed (and what the algorithm can run on).

    Raises:
        HardwareError: No such name; it is not there; it is broken (a broken accelerator is never
            quietly replaced by the CPU); its probe raised; or `auto` finds two and asks which. `auto` leaves out, with
            a warning, hardware whose probe raises: nobody named it, and it says nothing of a device.
    """
    names = [h.name for h in candidates]
    if requested != "auto":
        chosen = next((h for h in candidates if h.name == requested), None)
        if chosen is None:
            raise HardwareError(
                f'there is no hardware called "{requested}" to choose.{nearest(requested, names)}\n'
                f"  hardware: {', '.join(names) or 'none'}; others come with a plugin (agentrig plugins lists them)"
            )
        probe = probed(chosen)
        if not probe.available:
            raise HardwareError(
                f"{explain(requested, probe)}\n  look closer with: agentrig doctor --hardware {requested}"
            )
        return chosen
    return _auto(candidates)


def probed(hardware: Hardware) -> Probe:
    """Return what a hardware's probe finds.

    Raises:
        HardwareError: The probe itself failed, which says nothing of the device; the message names the file and line.
    """
    try:
        probe = hardware.probe()
    except Exception as error:
        raise HardwareError(
            f"the probe of hardware {hardware.name} raised {type(error).__name__}: {error}{place_of(error)}\n"
            "  that is a fault of its plugin: report it to whoever wrote it"
        ) from error
    if not isinstance(probe, Probe):
        raise HardwareError(
            f"the probe of hardware {hardware.name} returned {probe!r:.80}; it must return an agentrig.hardware.Probe"
        )
    return probe


def _auto(candidates: Sequence[Hardware]) -> Hardware:
    probes, failed = [], []
    for hardware in candidates:
        if hardware.name == FALLBACK:
            continue
        try:
            probes.append((hardware, probed(hardware)))
        except HardwareError as error:
            failed.append(str(error))
            log.warning("hardware %s is left out: %s", hardware.name, str(error).partition("\n")[0])
    broken = [(h, p) for h, p in probes if p.problems and not p.available]
    if broken:
        others = [h.name for h, p in probes if p.available] + [h.name for h in candidates if h.name == FALLBACK]
        way_out = f"\nMend it, or say what to use instead: --hardware {' or '.join(others)}" if others else ""
        raise HardwareError("\n".join(explain(h.name, p) for h, p in broken) + way_out)
    available = [h for h, p in probes if p.available]
    if len(available) > 1:
        listed = "; ".join(f"{h.name}: {_devices(p)}" for h, p in probes if p.available)
        raise HardwareError(
            f"more than one kind of hardware is there ({listed}). Say which: "
            + " or ".join(f"--hardware {h.name}" for h in available)
        )
    if available:
        return available[0]
    fallback = next((h for h in candidates if h.name == FALLBACK), None)
    if fallback is None:
        looked = "\n".join([*(explain(h.name, p) for h, p in probes), *failed])
        raise HardwareError(f"none of the hardware that this algorithm can run on is there.\n{looked}".rstrip())
    return fallback


def _devices(probe: Probe) -> str:
    return f"{len(probe.devices)} x {probe.devices[0].name}" if probe.devices else "no device listed"


def explain(name: str, probe: Probe) -> str:
    """Say why a probe is not available: what is broken, or what was looked for in vain."""
    if probe.problems:
        return "\n".join([f"{name} is there but broken:", *(f"  {line}" for line in probe.problems)])
    return "\n".join([f"{name} was not found:", *(f"  {line}" for line in probe.evidence or ("nothing to see",))])
