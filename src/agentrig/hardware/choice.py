"""Which hardware a run uses: the explicit choice, else the only one available."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from agentrig.errors import nearest, place_of
from agentrig.hardware.contract import Hardware, HardwareError, Probe
from agentrig.text import words_of

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
        HardwareError: The name is unknown; the hardware is not available; it is broken (a broken accelerator
            never falls back to the CPU); its probe raised; or `auto` finds two. `auto` skips hardware whose
            probe raises, with a warning.
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
        HardwareError: The probe itself failed; the message names the file and line.
    """
    try:
        probe = hardware.probe()
    except Exception as error:
        raise HardwareError(
            f"the probe of hardware {hardware.name} raised {words_of(error)}{place_of(error)}\n"
            "  this is a bug in its plugin: report it to the author"
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
        way_out = f"\nFix it, or choose other hardware: --hardware {' or '.join(others)}" if others else ""
        raise HardwareError("\n".join(explain(h.name, p) for h, p in broken) + way_out)
    available = [h for h, p in probes if p.available]
    if len(available) > 1:
        devices = {h.name: p.devices for h, p in probes if p.available}
        counted = {name: f"{len(d)} x {d[0].name}" if d else "no device listed" for name, d in devices.items()}
        listed = "; ".join(f"{name}: {count}" for name, count in counted.items())
        raise HardwareError(
            f"more than one kind of hardware is there ({listed}). Say which: "
            + " or ".join(f"--hardware {h.name}" for h in available)
        )
    if available:
        return available[0]
    fallback = next((h for h in candidates if h.name == FALLBACK), None)
    if fallback is None:
        explained = "\n".join([*(explain(h.name, p) for h, p in probes), *failed])
        raise HardwareError(
            f"none of the hardware that this algorithm can run on is there.\n{explained}".rstrip()
            + "\nOn a CPU, train with grpo and a small model: agentrig run SCRIPT --algorithm grpo --model DIR\n"
            "  or agentrig train RECIPE algorithm.use=grpo algorithm.model=DIR"
        )
    return fallback


def explain(name: str, probe: Probe) -> str:
    """Say why hardware is not available: what is broken, or what was not found."""
    if probe.problems:
        return "\n".join([f"{name} is there but broken:", *(f"  {line}" for line in probe.problems)])
    return "\n".join([f"{name} was not found:", *(f"  {line}" for line in probe.evidence or ("nothing to see",))])
