"""vllm-ascend's own patches, for the versions that need them imported by hand in every Ray worker."""

from __future__ import annotations

from importlib import import_module

NEEDED = ">=0.9.1,<0.10.0rc1"
"""vllm-ascend versions whose patches fix their torch 2.5 builds; later versions don't need them."""


def apply() -> None:
    """Import vllm-ascend's platform and worker patches; it does the patching in memory, at import.

    Raises:
        ImportError: vllm-ascend is not installed, or has no such patches. Ray fails the worker with it.
    """
    import_module("vllm_ascend.patch.platform")
    import_module("vllm_ascend.patch.worker")
