"""Hardware: what an algorithm runs on. `cpu` lives here; others are plugins (docs/hardware.md)."""

from agentrig.hardware.choice import select
from agentrig.hardware.contract import Context, Device, Hardware, HardwareError, Probe, Symptom
from agentrig.hardware.cpu import Cpu, CpuConfig, cpu_spec, host_memory, usable_cores
from agentrig.hardware.tools import ToolAnswer, run_tool
from agentrig.hardware.versions import Override, Stack, apply_overrides, installed
from agentrig.hardware.workers import ray_environment

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
    "cpu_spec",
    "host_memory",
    "installed",
    "ray_environment",
    "run_tool",
    "select",
    "usable_cores",
]
