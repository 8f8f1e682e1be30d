"""Tries the imports of a run in a subprocess: metadata can't tell whether an import works."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from typing import Any

from agentrig.findings import Finding, Situation
from agentrig.hardware.tools import ask
from agentrig.plugins.observing import build_observers
from agentrig.text import account_of, cut

ASKED = "AGENTRIG_DOCTOR_ASKED"
"""The environment variable that passes the doctor's arguments to the subprocess, as JSON."""

TRY = "from agentrig.doctor.imports import main; main()"

TIMEOUT_S = 90.0
"""Time limit of the imports, in seconds; on a cold disk they read several GB."""

RUNTIME = ("agentrig.run.session", "agentrig.audit.auditor")
"""What every run imports besides its components."""


def check_imports(situation: Situation) -> Iterator[Finding]:
    """Can a run import what it needs, and build its agent, reward, adapter and algorithm?"""
    if situation.plan is None or situation.asked is None:
        return
    environ = {**situation.environ, ASKED: json.dumps(situation.asked)}
    answer = ask(TRY, environ=environ, timeout_s=TIMEOUT_S)
    cure = "fix the requirements above, or reinstall the package that the error names"
    if not answer.ok:
        yield situation.failure("imports", "the subprocess that tried the imports of a run failed", answer, cure=cure)
        return
    failed: Mapping[str, str] = answer.data["failed"]
    for what, error in failed.items():
        yield Finding.problem("imports", f"{what}: {error}", cure=cure)
    if not failed:
        yield Finding.ok("imports", "a run can import all that it needs")


def main() -> None:
    """Try the imports, in the doctor's subprocess; print a JSON object `failed`: import to error."""
    from agentrig.plan import resolve

    asked = json.loads(os.environ.pop(ASKED))
    failed = {}
    for what, step in _steps(resolve(**asked)):
        try:
            step()
        except BaseException as error:  # SystemExit too: a module may end the interpreter
            failed[what] = cut(" ".join(account_of(error, installed=True).split()), 500)
    print(json.dumps({"failed": failed}), flush=True)
    os._exit(0)  # what was imported may have started threads


def _steps(plan: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    for module in RUNTIME:
        yield f"import {module} (every run does)", partial(import_module, module)
    for kind in ("agent", "reward", "adapter"):
        yield f"build {kind} {plan.components[kind].spec.name}", partial(plan.build, kind)
    algorithm = plan.components["algorithm"].spec
    yield f"build algorithm {algorithm.name}", partial(algorithm.build, plan.configs["algorithm"])
    for component, config in plan.observers:
        yield f"build observer {component.spec.name}", partial(build_observers, [(component, config)])
