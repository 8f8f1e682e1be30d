"""The checks of hardware: what a run and `agentrig doctor` rely on, on a machine with the device and on one without."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import attrs

from agentrig.errors import AgentrigError
from agentrig.findings import Finding
from agentrig.hardware import Cpu, Hardware, HardwareError, Stack, installed, select
from agentrig.hardware.tools import ask
from agentrig.testing.checks import CheckFailed, CheckSkipped, Report
from agentrig.testing.hardware_look import CODE, ROLES, look
from agentrig.testing.table import Bench, Table

LEAST_MEMORY, MOST_MEMORY = 64 << 20, 64 << 40
"""Bytes that one device may have, 64 MiB to 64 TiB: a figure in MiB or GiB is far below, one in bits is above."""

PROBE_S = 20.0
"""Longest time that a probe may take: every command that resolves `auto` waits for it."""

KNOWN_DTYPES = ("float32", "bfloat16", "float16", "float64")
RESULTS = ("ok", "warning", "problem", "skipped")


@attrs.define(kw_only=True, eq=False, slots=False)
class HardwareBench(Bench):
    """What the checks of hardware share.

    Attributes:
        compute: Whether to import torch in a fresh process and compute on the device, if it is there.
    """

    compute: bool = True

    def fresh(self, **environment: str) -> dict[str, Any] | None:
        """Return what a fresh interpreter saw, with these variables set; None if the subject has no name to load."""
        subject, component = self.subject, self.subject.component
        if component is None or component.plugin == "given":
            return None
        if subject.settings is not None and not isinstance(subject.settings, dict):
            raise CheckSkipped("a fresh interpreter takes settings as a dict of keys")
        others = [p.name for p in subject.registry.plugins if p.name not in (component.plugin, "core")]
        asked = {
            "name": component.spec.name,
            "block": others,
            "files": [str(subject.file)] if subject.file else [],
            "settings": subject.settings or {},
            "compute": self.compute and not environment,
        }
        answer = ask(CODE, json.dumps(asked), environ={**os.environ, **environment})
        if not answer.ok:
            raise CheckFailed(f"a fresh interpreter that loads, builds and probes it fails: {answer.reason}")
        return dict(answer.data)

    @cached_property
    def alone(self) -> dict[str, Any] | None:
        """What a fresh interpreter saw, with this process's environment."""
        return self.fresh()

    @cached_property
    def seen(self) -> dict[str, Any]:
        """What its methods return, from a fresh interpreter if there can be one."""
        return self.alone or look(self.made)

    def needs_fresh(self) -> dict[str, Any]:
        """Return what a fresh interpreter saw.

        Raises:
            CheckSkipped: There is none.
        """
        if self.alone is None:
            raise CheckSkipped("give its name or FILE.py:NAME: what it imports is seen in a fresh interpreter")
        return self.alone


TABLE = Table("hardware", HardwareBench)


@TABLE.check(
    "imports-light",
    why="Every command would wait for these imports, also for runs on other hardware.",
    cure="Import them inside the functions that need them.",
)
def imports_light(bench: HardwareBench) -> None:
    """Loading the plugin and building the hardware imports nothing heavy."""
    found = bench.needs_fresh()["built"]
    if found:
        raise CheckFailed(f"loading the plugin and building the hardware imports {', '.join(found)}")


@TABLE.check(
    "declares",
    why="A run compares these names: a wrong one gives the wrong device, or none.",
    cure="Give `name` the spec's name, and the other fields the values that agentrig.hardware.Hardware describes.",
)
def declares(bench: HardwareBench) -> None:
    """Its fields have the values that the contract allows."""
    made, spec = bench.made, bench.subject.spec
    if not isinstance(made, Hardware):
        raise CheckFailed(f"it is a {type(made).__name__}: derive it from agentrig.hardware.Hardware")
    wrong = []
    if spec is not None and made.name != spec.name:
        wrong.append(f'its name is "{made.name}", and its spec\'s "{spec.name}"')
    if not made.torch_device or ":" in made.torch_device:
        wrong.append(f'torch_device is "{made.torch_device}": the type without a number, such as cuda')
    wrong += [f'dtypes has "{d}"' for d in made.dtypes if d not in KNOWN_DTYPES] or []
    wrong += ["dtypes is empty"] * (not made.dtypes) + ["attention is empty"] * (not made.attention)
    if made.visible_order not in ("any", "ascending"):
        wrong.append(f'visible_order is "{made.visible_order}"')
    if wrong:
        raise CheckFailed("; ".join(wrong))


@TABLE.check(
    "environment",
    why="A run sets these variables before torch is imported; a value that is no text ends it.",
    cure="Return a mapping of text to text, the same at each call, for any context and for none.",
)
def environment(bench: HardwareBench) -> None:
    """`environment` returns variables for every role, and changes nothing itself."""
    for role in ROLES:
        found = bench.seen[f"environment {role}".strip()]
        wrong = found.get("raised") or found.get("wrong")
        if wrong:
            raise CheckFailed(f"`environment` for {role or 'no context'}: {wrong}")
    if bench.seen["changed"]:
        names = ", ".join(bench.seen["changed"])
        raise CheckFailed(
            f"`environment` changes os.environ itself: {names}",
            "Return the variables: the run sets them where the user has not.",
        )


@TABLE.check(
    "environment-light",
    why="torch reads variables such as thread counts when it is imported: set later, they have no effect.",
    cure="Compute the variables without torch; import nothing heavy in `environment`.",
)
def environment_light(bench: HardwareBench) -> None:
    """`environment` imports nothing heavy."""
    imported = bench.needs_fresh()["imported"]
    found = sorted({m for role in ROLES for m in imported[f"environment {role}".strip()]})
    if found:
        raise CheckFailed(f"`environment` imports {', '.join(found)}")


@TABLE.check(
    "probe",
    why="`--hardware auto` and the doctor decide by it; one that raises or changes leaves the hardware out.",
    cure="Return an agentrig.hardware.Probe: catch what drivers and tools raise, and say it in `problems`.",
)
def probe(bench: HardwareBench) -> None:
    """`probe` returns a typed answer, twice the same, in time."""
    first, again = bench.seen["probe"], bench.seen["probe again"]
    for found in (first, again):
        if "raised" in found:
            raise CheckFailed(f"`probe` raised {found['raised']}")
        if "wrong" in found:
            raise CheckFailed(f"`probe` returned {found['wrong']}")
    if not isinstance(first["available"], bool):
        raise CheckFailed(f"available is {first['available']}, which is neither True nor False")
    if first["available"] and not first["devices"]:
        raise CheckFailed("it is available, and `devices` is empty", "List the devices that a run may use.")
    if first != again:
        raise CheckFailed(f"two probes in a row found different things: {first} and {again}")
    slow = bench.seen["seconds"]["probe"]
    if slow > PROBE_S:
        raise CheckFailed(f"`probe` took {slow:.0f} s", f"Give every tool a timeout: at most {PROBE_S:.0f} s in all.")


@TABLE.check(
    "probe-light",
    why="`agentrig plugins` and every run with --hardware auto would import it, whatever hardware they use.",
    cure="Look at device files, the vendor's tool and metadata; never import torch in `probe`.",
    needs=("probe",),
)
def probe_light(bench: HardwareBench) -> None:
    """`probe` imports nothing heavy."""
    imported = bench.needs_fresh()["imported"]
    found = sorted({*imported["probe"], *imported["probe again"]})
    if found:
        raise CheckFailed(f"`probe` imports {', '.join(found)}")


@TABLE.check(
    "hidden",
    why="A run would take devices that the user, or the cluster, has given to somebody else.",
    cure="List only the devices that the variable shows; with an empty one there is none.",
    needs=("probe",),
)
def hidden(bench: HardwareBench) -> None:
    """With an empty `visible_devices` variable no device is there."""
    variable = bench.made.visible_devices
    if not variable:
        raise CheckSkipped("it names no variable that hides its devices (visible_devices)")
    if not bench.seen["probe"]["available"]:
        raise CheckSkipped("it is not available here, so there is nothing to hide")
    found = bench.fresh(**{variable: ""})
    if found is None:
        raise CheckSkipped("give its name or FILE.py:NAME: it is probed again in a fresh interpreter")
    devices = found["probe"].get("devices", ())
    if found["probe"].get("available") or devices:
        raise CheckFailed(f'with {variable}="" it is still available, with {len(devices)} devices')


@TABLE.check(
    "explains",
    why="The user gets this text when the hardware is not there; without words nobody knows what to repair.",
    cure="Put what was looked at into `evidence`, and what is broken into `problems` as `what: cure`.",
    needs=("probe", "declares"),
)
def explains(bench: HardwareBench) -> None:
    """Hardware that is not available is refused with a message."""
    found = bench.seen["probe"]
    bare = [line for line in found["problems"] if ":" not in line.strip(" :") or not line.rpartition(":")[2].strip()]
    if bare:
        raise CheckFailed(f"a problem has no cure: {bare[0]!r}")
    if not any(line.strip() for line in (*found["evidence"], *found["problems"])):
        raise CheckFailed("`evidence` and `problems` are empty: nobody learns what was looked at")
    if found["available"]:
        return
    try:
        select(bench.made.name, [bench.made])
    except HardwareError as error:
        if bench.made.name not in str(error):
            raise CheckFailed(f"the refusal does not name it: {error}") from None
        return
    raise CheckFailed("a run would start on it although its probe found nothing in a fresh interpreter")


@TABLE.check(
    "memory",
    why="The doctor and the learner compute from it what fits; a wrong unit refuses every model, or none.",
    cure="Give each device its memory in bytes, or None if it is unknown.",
    needs=("probe",),
)
def memory(bench: HardwareBench) -> None:
    """The memory of devices is in bytes."""
    devices = bench.seen["probe"]["devices"]
    stated = [d for d in devices if d["memory"] is not None]
    for device in stated:
        size = device["memory"]
        if not isinstance(size, int) or not LEAST_MEMORY <= size <= MOST_MEMORY:
            raise CheckFailed(f"{device['name']} states a memory of {size}; a device has 64 MiB to 64 TiB, in bytes")
    if not stated:
        raise CheckSkipped("no device that was found states its memory")


@TABLE.check(
    "stacks",
    why="The doctor tells by them which versions work together, and verl gets the overrides.",
    cure="Name distributions with PEP 440 specifiers, and say where the set was tested.",
)
def stacks(bench: HardwareBench) -> None:
    """Its stacks and overrides can be read and compared."""
    made, versions = bench.made, installed(("torch", "verl", "vllm", "transformers"))
    for stack in made.stacks():
        if not isinstance(stack, Stack):
            raise CheckFailed(f"`stacks` returns {stack!r:.80}, which is no agentrig.hardware.Stack")
        try:
            stack.mismatches(versions)
        except Exception as error:
            raise CheckFailed(f'the stack "{stack.name}": {type(error).__name__}: {error}') from error
    for override in made.overrides(versions):
        override.hydra()
    setup = made.worker_setup(versions)
    if setup is not None and ":" not in setup:
        raise CheckFailed(f'worker_setup is "{setup}"; it must be "package:function"')


@TABLE.check(
    "doctor",
    why="The doctor of every run calls its checks: one that raises is reported as a problem of this plugin.",
    cure="Return agentrig.findings.Finding objects: evidence always, a cure for each problem and warning.",
    needs=("declares", "probe"),
)
def doctor(bench: HardwareBench) -> None:
    """Its own checks run and return findings, for a run that uses it and for one that does not."""
    from agentrig.doctor import Situation

    spec = bench.subject.spec
    if spec is None or not spec.checks:
        raise CheckSkipped("its spec brings no checks for the doctor")
    for used in (bench.made, Cpu(), None):
        versions = installed(("torch", "vllm", "transformers", "torch_npu", "vllm-ascend", "flash-attn"))
        situation = Situation(hardware=used, candidates=[bench.made], versions=versions)
        for check in spec.checks:
            where = f"{getattr(check, '__name__', check)} in a run on {used.name if used else 'unknown hardware'}"
            try:
                findings = list(check(situation))
            except AgentrigError:
                raise
            except Exception as error:
                raise CheckFailed(f"{where} raised {type(error).__name__}: {error}") from error
            for finding in findings:
                _check_finding(finding, where)


def _check_finding(finding: Any, where: str) -> None:
    if not isinstance(finding, Finding):
        raise CheckFailed(f"{where} returned {finding!r:.80}, which is no Finding")
    if finding.result not in RESULTS or not finding.check or not finding.evidence:
        raise CheckFailed(f"{where} returned {finding}: result is one of {', '.join(RESULTS)}, with evidence")
    if finding.result in ("problem", "warning") and not finding.cure:
        raise CheckFailed(f"{where} found a {finding.result} and names no cure: {finding.evidence}")


@TABLE.check(
    "computes",
    why="A probe that says yes on a device that torch cannot use lets every run start and fail.",
    cure="Say in `problems` what is missing (driver, torch build), or correct torch_device.",
    needs=("probe", "environment"),
)
def computes(bench: HardwareBench) -> None:
    """If the probe says that it is available, torch computes on it, in the environment that it asks for."""
    if not bench.compute:
        raise CheckSkipped("compute=False")
    found = bench.needs_fresh()
    if not found["probe"]["available"]:
        raise CheckSkipped("it is not available here")
    if found["compute"] == "no torch":
        raise CheckSkipped("torch is not installed")
    if found["compute"]:
        raise CheckFailed(found["compute"])


def check_hardware(
    subject: Any, *, settings: Any = None, only: Sequence[str] | None = None, raise_failed: bool = True, **options: Any
) -> Report:
    """Run the checks of hardware; see `agentrig.testing.check`. Its one option: `compute=False` imports no torch."""
    return TABLE.check_all(subject, settings, only, raise_failed, options)
