"""agentrig trains the model inside an agent by reinforcement learning; every part is a plugin."""

from __future__ import annotations

import pluggy

from agentrig import _moved
from agentrig.adapters import Triplet
from agentrig.agents import Outcome
from agentrig.endpoints import Endpoint
from agentrig.errors import AgentFailure, AgentrigError
from agentrig.plugins.specs import (
    AdapterSpec,
    AgentSpec,
    AlgorithmSpec,
    HardwareSpec,
    ObserverSpec,
    RecipeSpec,
    RewardSpec,
    RunnersSpec,
    ServerSpec,
    TasksSpec,
)
from agentrig.rewards import Score
from agentrig.secrets import Secret
from agentrig.settings import setting
from agentrig.tasks import Task
from agentrig.traces import Span, Trace
from agentrig.tracing.recorder import span

_moved.install()

__version__ = "0.2.0.dev0"

hookimpl = pluggy.HookimplMarker("agentrig")
"""Marks a function as an implementation of one of agentrig's hooks."""

__all__ = [
    "AdapterSpec",
    "AgentFailure",
    "AgentSpec",
    "AgentrigError",
    "AlgorithmSpec",
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
    "setting",
    "span",
]
