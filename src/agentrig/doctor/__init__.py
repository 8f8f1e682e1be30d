"""The doctor: finds what is wrong before a run does (docs/hardware.md has the known failures)."""

from agentrig.doctor.examination import could_start, examine
from agentrig.findings import Situation

__all__ = ["Situation", "could_start", "examine"]
