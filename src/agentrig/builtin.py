"""What the core itself brings, through the same door as every plugin."""

from __future__ import annotations

from collections.abc import Iterable

from agentrig import HardwareSpec, hookimpl


@hookimpl
def register_hardware() -> Iterable[HardwareSpec]:
    """Bring `cpu`."""
    from agentrig.hardware import cpu_spec

    yield cpu_spec()
