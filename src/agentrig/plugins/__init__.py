"""The plugin system: hooks, specs, loading and lookup."""

from agentrig._moved import former

__getattr__ = former(__name__)
