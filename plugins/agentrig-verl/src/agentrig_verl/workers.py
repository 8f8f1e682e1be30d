"""Ray workers: the environment and the setup function that hardware needs, chained with existing ones."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from agentrig.errors import ConfigError
from agentrig.hardware import Context, Hardware

SETUP_VARIABLE = "AGENTRIG_WORKER_SETUP"
"""The functions that `set_up_worker` calls, `package:function` each, separated by commas."""

HOOK = "worker_process_setup_hook"


def ray_environment(
    hardware: Hardware, versions: Mapping[str, str], existing: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return a Ray `runtime_env` with the environment and set-up function of a hardware added.

    A job has one environment for all its actors, those that train and those that serve the model, so it
    holds what either role needs.

    Args:
        versions: Installed versions by distribution.
        existing: A runtime_env to extend: its variables win, and its set-up hook is called first.
    """
    runtime: dict[str, Any] = dict(existing or {})
    variables: dict[str, str] = {}
    for role in ("worker", "rollout"):
        variables |= hardware.environment(Context(role=role, versions=versions))
    variables |= runtime.get("env_vars", {})
    setup = hardware.worker_setup(versions)
    if setup is not None:
        before = runtime.get(HOOK)
        if callable(before):
            runtime[HOOK] = _chained(before, setup)
        else:
            # Ray takes a dotted path, which cannot carry arguments: the functions travel in a variable.
            chain = [before, setup] if before and before != set_up_worker_path() else [setup]
            inherited = variables.get(SETUP_VARIABLE)
            variables[SETUP_VARIABLE] = ",".join([*([inherited] if inherited else []), *chain])
            runtime[HOOK] = set_up_worker_path()
    if variables:
        runtime["env_vars"] = variables
    return runtime


def set_up_worker_path() -> str:
    """Return the dotted path of `set_up_worker`, in Ray's format."""
    return f"{__name__}.{set_up_worker.__name__}"


def set_up_worker() -> None:
    """Call the functions named by `AGENTRIG_WORKER_SETUP`; Ray calls this in every new worker process.

    Raises:
        ConfigError: One of them does not exist. Ray then fails the worker with this message.
    """
    for target in filter(None, os.environ.get(SETUP_VARIABLE, "").split(",")):
        resolve(target)()


def resolve(target: str) -> Callable[[], None]:
    """Import `package:function` (Ray's form `package.function` too)."""
    module, _, name = target.partition(":") if ":" in target else target.rpartition(".")
    try:
        function: Callable[[], None] = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f'the worker set-up function "{target}" cannot be loaded: {error}') from error
    return function


def _chained(first: Callable[[], Any], target: str) -> Callable[[], None]:
    def both() -> None:
        first()
        resolve(target)()

    return both
