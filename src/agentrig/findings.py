"""Findings: what a check of `agentrig doctor` looks at, and what it finds."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import attrs

from agentrig.errors import AgentrigError
from agentrig.hardware.contract import Hardware, Probe
from agentrig.hardware.tools import ToolOutput, ask

Result = Literal["ok", "warning", "problem", "skipped"]


@attrs.frozen(kw_only=True)
class Finding:
    """One line of the doctor's table.

    Attributes:
        check: What was checked, in a few words.
        result: `problem`: the recipe could not start, or would fail. `warning`: it can start, but
            may fail later. `skipped`: it could not be checked; `evidence` says why.
        evidence: What the check observed.
        cure: What to do; empty when there is nothing to do.
    """

    check: str
    result: Result
    evidence: str
    cure: str = ""

    @classmethod
    def ok(cls, check: str, evidence: str) -> Finding:
        """Return the finding that nothing is wrong."""
        return cls(check=check, result="ok", evidence=evidence)

    @classmethod
    def warning(cls, check: str, evidence: str, *, cure: str = "") -> Finding:
        """Return the finding that a run can start, and may fail later."""
        return cls(check=check, result="warning", evidence=evidence, cure=cure)

    @classmethod
    def problem(cls, check: str, evidence: str, *, cure: str = "") -> Finding:
        """Return the finding that a run could not start, or would fail."""
        return cls(check=check, result="problem", evidence=evidence, cure=cure)

    @classmethod
    def skipped(cls, check: str, evidence: str) -> Finding:
        """Return the finding that something could not be checked, and why."""
        return cls(check=check, result="skipped", evidence=evidence)

    @classmethod
    def of_error(cls, check: str, error: AgentrigError, *, cure: str = "") -> Finding:
        """Return the problem that an error states: its first line, and the others as the cure, or else `cure`."""
        first, _, rest = str(error).partition("\n")
        return cls.problem(check, first, cure=" ".join(rest.split()) or cure)


@attrs.frozen(kw_only=True)
class ModelHub:
    """Where an algorithm finds a model that is a name and no folder; `AlgorithmSpec.hub(environ)` returns it.

    Attributes:
        address: The URL that models are downloaded from.
        mirror: The environment variable that names another address.
        cached: Returns a model's folder on this machine, or None; imports nothing.
    """

    address: str
    mirror: str
    cached: Callable[[str], Path | None]


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
"""What a subprocess runs that says what torch can do with a device."""


@attrs.frozen(kw_only=True, slots=False)
class Situation:
    """What a check reads; it never changes it.

    Attributes:
        hardware: What the run would use; None when that could not be decided.
        candidates: Every hardware that is installed.
        probes: Name of a hardware to its probe.
        plan: The checked configuration, an `agentrig.plan.Plan`; None when it is wrong (a finding of its own).
        versions: Installed versions by distribution, and `python`.
        environ: The environment variables.
        directory: Where the run directory would be made.
        asked: The arguments of `agentrig.plan.resolve` that gave the plan; None where nobody resolved one.
    """

    hardware: Hardware | None
    candidates: Sequence[Hardware] = ()
    probes: Mapping[str, Probe] = attrs.field(factory=dict)
    plan: Any = None
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
        return Finding.problem(check, evidence, cure=known.cure if known else cure)


Check = Callable[[Situation], Iterable[Finding]]
"""One check: looks at a situation, returns its findings (none where it does not apply)."""
