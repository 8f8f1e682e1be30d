"""The situation: everything that the checks of one recipe read."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from agentrig.findings import Finding
from agentrig.hardware import Hardware, Probe
from agentrig.hardware.tools import ToolOutput, ask

if TYPE_CHECKING:
    from agentrig.plan import Plan


TORCH_REPORT = """
import json, sys
import torch
name = sys.argv[1]
module = getattr(torch, name, None)
report = {
    "version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip, "device": name,
    "available": True if name == "cpu" else bool(module is not None and module.is_available()),
    "built": bool(torch.version.cuda or torch.version.hip) if name == "cuda" else module is not None,
}
report["count"] = module.device_count() if report["available"] and hasattr(module, "device_count") else 0
print(json.dumps(report))
"""


@attrs.frozen(kw_only=True, slots=False)
class Situation:
    """Implements `agentrig.findings.Situation`, which says what its fields mean.

    Attributes:
        asked: The arguments of `agentrig.plan.resolve` that gave the plan; None where nobody resolved one.
    """

    hardware: Hardware | None
    candidates: Sequence[Hardware] = ()
    probes: Mapping[str, Probe] = attrs.field(factory=dict)
    plan: Plan | None = None
    versions: Mapping[str, str] = attrs.field(factory=dict)
    environ: Mapping[str, str] = attrs.field(factory=lambda: dict(os.environ))
    directory: Path = Path("runs")
    asked: Mapping[str, Any] | None = attrs.field(default=None, repr=False)

    @property
    def algorithm(self) -> str | None:
        """The name of the recipe's algorithm."""
        return str(self.plan.components["algorithm"].spec.name) if self.plan else None

    def setting(self, kind: str, key: str, default: Any = None) -> Any:
        """Return a key of a component's checked config, or `default` where it has no such key."""
        config = self.plan.configs.get(kind) if self.plan else None
        return getattr(config, key, default)

    @cached_property
    def torch(self) -> ToolOutput:
        """What torch reports about the chosen device, from a subprocess (started once)."""
        return ask(TORCH_REPORT, self.hardware.torch_device if self.hardware else "cpu", environ=self.environ)

    def uses(self, name: str) -> bool:
        """Whether the run would use the hardware of that name."""
        return self.hardware is not None and self.hardware.name == name

    def failure(self, check: str, what: str, answer: ToolOutput, *, cure: str) -> Finding:
        """Return the problem for a failed answer, with the cure of a known symptom of any installed hardware."""
        symptoms = (s for h in self.candidates for s in h.symptoms)
        known = next((s for s in symptoms if re.search(s.pattern, answer.error)), None)
        evidence = f"{what}: {answer.reason}" + (f" ({known.cause})" if known else "")
        return Finding(check=check, result="problem", evidence=evidence, cure=known.cure if known else cure)
