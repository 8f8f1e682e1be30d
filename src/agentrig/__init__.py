"""agentrig trains the model inside an agent by reinforcement learning; every part is a plugin."""

from __future__ import annotations

import os
import signal
import sys


def end_at_once(number: int, frame: object) -> None:
    """Handle Ctrl-C while the command imports: end without a traceback. Nothing has begun that could be left over."""
    os._exit(128 + number)


# A process that imports agentrig keeps its own handler; so do the command's own processes, by their `orig_argv`.
_COMMAND = sys.orig_argv[1:3] == ["-m", "agentrig"] or os.path.basename("".join(sys.orig_argv[1:2])) == "agentrig"
if _COMMAND and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, end_at_once)

from typing import TYPE_CHECKING

import pluggy

from agentrig.adapters import Triplet
from agentrig.agents import Outcome
from agentrig.endpoints import Endpoint
from agentrig.errors import AgentFailure, AgentrigError
from agentrig.plugins.specs import (
    AdapterSpec,
    AgentSpec,
    AlgorithmSpec,
    CreditSpec,
    HardwareSpec,
    ObserverSpec,
    RecipeSpec,
    RewardSpec,
    RunnersSpec,
    ServerSpec,
    TasksSpec,
)
from agentrig.prompting import prompts
from agentrig.rewards import Score
from agentrig.secrets import Secret
from agentrig.settings import setting
from agentrig.tasks import Task
from agentrig.traces import Span, Trace
from agentrig.tracing.recorder import reward, span

if TYPE_CHECKING:
    from pathlib import Path

    from agentrig.view.notebook import LoadedRun

__version__ = "0.2.0.dev0"

hookimpl = pluggy.HookimplMarker("agentrig")
"""Marks a function as an implementation of one of agentrig's hooks."""


def load_run(path: Path | str) -> LoadedRun:
    """Return a run directory for a notebook: figures, rollouts and traces as pandas frames, plots, the diagnosis.

    It works while the run goes on, and on a directory that is damaged, of an earlier version, or copied from elsewhere:
    what is missing is left out and listed in `missing`.

    Raises:
        AgentrigError: It is no run directory.

    Example:
        ```python
        run = agentrig.load_run("runs/mini-20260101-120000")
        run.steps["reward"].plot()
        run.rollouts("report", step=0)
        ```
    """
    from agentrig.view.notebook import load_run as load

    return load(path)


__all__ = [
    "AdapterSpec",
    "AgentFailure",
    "AgentSpec",
    "AgentrigError",
    "AlgorithmSpec",
    "CreditSpec",
    "Endpoint",
    "HardwareSpec",
    "ObserverSpec",
    "Outcome",
    "RecipeSpec",
    "RewardSpec",
    "RunnersSpec",
    "Score",
    "Secret",
    "ServerSpec",
    "Span",
    "Task",
    "TasksSpec",
    "Trace",
    "Triplet",
    "__version__",
    "hookimpl",
    "load_run",
    "prompts",
    "reward",
    "setting",
    "span",
]
