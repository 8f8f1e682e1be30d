"""Hardware: what an algorithm runs on. `cpu` lives here; others are plugins (docs/hardware.md)."""

from agentrig.hardware.choice import select
from agentrig.hardware.contract import Context, Device, Hardware, HardwareError, Probe, Symptom
from agentrig.hardware.cpu import Cpu, CpuConfig, host_memory, usable_cores
from agentrig.hardware.tools import ToolAnswer, run_tool
from agentrig.hardware.versions import Override, Stack, apply_overrides, installed

__all__ = [
    "Context",
    "Cpu",
    "CpuConfig",
    "Device",
    "Hardware",
    "HardwareError",
    "Override",
    "Probe",
    "Stack",
    "Symptom",
    "ToolAnswer",
    "apply_overrides",
    "host_memory",
    "installed",
    "run_tool",
    "select",
    "usable_cores",
]
