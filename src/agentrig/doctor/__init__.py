"""The doctor: finds what is wrong before a run does (docs/hardware.md has the known failures)."""

from agentrig.doctor.command import could_start, doctor, examine
from agentrig.doctor.findings import Check, Finding, Result, Situation
from agentrig.doctor.subprocesses import Answer, ask

__all__ = ["Answer", "Check", "Finding", "Result", "Situation", "ask", "could_start", "doctor", "examine"]
