"""The checks of hardware: what a run and `agentrig doctor` rely on, on a machine with the device and on one without."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Literal, TypeVar, get_args

import attrs

from agentrig.errors import AgentrigError
from agentrig.findings import Finding
from agentrig.findings import Result as FindingResult
from agentrig.hardware import Context, Cpu, Hardware, HardwareError, Probe, Stack, installed, select
from agentrig.testing.elsewhere import elsewhere
from agentrig.testing.kit import needs
from agentrig.testing.subject import CheckFailed, CheckSkipped, Subject, refuse

HEAVY = ("torch", "transformers", "tensorflow", "jax", "ray", "verl", "vllm", "agentlightning", "litellm", "torch_npu")
"""Modules that take seconds to import, or open a device."""

ROLES: tuple[Literal["", "driver", "worker", "rollout"], ...] = ("", "driver", "worker", "rollout")
"""The processes that an environment is asked for; '' for no context at all."""

R = TypeVar("R")

LEAST_MEMORY, MOST_MEMORY = 64 << 20, 64 << 40
"""Bytes that one device may have, 64 MiB to 64 TiB: a figure in MiB or GiB is far below, one in bits is above."""

PROBE_S = 20.0
"""Longest time that a probe may take: every command that resolves `auto` waits for it."""

KNOWN_DTYPES = ("float32", "bfloat16", "float16", "float64")


@attrs.define(kw_only=True, eq=False, slots=False)
class HardwareSubject(Subject):
    """Hardware; its methods are called in fresh interpreters, if it has a name to load it by.

    Attributes:
        compute: Whether to import torch in a fresh process and compute on the device, if it is there.
    """

    compute: bool = True

    def fresh(self, function: Callable[[HardwareSubject], R], **environment: str) -> R:
        """Call a function in a fresh interpreter, with these variables set.

        Raises:
            CheckSkipped: The hardware has no name to load it by.
        """
        if not self.registered:
            raise CheckSkipped("give its name or FILE.py:NAME: what it imports is seen in a fresh interpreter")
        return elsewhere(function, self.sendable(), environment={**self.blocking, **environment})

    def called(self, function: Callable[[HardwareSubject], R]) -> R:
        """Call a function in a fresh interpreter, or here if the hardware has no name to load it by."""
        return self.fresh(function) if self.registered else function(self)

    @cached_property
    def probes(self) -> tuple[Any, Any, float]:
        """What two probes in a row return, and the seconds of the first."""
        return self.called(probes)

    @property
    def probe(self) -> Probe:
        """The first probe, which the check `probe` has examined."""
        found: Probe = self.probes[0]
        return found


def imports(subject: HardwareSubject) -> dict[str, list[str]]:
    """Build the hardware and call its methods; return the heavy modules that each step imports."""
    known, found = set(HEAVY) & sys.modules.keys(), {}

    def step(name: str) -> None:
        found[name] = [module for module in HEAVY if module in sys.modules and module not in known]
        known.update(found[name])

    made = subject.made
    step("loading the plugin and building the hardware")
    with contextlib.suppress(Exception):  # another check's matter
        environments(subject)
    step("`environment`")
    with contextlib.suppress(Exception):
        made.probe()
    step("`probe`")
    return found


def environments(subject: HardwareSubject) -> dict[str, Any]:
    """Return the environment of each role, and of no context (''); fail if a call changes `os.environ`."""
    kept = dict(os.environ)
    found: dict[str, Any] = {role: subject.made.environment(Context(role=role) if role else None) for role in ROLES}
    changed = sorted(k for k in {*kept, *os.environ} if kept.get(k) != os.environ.get(k))
    if changed:
        raise CheckFailed(
            f"`environment` changes os.environ itself: {', '.join(changed)}",
            "Return the variables: the run sets them where the user has not.",
        )
    return found


def probes(subject: HardwareSubject) -> tuple[Any, Any, float]:
    """Probe twice; return what was found, and the seconds of the first."""
    start = time.perf_counter()
    first = subject.made.probe()
    seconds = time.perf_counter() - start
    return first, subject.made.probe(), seconds


def computed(subject: HardwareSubject) -> str:
    """Set the environment, import torch, and compute on the device; return what is wrong, or ''."""
    device = subject.made.torch_device
    for name, value in subject.made.environment().items():
        os.environ.setdefault(name, value)
    try:
        import torch
    except ImportError:
        raise CheckSkipped("torch is not installed") from None
    try:
        found = (torch.ones(2, 2, device=device) @ torch.ones(2, 2, device=device)).sum()
        return "" if float(found) == 8.0 else f"a sum of products on {device} is {float(found)}, not 8.0"
    except Exception as error:
        return f'torch cannot compute on the device "{device}": {type(error).__name__}: {error}'


def check_imports_light(subject: HardwareSubject) -> None:
    """Loading the plugin, building the hardware, `environment` and `probe` import nothing heavy.

    Why: Every command would wait for these imports, whatever hardware it uses, and torch reads variables such as
        thread counts when it is imported: set later, they have no effect.
    Cure: Look at device files, the vendor's tool and metadata; import torch and the like only inside the functions
        that compute.
    """
    for step, heavy in subject.fresh(imports).items():
        if heavy:
            raise CheckFailed(f"{step} imports {', '.join(heavy)}")


def check_declares(subject: HardwareSubject) -> None:
    """Its fields have the values that the contract allows.

    Why: A run compares these names: a wrong one gives the wrong device, or none.
    Cure: Give `name` the spec's name, and the other fields the values that agentrig.hardware.Hardware describes.
    """
    made, spec = subject.made, subject.spec
    if not isinstance(made, Hardware):
        raise CheckFailed(f"it is a {type(made).__name__}: derive it from agentrig.hardware.Hardware")
    refuse(
        {
            f'its name is "{made.name}", and its spec\'s "{spec and spec.name}"': bool(spec) and made.name != spec.name,
            f'torch_device is "{made.torch_device}": the type without a number, such as cuda': (
                not made.torch_device or ":" in made.torch_device
            ),
            **{f'dtypes has "{dtype}"': dtype not in KNOWN_DTYPES for dtype in made.dtypes},
            "dtypes is empty": not made.dtypes,
            "attention is empty": not made.attention,
            f'visible_order is "{made.visible_order}"': made.visible_order not in ("any", "ascending"),
        }
    )


def check_environment(subject: HardwareSubject) -> None:
    """`environment` returns variables for every role, and changes nothing itself.

    Why: A run sets these variables before torch is imported; a value that is no text ends it.
    Cure: Return a mapping of text to text, the same at each call, for any context and for none.
    """
    for role, variables in subject.called(environments).items():
        where = f"`environment` for {role or 'no context'}"
        if not isinstance(variables, Mapping):
            raise CheckFailed(f"{where}: it returned {variables!r:.80}, which is no mapping")
        for k, v in variables.items():
            if not isinstance(k, str) or not isinstance(v, str):
                raise CheckFailed(f"{where}: {k}={v!r:.40}: the name or the value is no text")


def check_probe(subject: HardwareSubject) -> None:
    """`probe` returns a typed answer, with memory in bytes, twice the same, in time.

    Why: `--hardware auto`, the doctor and the learner decide by it: one that raises or changes leaves the hardware out,
        and memory in another unit refuses every model, or none.
    Cure: Return an agentrig.hardware.Probe: catch what drivers and tools raise, and say it in `problems`. Give each
        device its memory in bytes, or None if it is unknown.
    """
    first, again, seconds = subject.probes
    for found in (first, again):
        if not isinstance(found, Probe):
            raise CheckFailed(f"`probe` returned {found!r:.200}")
    if not isinstance(first.available, bool):
        raise CheckFailed(f"available is {first.available!r:.80}, which is neither True nor False")
    if first.available and not first.devices:
        raise CheckFailed("it is available, and `devices` is empty", "List the devices that a run may use.")
    for line in (*first.evidence, *first.problems):
        if not isinstance(line, str):
            raise CheckFailed(f"a line of `evidence` or `problems` is no text: {line!r:.80}")
    for device in first.devices:
        size = device.memory
        if size is not None and not (type(size) is int and LEAST_MEMORY <= size <= MOST_MEMORY):
            raise CheckFailed(f"{device.name} states a memory of {size!r:.80}; a device has 64 MiB to 64 TiB, in bytes")
    if first != again:
        raise CheckFailed(f"two probes in a row found different things: {first} and {again}")
    if seconds > PROBE_S:
        raise CheckFailed(
            f"`probe` took {seconds:.0f} s", f"Give every tool a timeout: at most {PROBE_S:.0f} s in all."
        )


@needs(check_probe)
def check_hidden(subject: HardwareSubject) -> None:
    """With an empty `visible_devices` variable no device is there.

    Why: A run would take devices that the user, or the cluster, has given to somebody else.
    Cure: List only the devices that the variable shows; with an empty one there is none.
    """
    variable = subject.made.visible_devices
    if not variable:
        raise CheckSkipped("it names no variable that hides its devices (visible_devices)")
    if not subject.probe.available:
        raise CheckSkipped("it is not available here, so there is nothing to hide")
    found = subject.fresh(probes, **{variable: ""})[0]
    if found.available or found.devices:
        raise CheckFailed(f'with {variable}="" it is still available, with {len(found.devices)} devices')


@needs(check_probe, check_declares)
def check_explains(subject: HardwareSubject) -> None:
    """Hardware that is not available is refused with a message.

    Why: The user gets this text when the hardware is not there; without words nobody knows what to repair.
    Cure: Put what was looked at into `evidence`, and what is broken into `problems` as `what: cure`.
    """
    found = subject.probe
    bare = [line for line in found.problems if ":" not in line.strip(" :") or not line.rpartition(":")[2].strip()]
    if bare:
        raise CheckFailed(f"a problem has no cure: {bare[0]!r}")
    if not any(line.strip() for line in (*found.evidence, *found.problems)):
        raise CheckFailed("`evidence` and `problems` are empty: nobody learns what was looked at")
    if found.available:
        return
    try:
        select(subject.made.name, [subject.made])
    except HardwareError as error:
        if subject.made.name not in str(error):
            raise CheckFailed(f"the refusal does not name it: {error}") from None
        return
    raise CheckFailed("a run would start on it although its probe found nothing in a fresh interpreter")


def check_stacks(subject: HardwareSubject) -> None:
    """Its stacks and overrides can be read and compared.

    Why: The doctor tells by them which versions work together, and verl gets the overrides.
    Cure: Name distributions with PEP 440 specifiers, and say where the set was tested.
    """
    made, versions = subject.made, installed(("torch", "verl", "vllm", "transformers"))
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


@needs(check_declares, check_probe)
def check_doctor(subject: HardwareSubject) -> None:
    """Its own checks run and return findings, for a run that uses it and for one that does not.

    Why: The doctor of every run calls its checks: one that raises is reported as a problem of this plugin.
    Cure: Return agentrig.findings.Finding objects: evidence always, a cure for each problem and warning.
    """
    from agentrig.doctor import Situation

    spec = subject.spec
    if spec is None or not spec.checks:
        raise CheckSkipped("its spec brings no checks for the doctor")
    versions = installed(("torch", "vllm", "transformers", "torch_npu", "vllm-ascend", "flash-attn"))
    for used in (subject.made, Cpu(), None):
        situation = Situation(hardware=used, candidates=[subject.made], versions=versions)
        for check in spec.checks:
            where = f"{getattr(check, '__name__', check)} in a run on {used.name if used else 'unknown hardware'}"
            try:
                findings = list(check(situation))
            except AgentrigError:
                raise
            except Exception as error:
                raise CheckFailed(f"{where} raised {type(error).__name__}: {error}") from error
            for finding in findings:
                if not isinstance(finding, Finding):
                    raise CheckFailed(f"{where} returned {finding!r:.80}, which is no Finding")
                if finding.result not in get_args(FindingResult) or not finding.check or not finding.evidence:
                    wanted = f"result is one of {', '.join(get_args(FindingResult))}, with evidence"
                    raise CheckFailed(f"{where} returned {finding}: {wanted}")
                if finding.result in ("problem", "warning") and not finding.cure:
                    raise CheckFailed(f"{where} found a {finding.result} and names no cure: {finding.evidence}")


@needs(check_probe, check_environment)
def check_computes(subject: HardwareSubject) -> None:
    """If the probe says that it is available, torch computes on it, in the environment that it asks for.

    Why: A probe that says yes on a device that torch cannot use lets every run start and fail.
    Cure: Say in `problems` what is missing (driver, torch build), or correct torch_device.
    """
    if not subject.compute:
        raise CheckSkipped("compute=False")
    if not subject.probe.available:
        raise CheckSkipped("it is not available here")
    if found := subject.fresh(computed):
        raise CheckFailed(found)
