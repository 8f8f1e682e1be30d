"""A run, from start to end."""

from agentrig._moved import former

__getattr__ = former(__name__)
