"""Runs what was written for Agent Lightning, unchanged: one line makes a spec of each component.

```python
import agentrig_lightning as lightning


@hookimpl
def register_agents():
    yield lightning.agent(MyLitAgent, name="mine", summary="My LitAgent, unchanged.")
```
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from agentrig import AgentSpec, RunnersSpec, hookimpl
from agentrig_lightning.adapters import adapter
from agentrig_lightning.agents import agent
from agentrig_lightning.algorithms import LightningAlgorithmConfig, algorithm
from agentrig_lightning.imports import replace_verl, skip_litellm
from agentrig_lightning.instances import Factory
from agentrig_lightning.tasks import tasks

if TYPE_CHECKING:
    from agentrig_lightning.trainer import Trainer

skip_litellm()
replace_verl()

__all__ = ["Factory", "LightningAlgorithmConfig", "Trainer", "adapter", "agent", "algorithm", "tasks"]


def __getattr__(name: str) -> Any:
    if name != "Trainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from agentrig_lightning.trainer import Trainer  # with Agent Lightning

    return Trainer


@hookimpl
def register_agents() -> Iterable[AgentSpec]:
    """Register `agent-lightning-1`."""
    from agentrig_lightning.v1.config import LightningV1Config

    def build(config: Any) -> Any:
        from agentrig_lightning.v1.agent import build

        return build(config)

    yield AgentSpec(
        name="agent-lightning-1",
        summary="An agent that was written for the gateway of Agent Lightning 1.x.",
        config=LightningV1Config,
        build=build,
        calls="gateway",
        whole_rows=True,
        prompts=None,
    )


@hookimpl
def register_runners() -> Iterable[RunnersSpec]:
    """Register `lightning`."""
    from agentrig_lightning.joining import LightningRunners, check_gateway, wanted

    def build(config: Any) -> Any:
        from agentrig_lightning.store_pool import serving_pool

        return partial(serving_pool, settings=config)

    yield RunnersSpec(
        name="lightning",
        summary="Processes of this machine, and runners that join through Agent Lightning's store.",
        config=LightningRunners,
        build=build,
        wanted=wanted,
        checks=[check_gateway],
    )
