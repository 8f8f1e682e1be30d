"""`agentrig doctor`: one table of what was checked, and exit status 0 only when the recipe could start."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import click

from agentrig.building import built
from agentrig.cli import asked, configured, stdout_to_stderr
from agentrig.doctor import cluster, content, devices, modelscope, place, software
from agentrig.doctor.findings import Check, Finding, Result, Situation
from agentrig.errors import AgentrigError, place_of
from agentrig.hardware import Hardware, HardwareError, Probe, installed, select
from agentrig.hardware.choice import probed

CHECKS: Sequence[Check] = (
    software.check_python,
    software.check_plugins,
    devices.check_hardware,
    devices.check_visible,
    devices.check_algorithm,
    software.check_requirements,
    software.check_stack,
    devices.check_torch,
    software.check_verl_vllm,
    devices.check_memory,
    cluster.check_ray_cluster,
    cluster.check_ray_sockets,
    cluster.check_ray_token,
    content.check_model,
    modelscope.check_modelscope,
    content.check_data,
    content.check_cores,
    place.check_write,
    place.check_disk,
    place.check_shared_memory,
    place.check_ports,
    place.check_open_files,
)


def examine(
    source: str | None = None,
    *,
    overrides: Sequence[str] = (),
    uses: Mapping[str, str | None] | None = None,
    files: Sequence[str] = (),
    strict_plugins: bool = False,
) -> list[Finding]:
    """Run every check, of the core and of the plugins, for a recipe.

    Args:
        source: A recipe's name or a run file; None for the default recipe.
        overrides: `section.key=value`.
        uses: Other components by kind, as in `--agent` and `--hardware`.
        files: Python files that are plugins too.
        strict_plugins: Whether a plugin that fails to load is a problem.
    """
    situation, findings = look(source, overrides=overrides, uses=uses or {}, files=files, strict_plugins=strict_plugins)
    for check in CHECKS:
        findings += _run(check, situation)
    brought: list[Callable[[], Iterable[Check]]] = [h.checks for h in situation.candidates]
    brought.append(partial(_own_checks, situation))
    for bring in brought:
        try:
            checks = list(bring())
        except Exception as error:  # somebody's plugin: what it would have checked is not known
            evidence = f"{bring!r:.80} raised {type(error).__name__}: {error}{place_of(error)}"
            findings.append(
                Finding(check="checks", result="warning", evidence=evidence, cure="report it to its author")
            )
            continue
        for check in checks:
            findings += _run(check, situation)
    return findings


def _own_checks(situation: Situation) -> Iterator[Check]:
    """Yield the checks that the recipe's other components bring in their specs' field `checks`."""
    for component in situation.plan.components.values() if situation.plan else ():
        yield from getattr(component.spec, "checks", ())


def _run(check: Check, situation: Situation) -> list[Finding]:
    try:
        return list(check(situation))
    except Exception as error:  # a broken check is a finding, and must not hide the others'
        name = getattr(check, "__name__", repr(check)).removeprefix("check_").replace("_", " ")
        evidence = f"the check itself failed: {type(error).__name__}: {error}"
        return [Finding(check=name, result="problem", evidence=evidence, cure="report it to whoever wrote the check")]


def look(
    source: str | None,
    *,
    overrides: Sequence[str],
    uses: Mapping[str, str | None],
    files: Sequence[str],
    strict_plugins: bool,
) -> tuple[Situation, list[Finding]]:
    """Gather what the checks look at; a wrong recipe or an impossible hardware is a finding, not an end."""
    from agentrig.config import resolve

    findings: list[Finding] = []
    plan = chosen = None
    hardware = uses.get("hardware")
    settings: dict[str, Any] = {"overrides": overrides, "files": files, "strict_plugins": strict_plugins}
    try:
        plan = resolve(source, uses=uses, **settings)
        plan.components["hardware"]  # `auto` looks now
    except HardwareError as error:
        findings.append(_refusal("hardware", error))
        try:  # the rest of the recipe can be checked all the same
            plan = resolve(source, uses={**uses, "hardware": "cpu"}, **settings)
        except AgentrigError as second:
            plan = None
            findings.append(_refusal("recipe", second))
    except AgentrigError as error:
        plan = None
        findings.append(_refusal("recipe", error))
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
            findings.append(_refusal("hardware", error))
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
    )
    return situation, findings


def _probe(hardware: Hardware) -> Probe:
    try:
        return probed(hardware)
    except HardwareError as error:  # somebody's plugin: the others are examined all the same
        first, _, cure = str(error).partition("\n")
        return Probe(available=False, problems=(f"{first.replace(': ', ' ')}: {cure.strip() or 'report it'}",))


def _candidates(plan: Any, findings: list[Finding]) -> list[Hardware]:
    """Build every installed hardware: the plan's own with its settings, the others with their defaults.

    One that can't be built is a finding, and keeps a run only from using it.
    """
    from agentrig.plugins import load

    registry = plan.registry if plan is not None else load()
    found = []
    for component in registry.components("hardware"):
        spec: Any = component.spec
        mine = plan is not None and plan.components["hardware"] == component
        try:
            found.append(built(component, plan.configs["hardware"] if mine else spec.config()))
        except Exception as error:
            first = str(error).partition("\n")[0]
            cure = f"report it to whoever wrote plugin {component.plugin}"
            result: Result = "problem" if mine else "warning"
            findings.append(Finding(check=f"{spec.name} devices", result=result, evidence=first, cure=cure))
    return found


def _refusal(check: str, error: AgentrigError) -> Finding:
    first, _, rest = str(error).partition("\n")
    return Finding(check=check, result="problem", evidence=first, cure=" ".join(rest.split()))


def could_start(findings: Sequence[Finding]) -> bool:
    """Whether nothing that was found would keep the recipe from running."""
    return not any(f.result == "problem" for f in findings)


def _table(findings: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = {"ok": "green", "warning": "yellow", "problem": "red", "skipped": "dim"}
    table = Table(show_lines=False, pad_edge=False)
    for column in ("check", "result", "evidence", "cure"):
        table.add_column(column, overflow="fold", no_wrap=column in ("check", "result"))
    for f in findings:
        table.add_row(Text(f.check), Text(f.result, style=colours[f.result]), Text(f.evidence), Text(f.cure))
    Console().print(table)


@click.command()
@configured
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object instead of the table.")
def doctor(words: Sequence[str], as_json: bool, **options: Any) -> None:
    """Find what would keep a recipe from running here.

    Takes what `agentrig train` takes; exit status 0 only when that could start.

    \b
    agentrig doctor qwen --hardware cuda
    """
    with stdout_to_stderr(as_json):
        findings = examine(**asked(words, options))
    ok = could_start(findings)
    if as_json:
        click.echo(json.dumps({"could_start": ok, "findings": [attrs.asdict(f) for f in findings]}, indent=2))
    else:
        _table(findings)
        counts = {r: sum(f.result == r for f in findings) for r in ("ok", "warning", "problem", "skipped")}
        click.echo(
            ", ".join(f"{n} {r}" for r, n in counts.items()) + (": it could start" if ok else ": it cannot start")
        )
    if not ok:
        raise SystemExit(1)
