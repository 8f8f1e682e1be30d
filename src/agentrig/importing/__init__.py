"""Traces of production as demonstrations: `agentrig import-traces`."""
