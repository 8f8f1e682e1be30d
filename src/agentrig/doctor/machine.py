"""Checks of the machine: disk, shared memory, write access, ports."""

from __future__ import annotations

import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import attrs

from agentrig.doctor.devices import shape_of, workload
from agentrig.endpoints import models_of, port_taken
from agentrig.errors import AgentrigError
from agentrig.findings import Finding, Situation
from agentrig.hardware.memory import GB
from agentrig.learners import StepSettings
from agentrig.run.directory import check_vacant, run_name
from agentrig.run.saving import at_once, writes_of
from agentrig.runners.pools import check_machine

LEAST_DISK = GB // 2
"""A run's metrics, rollouts and report; checkpoints come on top."""

LEAST_SHM = 64 * 2**20
"""A container's default; torch's data loaders crash with a bus error in it."""


def existing(path: Path) -> Path:
    """Return the path itself, or its nearest ancestor that exists."""
    path = path.expanduser().absolute()
    return next(p for p in (path, *path.parents) if p.exists())


def check_write(situation: Situation) -> Iterator[Finding]:
    """Can the run directory be created there, with its name? A file is written and removed."""
    if (plan := situation.plan) is not None:
        try:
            check_vacant(situation.directory / run_name(plan.run, plan.recipe))
        except AgentrigError as error:
            yield Finding.of_error("run directory", error, cure="set another name: run.name=NAME")
            return
    place = existing(situation.directory)
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".agentrig-doctor-") as file:
            file.write(b"x" * 4096)
            file.flush()
    except OSError as error:
        yield Finding.problem(
            "run directory", f"{place}: {error.strerror}", cure="choose another place: run.directory=PATH"
        )
        return
    yield Finding.ok("run directory", f"{situation.directory} can be written to")


def check_disk(situation: Situation) -> Iterator[Finding]:
    """Is there disk space for the run: rollouts, and the checkpoints that it has at once?"""
    place = existing(situation.directory)
    free = shutil.disk_usage(place).free
    load = workload(situation)
    shape = shape_of(load.model) if load else None
    size = load.checkpoint if load else 0
    if load and shape and not size:  # weights in two bytes, and what the update holds
        size = int(shape.parameters * (2 + load.weight_bytes + load.trained * load.state_bytes))
    settings = situation.plan.configs["algorithm"] if situation.plan else None
    # An algorithm with a loop of its own keeps two, and deletes the older one after the next one is complete.
    number = at_once(*writes_of(settings)) if isinstance(settings, StepSettings) else 3
    need = LEAST_DISK + number * size
    evidence = f"{free / GB:.1f} GB free at {place}; about {need / GB:.1f} GB needed"
    if free < need:
        cure = "the run would end when a file is written: free some space, or run.directory=PATH on another disk"
        yield Finding.problem("disk", evidence, cure=cure)
    else:
        yield Finding.ok("disk", evidence)


def check_shared_memory(situation: Situation, place: Path = Path("/dev/shm")) -> Iterator[Finding]:
    """Is there shared memory for torch's workers?"""
    if not place.is_dir():
        return
    usage = shutil.disk_usage(place)
    evidence = f"{usage.free / GB:.2f} of {usage.total / GB:.2f} GB free in {place}"
    if usage.free <= LEAST_SHM:
        yield Finding.warning(
            "shared memory",
            evidence,
            cure="start the container with more (--shm-size=16g), or delete leftover files there",
        )
    else:
        yield Finding.ok("shared memory", evidence)


def check_ports(situation: Situation) -> Iterator[Finding]:
    """Can a run's processes reach each other, and are the ports free that the configuration names?"""
    try:
        check_machine()
    except AgentrigError as error:
        yield Finding.of_error("ports", error)
        return
    wanted: dict[str, int] = {}
    for kind, config in situation.plan.configs.items() if situation.plan else ():
        for key, port in attrs.asdict(config, recurse=False).items():
            if key.endswith("port") and isinstance(port, int) and port:
                wanted[f"{kind}.{key}"] = port
    if situation.environ.get("MASTER_PORT", "").isdigit():
        wanted["MASTER_PORT"] = int(situation.environ["MASTER_PORT"])
    busy = {name: port for name, port in wanted.items() if port_taken(port)}
    for name, port in busy.items():
        yield Finding.problem(
            "ports", f"port {port} ({name}) is taken", cure="stop the process that listens there, or set another port"
        )
    if not busy:
        named = ", ".join(f"{port} ({name})" for name, port in wanted.items())
        yield Finding.ok("ports", f"free: {named}" if named else "servers can listen here")


def check_gateway(situation: Situation) -> Iterator[Finding]:
    """If the run has a gateway: can it listen where it is to, and do runners of other machines reach it?"""
    if situation.plan is None or not situation.plan.uses_gateway:
        return
    wanted = situation.plan.gateway
    where = f"{wanted.host}:{wanted.port}" if wanted.port else wanted.host
    family = socket.AF_INET6 if ":" in wanted.host else socket.AF_INET
    try:
        with socket.create_server((wanted.host, wanted.port), family=family):
            pass
    except OSError as error:
        cure = "set gateway.host to an address of this machine, and gateway.port to a free port, or leave them out"
        yield Finding.problem("gateway", f"the gateway cannot listen on {where}: {error.strerror or error}", cure=cure)
        return
    yield Finding.ok("gateway", f"the gateway can listen on {where}")


def check_models(situation: Situation) -> Iterator[Finding]:
    """Does each model that is not trained answer? Rollouts that ask a dead one fail."""
    models = situation.plan.gateway.named if situation.plan is not None else {}
    for name, model in models.items():
        if model is None:
            continue
        endpoint, section = model.endpoint(name), f"gateway.models.{name}"
        try:
            models_of(endpoint.base_url, endpoint.api_key, key_from=f"{section}.api_key_env")
        except AgentrigError as error:
            cure = f"start its server, or correct {section}.base_url or {section}.api_key_env"
            yield Finding.problem(f"model {name}", str(error), cure=cure)
        else:
            yield Finding.ok(f"model {name}", f"{endpoint.base_url} answers")
