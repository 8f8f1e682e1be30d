"""The plugin system: hooks, specs, and where they are found and looked up."""

from agentrig._moved import former

__getattr__ = former(__name__)
