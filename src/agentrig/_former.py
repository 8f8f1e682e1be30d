"""Public functions and values of 0.1 that nothing replaces one to one; each works until 0.3.

`agentrig._moved` hands them out under their former paths, with a warning. Nothing else imports this module.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from packaging.requirements import Requirement

from agentrig.findings import Finding, Situation
from agentrig.plan import Plan
from agentrig.plugins import composing
from agentrig.plugins.specs import KINDS
from agentrig.processes.ends import RunSignals, handling
from agentrig.report.canvas import LIGHT, Colors
from agentrig.rollouts import Rollout
from agentrig.run.trends import Guards

REGISTER_HOOKS = {kind: spec.hook for kind, spec in KINDS.items()}
"""Kind of a component to the hook that collects it."""

STAND_INS = Colors(
    series=tuple(f"#0a0b{i:02x}" for i in range(1, 7)), ink="#0a0c01", muted="#0a0c02", grid="#0a0c03", paper="#0a0c04"
)
"""Colours in which plots for the page were drawn, to be replaced by CSS variables."""

CAPTIONS = {
    "accuracy": "Accuracy by step: the share of answers that are correct. Held-out tasks are measured once before and "
    "once after training.",
    "reward": "Mean reward: of a step's rollouts that were scored (pale: each step; strong: mean of 16), in validation "
    "(dots) and on the held-out tasks (diamonds).",
    "time": "Wall time of a step by part.",
    "lengths": "Mean tokens of a trained call, and trained calls a rollout. Pale: each step; strong: mean of 16.",
}
"""Captions of the four plots that the page had."""

START_S = 30.0
"""Seconds that a worker of the sandbox could take to start; now the query's own deadline counts."""


def for_page(svg: str, name: str) -> str:
    """Return matplotlib's SVG as an element of a page: no prologue, metadata, ids or sizes; colours by name."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" role="img">', svg, count=1)
    svg = svg.replace('role="img"', f'role="img" aria-label="{name} plot"', 1)
    variables = {color: f"var(--series-{i})" for i, color in enumerate(LIGHT.series, 1)}
    for part in ("ink", "muted", "grid", "paper"):
        variables[getattr(LIGHT, part)] = f"var(--{part})"
    for color, variable in variables.items():
        svg = svg.replace(color, variable)
    return svg


def check_weights(changes: Sequence[float], *, step: int) -> None:
    """Stop if the weights are not finite, or did not change in two steps.

    Args:
        changes: The L2 norms of the change of the weights, one for each step up to this one.
        step: The training step.

    Raises:
        agentrig.errors.RunStopped: The message says what was observed.
    """
    lines = [_line(step - i, {"weight_change": change}) for i, change in enumerate(reversed(changes))][::-1]
    if lines:
        Guards.after(lines).check(lines[-1])


def check_finite(metrics: Mapping[str, float], before: int, *, step: int) -> int:
    """Stop if the loss or the gradient norm was NaN or infinite in two steps in a row.

    Args:
        metrics: The step's metrics.
        before: Number of consecutive steps up to the previous one of which that is true.
        step: The training step.

    Returns:
        That number, this step included.

    Raises:
        agentrig.errors.RunStopped: It was so in two steps in a row.
    """
    guards = Guards(not_finite=before)
    line = _line(step, {name: value for name, value in metrics.items() if name != "weight_change"})
    guards.add(line)
    guards.check(line)
    return guards.not_finite


def _line(step: int, metrics: Mapping[str, float]) -> dict[str, Any]:
    """Return the line of `metrics.jsonl` of a step with different rewards and no failures."""
    return {"step": step, "rollouts": 2, "failures": {}, "reward": 0.5, "reward_std": 0.5, "algorithm": dict(metrics)}


def accuracy_of(rollouts: Sequence[Rollout]) -> float | None:
    """Return the share of judged rollouts with a value of at least 1; None without any."""
    values = [r.value for r in rollouts if r.value is not None]
    return sum(value >= 1.0 for value in values) / len(values) if values else None


def audit_reward(plan: Plan) -> Any:
    """Return the reward that is only logged, with its default settings."""
    component, config = plan.audits[0]
    return composing.build(component, config, plan.registry)[0]


@contextmanager
def interrupt_stops(session: Any) -> Iterator[None]:
    """Make the first Ctrl-C end the run after the current step, and the second one end it immediately."""
    with handling(RunSignals(session, session.runtime.abort)):
        yield


def uses_ray(situation: Situation) -> bool:
    """Whether the recipe's algorithm comes from a distribution that requires ray or verl."""
    if situation.plan is None:
        return False
    try:
        lines = importlib.metadata.requires(situation.plan.components["algorithm"].distribution) or ()
    except importlib.metadata.PackageNotFoundError:  # a plugin in a file
        return False
    return any(Requirement(line).name in ("ray", "verl") for line in lines)


def open_files() -> int:
    """Return how many files this process may have open."""
    import resource  # not on Windows

    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def check_open_files(situation: Situation) -> Iterator[Finding]:
    """Is the limit of open files high enough for Ray with vLLM?"""
    limit = open_files()
    low = limit < 4096 and uses_ray(situation)
    yield Finding(
        check="open files",
        result="warning" if low else "ok",
        evidence=f"at most {limit} ({os.cpu_count()} cores)",
        cure="ulimit -n 65536" if low else "",
    )
