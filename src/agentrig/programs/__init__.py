"""Agents that are programs: a command line in any language, run once for each rollout."""
