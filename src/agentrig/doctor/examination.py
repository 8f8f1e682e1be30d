"""Collects the input of the checks, and runs them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any

from agentrig.doctor import agent, content, devices, imports, machine, software
from agentrig.errors import AgentrigError
from agentrig.findings import Check, Finding, Result, Situation
from agentrig.hardware import Hardware, HardwareError, Probe, installed, select
from agentrig.hardware.choice import probed
from agentrig.plugins.building import built
from agentrig.plugins.loading import load

CHECKS: Sequence[Callable[[Any], Iterable[Finding]]] = (
    software.check_python,
    software.check_plugins,
    devices.check_hardware,
    devices.check_visible,
    devices.check_algorithm,
    devices.check_server,
    software.check_requirements,
    software.check_stack,
    imports.check_imports,
    devices.check_torch,
    devices.check_memory,
    content.check_model,
    content.check_data,
    content.check_cores,
    machine.check_write,
    machine.check_disk,
    machine.check_shared_memory,
    machine.check_ports,
    machine.check_gateway,
    machine.check_models,
    agent.check_agent,
)


def examine(source: str | None = None, **asked: Any) -> list[Finding]:
    """Run every check, of the core and of the plugins, for a recipe; the arguments are `agentrig.plan.resolve`'s."""
    situation, findings = look(source, **asked)
    with ThreadPoolExecutor(2) as together:  # several checks wait for a subprocess
        for found in together.map(
            _run, [check for check in CHECKS if check is not agent.check_agent], repeat(situation)
        ):
            findings += found
    for check in _own_checks(situation):
        findings += _run(check, situation)
    if agent.check_agent in CHECKS and could_start(findings):  # it starts a runner, and would fail for their reasons
        findings += _run(agent.check_agent, situation)
    return findings


def _own_checks(situation: Situation) -> Iterator[Check]:
    """Yield the checks in the specs of the installed hardware and of the recipe's other components."""
    components = dict(situation.plan.components) if situation.plan else {}
    hardware = situation.plan.registry.components("hardware") if situation.plan else load().components("hardware")
    observers = [c for c, _ in situation.plan.observers] if situation.plan else []
    for component in (*hardware, *(c for kind, c in components.items() if kind != "hardware"), *observers):
        yield from getattr(component.spec, "checks", ())


def _run(check: Check, situation: Situation) -> list[Finding]:
    try:
        return list(check(situation))
    except Exception as error:  # a broken check is a finding and does not stop the other checks
        name = getattr(check, "__name__", repr(check)).removeprefix("check_").replace("_", " ")
        evidence = f"the check itself failed: {type(error).__name__}: {error}"
        return [Finding.problem(name, evidence, cure="report it to the author of the check")]


def look(
    source: str | None, *, uses: Mapping[str, str | None] | None = None, **settings: Any
) -> tuple[Situation, list[Finding]]:
    """Collect the input of the checks; a wrong recipe or unusable hardware gives a finding, not an error."""
    from agentrig.plan import resolve

    uses = uses or {}
    findings: list[Finding] = []
    plan = chosen = None
    hardware = uses.get("hardware")
    try:
        plan = resolve(source, uses=uses, **settings)
        plan.components["hardware"], plan.components["server"]  # resolves `auto`
    except HardwareError as error:
        findings.append(Finding.of_error("hardware", error))
        try:  # the rest of the recipe can still be checked
            plan = resolve(source, uses={**uses, "hardware": "cpu"}, **settings)
        except AgentrigError as second:
            plan = None
            findings.append(Finding.of_error("recipe", second))
    except AgentrigError as error:
        plan = None
        findings.append(Finding.of_error("recipe", error))
    candidates = _candidates(plan, findings)
    if plan is not None and not findings:
        name = plan.components["hardware"].spec.name
        chosen = next((h for h in candidates if h.name == name), None)
    elif hardware and hardware != "auto":
        chosen = next((h for h in candidates if h.name == hardware), None)
    elif plan is None:
        try:
            chosen = select("auto", candidates)
        except HardwareError as error:
            findings.append(Finding.of_error("hardware", error))
    versions = installed(software.STACK)
    if chosen is not None:
        versions.update(chosen.host_versions())
    situation = Situation(
        hardware=chosen,
        candidates=candidates,
        probes={h.name: _probe(h) for h in candidates},
        plan=plan,
        versions=versions,
        environ=dict(os.environ),
        directory=Path(plan.run.directory if plan else "runs"),
        asked={"source": source, "uses": dict(uses), **settings},
    )
    return situation, findings


def _probe(hardware: Hardware) -> Probe:
    try:
        return probed(hardware)
    except HardwareError as error:  # a broken plugin: still examine the others
        first = str(error).partition("\n")[0]
        return Probe(available=False, problems=(f"{first}: report it to the author of the plugin",))


def _candidates(plan: Any, findings: list[Finding]) -> list[Hardware]:
    """Build every installed hardware: the plan's own with its settings, the others with their defaults.

    Hardware that can't be built gives a finding; it is a problem only if the run uses it.
    """
    registry = plan.registry if plan is not None else load()
    found = []
    for component in registry.components("hardware"):
        spec: Any = component.spec
        mine = plan is not None and plan.components["hardware"] == component
        try:
            found.append(built(component, plan.configs["hardware"] if mine else spec.config()))
        except Exception as error:
            first = str(error).partition("\n")[0]
            cure = f"report it to the author of plugin {component.plugin}"
            result: Result = "problem" if mine else "warning"
            findings.append(Finding(check=f"{spec.name} devices", result=result, evidence=first, cure=cure))
    return found


def could_start(findings: Sequence[Finding]) -> bool:
    """Whether the recipe can start: no finding is a problem."""
    return not any(f.result == "problem" for f in findings)
