"""Agents outside the runner: a program in any language, run for each rollout, or a service that gets each by HTTP."""
