"""Wraps components that were written for Agent Lightning 0.3 as agentrig specs, in one line each.

```python
@hookimpl
def register_agents():
    yield lightning.agent(MyLitAgent, name="mine", summary="My LitAgent, unchanged.")
```
"""

from agentrig.lightning.adapters import adapter
from agentrig.lightning.agents import agent, tracer
from agentrig.lightning.algorithms import LightningAlgorithmConfig, algorithm
from agentrig.lightning.instances import Factory
from agentrig.lightning.tasks import tasks
from agentrig.lightning.trainer import Trainer
from agentrig.lightning_import import replace_verl, skip_litellm

skip_litellm()
replace_verl()

__all__ = ["Factory", "LightningAlgorithmConfig", "Trainer", "adapter", "agent", "algorithm", "tasks", "tracer"]
