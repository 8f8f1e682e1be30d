"""The plan by which a runner builds its agent; `agentrig.pools` has the jobs that it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from agentrig.agents import Agent


@attrs.frozen(kw_only=True)
class AgentPlan:
    """How a runner process builds its agent: by name, so that only plain values are sent.

    Attributes:
        environment: Names or patterns of the variables that the agent gets beside `agentrig.processes.confine.BASE`.
    """

    name: str
    config: Mapping[str, Any]
    files: Sequence[str] = ()
    block: Sequence[str] = ()
    environment: Sequence[str] = ()

    def build(self) -> Agent:
        """Load the plugins and build the agent."""
        from agentrig.plugins.building import built

        _, component, config = self._found("agent")
        agent: Agent = built(component, config)
        return agent

    def _found(self, kind: str) -> tuple[Any, Any, Any]:
        from agentrig.plugins.loading import load
        from agentrig.settings import structure

        registry = load(files=self.files, block=self.block)
        component = registry.find(kind, self.name)
        config: Any = structure(component.spec.config, self.config, owner=self.name, section=kind)
        return registry, component, config
