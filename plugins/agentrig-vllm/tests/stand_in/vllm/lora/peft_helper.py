"""vLLM's settings of an adapter."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class PEFTHelper:
    r: int
    lora_alpha: int
    target_modules: list[str]
