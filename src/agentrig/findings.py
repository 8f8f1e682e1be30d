"""Findings: what a check of `agentrig doctor` looks at, and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import attrs

from agentrig.errors import AgentrigError
from agentrig.hardware.contract import Hardware, Probe
from agentrig.hardware.tools import ToolOutput

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
    def of_error(cls, check: str, error: AgentrigError, *, cure: str = "") -> Finding:
        """Return the problem that an error states: its first line, and the others as the cure, or else `cure`."""
        first, _, rest = str(error).partition("\n")
        return cls(check=check, result="problem", evidence=first, cure=" ".join(rest.split()) or cure)


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


class Situation(Protocol):
    """What a check reads; it never changes it."""

    @property
    def hardware(self) -> Hardware | None:
        """What the run would use; None when that could not be decided."""

    @property
    def candidates(self) -> Sequence[Hardware]:
        """Every hardware that is installed."""

    @property
    def probes(self) -> Mapping[str, Probe]:
        """Name of a hardware to its probe."""

    @property
    def plan(self) -> Any:
        """The checked configuration, an `agentrig.plan.Plan`; None when it is wrong (a finding of its own)."""

    @property
    def versions(self) -> Mapping[str, str]:
        """Installed versions by distribution, and `python`."""

    @property
    def environ(self) -> Mapping[str, str]:
        """The environment variables."""

    @property
    def directory(self) -> Path:
        """Where the run directory would be made."""

    @property
    def algorithm(self) -> str | None:
        """The name of the recipe's algorithm."""

    @property
    def torch(self) -> ToolOutput:
        """What torch reports about the chosen device, from a subprocess (started once)."""

    def setting(self, kind: str, key: str, default: Any = None) -> Any:
        """Return a key of a component's checked config, or `default` where it has no such key."""

    def uses(self, name: str) -> bool:
        """Whether the run would use the hardware of that name."""

    def failure(self, check: str, what: str, answer: ToolOutput, *, cure: str) -> Finding:
        """Return the problem for a failed answer, with the cure of a known symptom of any installed hardware."""


Check = Callable[[Situation], Iterable[Finding]]
"""One check: looks at a situation, returns its findings (none where it does not apply)."""
